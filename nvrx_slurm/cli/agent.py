"""``nvrx-agent``: one per node, started by nvrx-srun through srun; nothing to call by hand."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys

import click

from nvrx_slurm.agent.node_hold import NodeInUseError, hold_name, hold_node
from nvrx_slurm.agent.private_places import (
    RAM_DIR_VARIABLE,
    new_private_dir,
    ram_dir_for_checkpoints,
    remove_places,
)
from nvrx_slurm.wire import rpc

_PREDECESSOR_S = 30.0
"""Above the time in which an agent that is cut off ends its ranks (:data:`rpc.COORDINATOR_SILENCE_MS`)."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run this node's ranks for a Coordinator. nvrx-srun starts one per node; do not start it yourself."""
    missing = [
        name
        for name in (rpc.COORDINATOR_VARIABLE, rpc.TOKEN_VARIABLE, rpc.FENCE_VARIABLE)
        if not os.environ.get(name)
    ]
    if missing:
        raise click.UsageError(f"{', '.join(missing)} not set: nvrx-agent is started by nvrx-srun")
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    coordinator = os.environ.pop(rpc.COORDINATOR_VARIABLE)
    token = os.environ.pop(rpc.TOKEN_VARIABLE)
    fence = os.environ.pop(rpc.FENCE_VARIABLE)
    try:
        # Held by guardian and agent until the last of both has ended.
        held = hold_node(hold_name(os.environ, node), _PREDECESSOR_S)
    except (NodeInUseError, OSError) as error:
        raise click.ClickException(f"{node}: {error}") from error
    ram_dir = ram_dir_for_checkpoints(os.environ, node)
    try:
        private_dir = new_private_dir(os.environ, node)
    except OSError as error:
        raise click.ClickException(f"no place for this node's private files: {error}") from error
    logging.basicConfig(format=f"nvrx-agent {node}: %(message)s", level=logging.WARNING)

    def agent() -> int:
        # After the fork: gRPC starts threads when it is used, and must not be forked.
        import asyncio

        # Its notes about closed connections would look like errors in the job's output.
        environ = os.environ | ({RAM_DIR_VARIABLE: str(ram_dir)} if ram_dir else {})
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

        from nvrx_slurm.agent.agent import Agent, AgentConfig

        config = AgentConfig(coordinator, token, fence, node, private_dir, environ)
        try:
            code = asyncio.run(Agent(config).run())
            forget_memory(code)
            return code
        finally:
            # The guardian does it too; whichever of the two outlives the other.
            shutil.rmtree(private_dir, ignore_errors=True)

    def forget_memory(code: int) -> None:
        """Remove the checkpoints in memory, unless another agent of the job is to follow on this node."""
        if code != EXIT_COORDINATOR_SILENT and ram_dir:
            remove_places([ram_dir])

    from nvrx_slurm.agent.exit_codes import EXIT_COORDINATOR_SILENT
    from nvrx_slurm.agent.guardian import run_guarded
    from nvrx_slurm.interpreter import command_for

    with held:
        code = run_guarded(agent, private_dir)
    forget_memory(code)
    if code == EXIT_COORDINATOR_SILENT and os.environ.get("NVRX_RUN_DIR"):
        os.environ.update(
            {rpc.COORDINATOR_VARIABLE: coordinator, rpc.TOKEN_VARIABLE: token, rpc.FENCE_VARIABLE: fence}
        )
        # The same task of the step goes on as the one who finds out who is in charge.
        successor = command_for("nvrx_slurm.cli.successor")
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(successor[0], successor)
    sys.exit(code)
