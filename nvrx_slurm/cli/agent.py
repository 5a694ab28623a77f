"""``nvrx-agent``: one per node, started by nvrx-srun through srun; nothing to call by hand."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys

import click

from nvrx_slurm.agent.private_places import new_private_dir
from nvrx_slurm.wire import rpc


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
        private_dir = new_private_dir(os.environ)
    except OSError as error:
        raise click.ClickException(f"no place for this node's private files: {error}") from error
    logging.basicConfig(format=f"nvrx-agent {node}: %(message)s", level=logging.WARNING)

    def agent() -> int:
        # After the fork: gRPC starts threads when it is used, and must not be forked.
        import asyncio

        # Its notes about closed connections would look like errors in the job's output.
        environ = dict(os.environ)
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

        from nvrx_slurm.agent.agent import Agent, AgentConfig

        config = AgentConfig(coordinator, token, fence, node, private_dir, environ)
        try:
            return asyncio.run(Agent(config).run())
        finally:
            # The guardian does it too; whichever of the two outlives the other.
            shutil.rmtree(private_dir, ignore_errors=True)

    from nvrx_slurm.agent.guardian import run_guarded

    sys.exit(run_guarded(agent, private_dir))
