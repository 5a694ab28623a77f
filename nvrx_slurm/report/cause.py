"""Who ended a cycle: the verdict's culprit, completed by what was seen of it; the rest is its cascade."""

from __future__ import annotations

import re
from dataclasses import replace

from nvrx_slurm.journal import CycleAttributed, FaultDetected, FaultKind, HangEvidence, Verdict, VerdictAction
from nvrx_slurm.report.collect import CycleNotes
from nvrx_slurm.report.model import Attributed, Cause, Culprit, HangFound, SeenFault

TRACES = "traces"
"""What saw a rank that Flight Recorder traces name, and no deadline."""
_OF_ONE_RANK = (
    FaultKind.EXIT,
    FaultKind.SIGNAL,
    FaultKind.OOM,
    FaultKind.HANG,
    FaultKind.REQUEST,
    FaultKind.SLOW,
    FaultKind.NO_PROGRESS,
)


def is_fault(cycle: CycleNotes, stop_at: float | None) -> bool:
    """Tell whether a fault ended the cycle.

    Ranks that fall after the job was asked to stop are none, unless a verdict names one.
    """
    if cycle.verdict is not None:
        verdict = cycle.verdict[1]
        if verdict.action is VerdictAction.RESTART or verdict.kind is not None:
            return True
    return bool(cycle.faults) and (stop_at is None or cycle.faults[0][0] < stop_at)


def ended_by_fault_at(cycle: CycleNotes) -> float:
    """Return when the first fault of a faulty cycle was seen."""
    if cycle.faults:
        return cycle.faults[0][0]
    assert cycle.verdict is not None
    return cycle.verdict[0]


def cause_of(cycle: CycleNotes) -> tuple[Cause, tuple[SeenFault, ...]]:
    """Return the cause of a faulty cycle, and everything else that was seen to fail in it."""
    faults = [event for _, event in cycle.faults]
    verdict = cycle.verdict[1] if cycle.verdict else None
    named = verdict is not None and (verdict.node, verdict.rank, verdict.kind) != (None, None, None)
    if verdict is None or not named:
        seen = faults[0] if faults else None
        cause = _seen_as_cause(seen) if seen is not None else Cause(None, None, None)
    else:
        seen = _match(verdict, faults)
        cause = _from_verdict(verdict, seen, faults)
    shown = _shown_by_traces(cycle.attributed)
    if cause.kind is FaultKind.HANG and shown is not None and shown[1] != cause.rank:
        # Heartbeats name one of those that wait.
        node, rank, why = shown
        cause = replace(cause, node=node, rank=rank, detector=TRACES, detail=why)
        seen = None
    rest = tuple(seen_fault(at, event) for at, event in cycle.faults if event is not seen)
    return cause, rest


def _shown_by_traces(found: CycleAttributed | None) -> tuple[str | None, int, str] | None:
    """Return node and rank that Flight Recorder traces hold to be the cause, and what they show."""
    culprits = found.culprits if found is not None else []
    return next(((c.node, c.rank, c.why) for c in culprits if c.by_traces and c.rank is not None), None)


def attributed_of(found: CycleAttributed) -> Attributed:
    """Return the event as a value of the report."""
    return Attributed(
        category=found.category,
        says=found.says,
        action=found.action,
        rule=found.rule,
        why=found.why,
        confidence=found.confidence,
        where=found.where,
        culprits=tuple(Culprit(c.kind, c.id, c.confidence, c.node, c.rank, c.why) for c in found.culprits),
        exclude=tuple(found.exclude),
        file=found.file,
    )


def seen_fault(at: float, event: FaultDetected) -> SeenFault:
    """Return ``event`` as a value of the report."""
    return SeenFault(
        at=at,
        kind=event.kind,
        node=event.node,
        detector=event.detector,
        rank=event.rank,
        exit=event.exit,
        signal=event.signal,
        detail=event.detail,
    )


def hang_found(event: HangEvidence) -> HangFound:
    """Return ``event`` as a value of the report."""
    return HangFound(
        node=event.node,
        rank=event.rank,
        silent_s=event.silent_s,
        sections=tuple(event.sections.items()),
        process_state=event.process_state,
        wchan=event.wchan,
        frame=innermost_frame(event.stacks),
        file=event.file,
        note=event.note,
    )


_MAIN_THREAD = re.compile(r"^(?:Current thread 0x|Thread .*MainThread)")
_FRAME_OF_PY_SPY = re.compile(r"^\s+(?P<what>\S.*?) \((?P<file>[^()]*):(?P<line>\d+)\)$")
_FRAME_OF_FAULTHANDLER = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<what>.+)$')


def innermost_frame(stacks: str) -> str | None:
    """Return ``all_reduce (distributed_c10d.py:2501)`` for the main thread; None when no stack tells."""
    lines = iter(stacks.splitlines())
    if not any(_MAIN_THREAD.match(line) for line in lines):
        return None
    frame = next(lines, "")
    match = _FRAME_OF_PY_SPY.match(frame) or _FRAME_OF_FAULTHANDLER.match(frame)
    if match is None:
        return None
    return f"{match['what']} ({match['file'].rpartition('/')[2]}:{match['line']})"


def _seen_as_cause(seen: FaultDetected) -> Cause:
    return Cause(
        node=seen.node,
        rank=seen.rank,
        kind=seen.kind,
        exit=seen.exit,
        signal=seen.signal,
        detector=seen.detector,
        detail=seen.detail,
    )


def _same_place(verdict: Verdict, fault: FaultDetected) -> bool:
    return verdict.node in (None, fault.node) and verdict.rank in (None, fault.rank)


def _match(verdict: Verdict, faults: list[FaultDetected]) -> FaultDetected | None:
    """Find what was seen of the verdict's culprit: the same kind if possible, else at the same place."""
    there = [fault for fault in faults if _same_place(verdict, fault)]
    exact = [fault for fault in there if verdict.kind in (None, fault.kind)]
    if verdict.node is None and verdict.rank is None:
        there = exact
    return next(iter(exact + there), None)


def _from_verdict(verdict: Verdict, seen: FaultDetected | None, faults: list[FaultDetected]) -> Cause:
    kind = verdict.kind or (seen.kind if seen else None)
    cause = Cause(node=verdict.node, rank=verdict.rank, kind=kind, from_verdict=True)
    if seen is None:
        return cause
    rank = verdict.rank
    alone = sum(1 for fault in faults if _same_place(verdict, fault) and fault.kind is seen.kind) == 1
    if rank is None and kind in _OF_ONE_RANK and alone:
        rank = seen.rank
    same_kind = kind is seen.kind
    return Cause(
        node=verdict.node or seen.node,
        rank=rank,
        kind=kind,
        exit=seen.exit if same_kind else None,
        signal=seen.signal if same_kind else None,
        detector=seen.detector,
        detail=seen.detail,
        from_verdict=True,
    )
