"""The two faults. Both tell the moment just before they strike."""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.recovery.marks import Process
from nvrx_slurm.devcluster import DevCluster

VICTIM_RANK = 3


class FaultError(RuntimeError):
    """The fault could not be brought about; the message is one sentence."""


class Case(enum.Enum):
    RANK_SIGKILL = "rank_sigkill"
    NODE_LOSS = "node_loss"

    @property
    def title(self) -> str:
        match self:
            case Case.RANK_SIGKILL:
                return f"{self.value}: SIGKILL of rank {VICTIM_RANK} of 8 on 4 nodes"
            case Case.NODE_LOSS:
                return f"{self.value}: power loss of rank {VICTIM_RANK}'s node of 4, one spare node"

    @property
    def spares(self) -> int:
        return 1 if self is Case.NODE_LOSS else 0


def pick_victim(processes: Sequence[Process], keep: str) -> Process:
    """Return rank VICTIM_RANK's process, or another rank's where that one runs on the node ``keep``.

    Raises:
        FaultError: no rank runs on another node.
    """
    elsewhere = [p for p in processes if p.node != keep]
    if not elsewhere:
        raise FaultError(f"no rank runs on another node than {keep}")
    return min(elsewhere, key=lambda p: (abs(p.rank - VICTIM_RANK), p.rank))


def strike(case: Case, victim: Process, cluster: DevCluster) -> float:
    """Bring the fault about; return when.

    Raises:
        FaultError: the victim is gone already.
        DevClusterError: the node cannot be switched off.
    """
    match case:
        case Case.RANK_SIGKILL:
            return _kill(victim)
        case Case.NODE_LOSS:
            moment = time.time()
            cluster.kill_node(victim.node)
            return moment


def _kill(victim: Process) -> float:
    """SIGKILL from outside of the node: a command inside it would take time to start."""
    for pid in psutil.pids():
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        try:
            if _pid_inside(pid, victim.pid_ns) == victim.pid:
                moment = time.time()
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return moment
        finally:
            os.close(handle)
    raise FaultError(f"rank {victim.rank} on {victim.node} is gone before it could be killed")


def _pid_inside(pid: int, namespace: str) -> int | None:
    """The process id that ``pid`` has in that PID namespace, None if it is not in it."""
    process = Path("/proc") / str(pid)
    try:
        if os.readlink(process / "ns" / "pid") != namespace:
            return None
        status = (process / "status").read_text()
    except OSError:
        return None
    return next((int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:")), None)
