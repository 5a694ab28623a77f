"""What an agent's task of the job step becomes when the host of the Coordinator has fallen silent."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from nvrx_slurm import linux
from nvrx_slurm.agent.guardian import ASKED_TO_GO
from nvrx_slurm.agent.private_places import ram_dir_path, remove_places
from nvrx_slurm.coordinator.handover import HandoverError, load_handover
from nvrx_slurm.coordinator.lease import Fence
from nvrx_slurm.coordinator.lease_watch import Join, Leave
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.coordinator.successor import Successor, Won
from nvrx_slurm.interpreter import console_script
from nvrx_slurm.slurm import ScontrolClient
from nvrx_slurm.wire import rpc

_EXIT_LEFT = 1


def main() -> None:
    """Find out who is in charge, and do what follows; the environment is that of an agent."""
    linux.set_process_name("nvrx-successor")
    run_dir = RunDir(Path(os.environ["NVRX_RUN_DIR"]))
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    try:
        handover = load_handover(run_dir.handover)
    except HandoverError as error:
        _leave(node, str(error))
    slurm = ScontrolClient()
    for sig in ASKED_TO_GO:
        signal.signal(sig, lambda *_: _leave(node, "asked to go"))
    match Successor(run_dir, handover, node, Fence.parse(os.environ[rpc.FENCE_VARIABLE]), slurm).run():
        case Leave(why=why):
            _leave(node, why)
        case Join(lease=lease):
            _become_agent(lease.address, lease.fence)
        case Won() as won if not handover.standby:
            from nvrx_slurm.coordinator.takeover import requeue_job

            requeued = requeue_job(won, node, run_dir, handover, slurm)
            _forget_memory(node)
            sys.exit(0 if requeued else _EXIT_LEFT)
        case Won() as won:
            from nvrx_slurm.coordinator.job import run_job
            from nvrx_slurm.coordinator.takeover import continue_output, specification

            linux.set_process_name("nvrx-srun")
            for sig in ASKED_TO_GO:
                signal.signal(sig, signal.SIG_DFL)
            token = os.environ.pop(rpc.TOKEN_VARIABLE)
            continue_output(handover, run_dir)
            spec = specification(won, node, token, run_dir, handover, slurm, os.environ)
            sys.exit(run_job(spec))


def _become_agent(address: str, fence: str) -> NoReturn:
    os.environ.update({rpc.COORDINATOR_VARIABLE: address, rpc.FENCE_VARIABLE: fence})
    agent = console_script("nvrx-agent")
    os.execv(agent, [agent])


def _forget_memory(node: str) -> None:
    """Remove the checkpoints in memory: no agent of the job follows on this node."""
    remove_places([ram_dir_path(os.environ, node)])


def _leave(node: str, why: str) -> NoReturn:
    _forget_memory(node)
    print(f"nvrx-agent {node}: {why}", file=sys.stderr, flush=True)
    # At once: a thread may hang in a file system that does not answer.
    os._exit(_EXIT_LEFT)
