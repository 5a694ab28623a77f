"""What the machine's events are as faults."""

from __future__ import annotations

import signal

from nvrx_slurm.coordinator.steps import ControlRequested, RankExited, RankGivenUp
from nvrx_slurm.coordinator.unhealthy import Complaint
from nvrx_slurm.journal import FaultDetected, FaultKind
from nvrx_slurm.pace import StragglerVerdict


def lost_fault(node: str, detector: str, why: str) -> FaultDetected:
    return FaultDetected(kind=FaultKind.NODE_LOST, node=node, detector=detector, detail=why)


def start_fault(node: str, detector: str, why: str) -> FaultDetected:
    """Return the fault of a node where workers, or the store that they need, can't be started."""
    return FaultDetected(kind=FaultKind.START, node=node, detector=detector, detail=why)


def unhealthy_fault(node: str, complaint: Complaint) -> FaultDetected:
    return FaultDetected(kind=FaultKind.UNHEALTHY, node=node, detector="health", detail=complaint.what)


def request_fault(event: ControlRequested) -> FaultDetected:
    """Return the fault of a node that one of its own ranks wants out."""
    return FaultDetected(
        kind=FaultKind.REQUEST, node=event.node, rank=event.rank, detector="rank", detail=event.why
    )


def given_up_fault(event: RankGivenUp) -> FaultDetected:
    """Return the fault of a rank that its own in-process restart kills."""
    return FaultDetected(
        kind=FaultKind.HANG, node=event.node, rank=event.rank, detector="in-process", detail=event.why
    )


def slow_fault(verdict: StragglerVerdict) -> FaultDetected:
    """Return the fault of a node with a rank that is slow for good."""
    return FaultDetected(
        kind=FaultKind.SLOW,
        node=verdict.node,
        rank=verdict.rank,
        detector="straggler",
        detail=slow_clause(verdict),
    )


def slow_clause(verdict: StragglerVerdict) -> str:
    """Return what is slow there: ``forward takes 41.2 ms longer than elsewhere, in 3 of 3 reports``."""
    return (
        f"{verdict.section} takes {verdict.lost_ms:.3g} ms longer than elsewhere, in {verdict.reports} of "
        f"{verdict.of_reports} reports"
    )


def exit_fault(event: RankExited) -> FaultDetected:
    """Return the fault of a rank that exited with anything but 0."""
    name = None
    if event.exit < 0:
        try:
            name = signal.Signals(-event.exit).name
        except ValueError:
            name = f"signal {-event.exit}"
    kind = FaultKind.EXIT if name is None else FaultKind.OOM if event.oom else FaultKind.SIGNAL
    return FaultDetected(
        kind=kind,
        node=event.node,
        rank=event.rank,
        exit=event.exit if name is None else None,
        signal=name,
        detector="child",
        detail=event.oom or event.detail,
    )
