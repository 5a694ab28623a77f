"""The faults. Each tells the moment just before it strikes."""

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
HEARTBEAT_S = 5.0
HANG_SIGNAL, EXCEPTION_SIGNAL = signal.SIGRTMIN, signal.SIGRTMIN + 1
"""What recovery_worker.py takes as the order to hang and to raise."""


class FaultError(RuntimeError):
    """The fault could not be brought about; the message is one sentence."""


class Case(enum.Enum):
    RANK_SIGKILL = "rank_sigkill"
    RANK_EXCEPTION = "rank_exception"
    RANK_HANG = "rank_hang"
    NODE_LOSS = "node_loss"

    @property
    def title(self) -> str:
        match self:
            case Case.RANK_SIGKILL:
                return f"{self.value}: SIGKILL of rank {VICTIM_RANK} of 8 on 4 nodes"
            case Case.RANK_EXCEPTION:
                return f"{self.value}: an exception in rank {VICTIM_RANK} of 8 on 4 nodes"
            case Case.RANK_HANG:
                return (
                    f"{self.value}: rank {VICTIM_RANK} of 8 on 4 nodes sleeps for ever, "
                    f"counted from its deadline, {HEARTBEAT_S:g} s after its last heartbeat"
                )
            case Case.NODE_LOSS:
                return f"{self.value}: power loss of rank {VICTIM_RANK}'s node of 4, one spare node"

    @property
    def spares(self) -> int:
        return 1 if self is Case.NODE_LOSS else 0

    @property
    def heartbeat_s(self) -> float | None:
        """The heartbeat time-out that the launchers are given; None: their default."""
        return HEARTBEAT_S if self is Case.RANK_HANG else None


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
            return _signal(victim, signal.SIGKILL)
        case Case.RANK_EXCEPTION:
            return _signal(victim, EXCEPTION_SIGNAL)
        case Case.RANK_HANG:
            return _signal(victim, HANG_SIGNAL)
        case Case.NODE_LOSS:
            moment = time.time()
            cluster.kill_node(victim.node)
            return moment


def _signal(victim: Process, number: int) -> float:
    """Send it from outside of the node: a command inside it would take time to start."""
    for pid in psutil.pids():
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        try:
            if _pid_inside(pid, victim.pid_ns) == victim.pid:
                moment = time.time()
                signal.pidfd_send_signal(handle, number)
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
