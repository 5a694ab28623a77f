"""From a journal's records to a :class:`JobReport`: pure, and defined for every sequence of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.journal import (
    NodeExcluded,
    NodeJoined,
    NodeLost,
    NotRequeued,
    Record,
    Requeued,
    VerdictAction,
)
from nvrx_slurm.report.cause import attributed_of, cause_of, ended_by_fault_at, hang_found, is_fault
from nvrx_slurm.report.collect import REQUEUE_CODE, AttemptNotes, CycleNotes, collect
from nvrx_slurm.report.model import (
    AttemptReport,
    CycleEnd,
    CycleReport,
    JobReport,
    JobState,
    NodeOut,
    Phase,
    ReadState,
    RequeueTaken,
    ResumeSource,
    Span,
    VerdictTaken,
)
from nvrx_slurm.report.recovery import detect_seconds, recovery_after
from nvrx_slurm.report.spans import Course, time_share, walk
from nvrx_slurm.report.timeline import timeline

SILENT_S = 60.0
"""A job that wrote nothing for longer, and no end, is not called running unless Slurm says that it runs."""


def build_report(
    records: Iterable[Record],
    now: float,
    *,
    in_slurm: bool | None = None,
    read: ReadState | None = None,
) -> JobReport:
    """Return what the journal tells.

    Args:
        records: the journal, in its order.
        now: Unix seconds; only used while no end is recorded.
        in_slurm: whether Slurm still has the job; None when that is not known.
        read: what reading the journal met besides events.
    """
    read = read or ReadState()
    attempts, fenced = collect(records)
    read = replace(read, fenced=fenced)
    if not attempts:
        return JobReport(job="", state=JobState.EMPTY, activity=None, now=now, in_slurm=in_slurm, read=read)
    last = attempts[-1]
    state = _state(last, now, in_slurm)
    until = max(now, last.last_at) if state is JobState.RUNNING else last.over_at
    courses = _courses(attempts)
    spans, phase, redone_known = walk(attempts, courses, until)
    spent = _spent(spans)
    cycles = tuple(_cycle(index, courses, attempts, spent, until) for index in range(len(courses)))
    lost, excluded = _nodes_out(attempts)
    report = JobReport(
        job=last.entries[-1].record.job,
        state=state,
        activity=phase if state is JobState.RUNNING else None,
        now=now,
        started_at=attempts[0].started_at,
        until=until,
        last_event_at=last.last_at,
        code=last.ended[1].code if last.ended else None,
        why=last.ended[1].why if last.ended else "",
        version=last.started.version if last.started else "",
        argv=tuple(last.started.argv) if last.started else (),
        attempts=tuple(_attempt(index, attempts) for index in range(len(attempts))),
        cycles=cycles,
        lost=lost,
        excluded=excluded,
        spans=spans,
        time=time_share(spans, redone_known),
        last_step=max((cycle.last_step for cycle in cycles if cycle.last_step is not None), default=None),
        in_slurm=in_slurm,
        read=read,
    )
    return replace(report, timeline=timeline(report, attempts))


def _spent(spans: Iterable[Span]) -> dict[tuple[int, Phase], float]:
    """Return the seconds of each phase by index of the cycle."""
    spent: dict[tuple[int, Phase], float] = {}
    for span in spans:
        if span.cycle is not None:
            key = (span.cycle, span.phase)
            spent[key] = spent.get(key, 0.0) + span.seconds
    return spent


def _state(last: AttemptNotes, now: float, in_slurm: bool | None) -> JobState:
    if last.ended is None:
        silent = now - last.last_at > SILENT_S
        gone = in_slurm is False or (silent and in_slurm is None)
        return JobState.NO_END if gone else JobState.RUNNING
    match last.ended[1].code:
        case 0:
            return JobState.FINISHED
        case code if code == REQUEUE_CODE and _not_requeued(last) is None:
            return JobState.REQUEUE
        case _ if last.stop is not None and not any(is_fault(c, last.stop[0]) for c in last.cycles[-1:]):
            return JobState.STOPPED
        case _:
            return JobState.FAILED


def _courses(attempts: list[AttemptNotes]) -> list[Course]:
    tells_steps = any(cycle.steps or cycle.loads for attempt in attempts for cycle in attempt.cycles)
    courses = []
    for attempt in attempts:
        for notes in attempt.cycles:
            newest = notes is attempt.cycles[-1]
            end, ended_at = _end(notes, attempt, newest=newest, final=attempt is attempts[-1])
            first = notes.first_step[0] if notes.first_step else None
            if first is not None and ended_at is not None and first > ended_at:
                first = None
            step, source = _resumed(notes, trained=first is not None, tells_steps=tells_steps)
            last_step = _last_step(notes, step)
            detect = detect_seconds(notes, first, ended_at) if end is CycleEnd.FAULT else None
            courses.append(Course(notes, attempt, end, ended_at, first, step, source, last_step, detect))
    return courses


def _end(
    notes: CycleNotes, attempt: AttemptNotes, *, newest: bool, final: bool
) -> tuple[CycleEnd, float | None]:
    stop_at = attempt.stop[0] if attempt.stop else None
    began = notes.started[0] if notes.started else attempt.started_at
    if is_fault(notes, stop_at):
        return CycleEnd.FAULT, max(began, ended_by_fault_at(notes))
    ends = [
        at
        for at in (
            stop_at,
            notes.stopped_at,
            notes.verdict[0] if notes.verdict else None,
            attempt.ended[0] if attempt.ended else None,
        )
        if at is not None
    ]
    if newest and attempt.ended is not None:
        end = CycleEnd.FINISHED if attempt.ended[1].code == 0 else CycleEnd.STOPPED
        return end, max(began, min(ends))
    if newest and attempt.stop is not None:
        return CycleEnd.STOPPED, max(began, min(ends))
    if newest and final:
        return CycleEnd.RUNNING, None
    return CycleEnd.CUT_OFF, max(began, notes.last_at)


def _resumed(
    notes: CycleNotes, *, trained: bool, tells_steps: bool
) -> tuple[int | None, ResumeSource | None]:
    """Return the step that the cycle resumed from, and how that is known."""
    first_at, first = notes.first_step or (None, None)
    loads = [event for at, event in notes.loads if first_at is None or at <= first_at]
    if not loads and first is not None and first.step is not None and trained:
        return max(0, first.step - 1), ResumeSource.FIRST_STEP
    loads = loads or [event for _, event in notes.loads[:1]]
    if loads:
        by_rank = {event.rank: event.step for event in loads}
        return min(by_rank.values()), ResumeSource.CHECKPOINT
    return (0, ResumeSource.START) if trained and tells_steps else (None, None)


def _last_step(notes: CycleNotes, resumed_from: int | None) -> int | None:
    # The last step before a fault is often written after it: agents tell it with their last words.
    steps = [step for _, step in notes.steps]
    if resumed_from is not None:
        steps.append(resumed_from)
    return max(steps, default=None)


def _cycle(
    index: int,
    courses: Sequence[Course],
    attempts: list[AttemptNotes],
    spent: Mapping[tuple[int, Phase], float],
    until: float,
) -> CycleReport:
    course = courses[index]
    notes = course.notes
    stopped = course.end is CycleEnd.STOPPED
    cause, cascade = cause_of(notes) if course.end is CycleEnd.FAULT else (None, ())
    started = notes.started[1] if notes.started else None
    return CycleReport(
        number=notes.number,
        attempt=course.attempt.number,
        started_at=notes.started[0] if notes.started else None,
        ready_at=notes.ready_at,
        first_step_at=course.first_step_at,
        ended_at=course.ended_at,
        end=course.end,
        world_size=started.world_size if started else None,
        nodes=tuple(started.nodes) if started else (),
        spares=tuple(started.spares) if started else (),
        cold=tuple(notes.cold),
        stop_signal=course.attempt.stop[1].by if stopped and course.attempt.stop else None,
        cause=cause,
        cascade=cascade,
        evidence=tuple(map(hang_found, notes.evidence)),
        verdict=_verdict(notes),
        attributed=None if notes.attributed is None else attributed_of(notes.attributed),
        resumed_from=course.resumed_from,
        resumed_by=course.resumed_by,
        last_step=course.last_step,
        saved=dict(notes.saved),
        trained_s=spent.get((index, Phase.TRAINING), 0.0),
        redone_s=spent.get((index, Phase.REDOING), 0.0),
        recovery=recovery_after(index, courses, attempts, until),
    )


def _verdict(notes: CycleNotes) -> VerdictTaken | None:
    if notes.verdict is None:
        return None
    at, verdict = notes.verdict
    return VerdictTaken(at, verdict.action, verdict.rule, verdict.why)


def _attempt(index: int, attempts: list[AttemptNotes]) -> AttemptReport:
    notes = attempts[index]
    restarts = [
        cycle for cycle in notes.cycles if cycle.verdict and cycle.verdict[1].action is VerdictAction.RESTART
    ]
    return AttemptReport(
        number=notes.number,
        started_at=notes.started_at,
        ended_at=notes.ended[0] if notes.ended else None,
        last_event_at=notes.last_at,
        code=notes.ended[1].code if notes.ended else None,
        why=notes.ended[1].why if notes.ended else "",
        stop_signal=notes.stop[1].by if notes.stop else None,
        queue_s=max(0.0, notes.started_at - attempts[index - 1].over_at) if index else None,
        host=notes.started.host if notes.started else "",
        nodes=tuple(notes.started.nodes) if notes.started else (),
        max_restarts=notes.started.max_restarts if notes.started else None,
        restarts=len(restarts),
        requeued=_requeued(notes),
        not_requeued=_not_requeued(notes),
    )


def _requeued(notes: AttemptNotes) -> RequeueTaken | None:
    match notes.requeue:
        case (at, Requeued() as event):
            return RequeueTaken(
                at, tuple(event.excluded), event.start_in_s, tuple(event.warnings), event.held
            )
        case _:
            return None


def _not_requeued(notes: AttemptNotes) -> str | None:
    match notes.requeue:
        case (_, NotRequeued(why=why)):
            return why
        case _:
            return None


@dataclass
class _Outs:
    """Nodes that went out of the job, and came back."""

    found: list[NodeOut]

    def add(self, out: NodeOut) -> None:
        self.found.append(out)

    def back(self, node: str, at: float) -> None:
        self.found[:] = [
            replace(out, back_at=at) if out.node == node and out.back_at is None else out
            for out in self.found
        ]


def _nodes_out(attempts: list[AttemptNotes]) -> tuple[tuple[NodeOut, ...], tuple[NodeOut, ...]]:
    """Return the nodes lost and the nodes excluded, in order."""
    lost, excluded = _Outs([]), _Outs([])
    for attempt in attempts:
        for out in [*excluded.found]:  # an exclusion holds for one attempt
            excluded.back(out.node, attempt.started_at)
        for entry in attempt.entries:
            match entry.record.event:
                case NodeLost(node=node, why=why):
                    lost.add(NodeOut(node, entry.at, why, entry.record.cycle))
                case NodeExcluded(node=node, reason=reason):
                    excluded.add(NodeOut(node, entry.at, reason, entry.record.cycle))
                case NodeJoined(node=node):
                    lost.back(node, entry.at)
                case _:
                    pass
    return tuple(lost.found), tuple(excluded.found)
