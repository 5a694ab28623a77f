"""Who is held to be the cause: of several faults the one that can't be a consequence of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.journal import FaultDetected, FaultKind
from nvrx_slurm.wire.messages import RankSnapshot

# What a rank dies of when another rank has died before: an exception from a collective, the NCCL watchdog's
# abort, somebody's SIGTERM.
_CASCADE_SIGNALS = frozenset({"SIGABRT", "SIGTERM", "SIGPIPE"})


@dataclass(frozen=True)
class Blame:
    fault: FaultDetected
    rule: str
    why: str
    """One sentence that names the rank and the node."""


def find_culprit(faults: Sequence[FaultDetected]) -> Blame:
    """Return the fault of a cycle that explains the others; among equals the first that was seen.

    A node that is lost, that is broken, or that a rank wants out explains everything; a signal that a cascade
    does not send explains exceptions on other ranks.

    Raises:
        ValueError: no faults.
    """
    if not faults:
        raise ValueError("there is no fault to blame")
    fault = min(faults, key=_order)
    rule = {
        FaultKind.NODE_LOST: "node-lost",
        FaultKind.REQUEST: "asked-for",
        FaultKind.UNHEALTHY: "unhealthy-node",
        FaultKind.SLOW: "slow-node",
        FaultKind.HANG: "hang",
        FaultKind.OOM: "out-of-memory",
        FaultKind.SIGNAL: "killed-by-signal",
        FaultKind.START: "start-failed",
        FaultKind.EXIT: "first-exit",
        FaultKind.NO_PROGRESS: "in-process",
    }[fault.kind]
    return Blame(fault, rule, describe(fault))


def _order(fault: FaultDetected) -> int:
    match fault.kind:
        case FaultKind.NODE_LOST | FaultKind.REQUEST | FaultKind.UNHEALTHY | FaultKind.SLOW:
            return 0
        case FaultKind.HANG:
            return 1
        case FaultKind.OOM:
            return 2
        case FaultKind.SIGNAL if fault.signal not in _CASCADE_SIGNALS:
            return 2
        case FaultKind.START:
            return 3
        case _:
            return 4


def may_be_the_nodes(fault: FaultDetected) -> bool:
    """Tell whether a bad node can have caused ``fault``, which was held to be the cause of its cycle's end.

    Never what a script does by itself or another rank's end brings about: an exit code, an abort, no memory.
    """
    match fault.kind:
        case FaultKind.NODE_LOST | FaultKind.HANG:
            return True
        case FaultKind.SIGNAL:
            return fault.signal not in _CASCADE_SIGNALS
        case FaultKind.START:
            return fault.detector == "start"
        case _:
            return False


def describe(fault: FaultDetected) -> str:
    """Return the fault as one clause."""
    where = f"rank {fault.rank} on {fault.node}" if fault.rank is not None else fault.node
    match fault.kind:
        case FaultKind.NODE_LOST:
            text = f"node {fault.node} lost"
        case FaultKind.HANG:
            text = f"{where} hung"
        case FaultKind.OOM:
            text = f"{where} was killed because memory ran out"
        case FaultKind.SIGNAL:
            text = f"{where} was killed by {fault.signal}"
        case FaultKind.START:
            text = f"{where} could not start"
        case FaultKind.EXIT:
            text = f"{where} exited with {fault.exit}"
        case FaultKind.REQUEST:
            text = f"{where} asked to exclude its node"
        case FaultKind.UNHEALTHY:
            text = f"node {fault.node} is unhealthy"
        case FaultKind.SLOW:
            text = f"{where} is slow"
        case FaultKind.NO_PROGRESS:
            text = f"{where} failed again and again"
    return f"{text} ({fault.detail})" if fault.detail else text


_DEAD_STATES = {"T": "stopped", "t": "traced", "Z": "dead"}


def find_hung_rank(snapshots: Sequence[RankSnapshot], first_stalled: int) -> tuple[int, str]:
    """Return the rank that holds the others up, and the evidence.

    When one rank hangs, the others soon wait for it in a collective and miss their deadlines too; whose
    passed first says little. In this order: a process that is stopped or dead; the rank that is behind others
    by at least one heartbeat; the only process stuck in the kernel; the only one that runs while all others
    sleep; the oldest heartbeat.
    """
    monitored = sorted((s for s in snapshots if s.monitored), key=lambda s: s.rank)
    if not monitored:
        return first_stalled, "its deadline passed first"
    dead = [s for s in monitored if s.process_state in _DEAD_STATES]
    if dead:
        return dead[0].rank, f"its process is {_DEAD_STATES[dead[0].process_state]}"
    fewest = min(s.heartbeats for s in monitored)
    behind = [s for s in monitored if s.heartbeats == fewest]
    if len(behind) < len(monitored):
        oldest = max(behind, key=lambda s: s.age_s)
        return oldest.rank, f"it is behind the others, with {fewest} heartbeats"
    for state, evidence in (("D", "is stuck in the kernel"), ("R", "runs")):
        alone = [s for s in monitored if s.process_state == state]
        if len(alone) == 1 and len(monitored) > 1:
            return alone[0].rank, f"its process {evidence} while all others wait"
    oldest = max(monitored, key=lambda s: s.age_s)
    return oldest.rank, f"its last heartbeat is the oldest, {oldest.age_s:.3f} s ago"
