"""From the moment that one cycle's training stood still to the next first step, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.report.collect import AttemptNotes, CycleNotes
from nvrx_slurm.report.model import CycleEnd, Recovery, RecoveryEnd
from nvrx_slurm.report.spans import Course


class _Phases:
    """Cuts the time from ``start`` at marks that may be missing, early or late."""

    def __init__(self, start: float, end: float) -> None:
        self._at = start
        self._end = end

    def until(self, mark: float | None) -> float | None:
        """Return the time from the last known mark to ``mark``."""
        if mark is None:
            return None
        mark = min(max(mark, self._at), self._end)
        seconds, self._at = mark - self._at, mark
        return seconds

    @property
    def left(self) -> float:
        """The time that no phase has yet."""
        return self._end - self._at


def detect_seconds(notes: CycleNotes, first_step_at: float | None, fault_at: float | None) -> float | None:
    """Return how long training had stood still when the first fault was seen; None when that is not known.

    ``stalled_s`` counts back from when the stop began, and never to before the cycle's first step. Steps that
    are written later than that contradict nothing: they come with heartbeats, and are told seconds later.
    """
    if fault_at is None or first_step_at is None or not notes.faults or notes.stopped is None:
        return None
    stopped_at, stopped = notes.stopped
    if stopped.stalled_s is None:
        return None
    stood_at = stopped_at - max(0.0, stopped.seconds) - stopped.stalled_s
    return min(max(0.0, fault_at - stood_at), max(0.0, fault_at - first_step_at))


def recovery_after(
    index: int, courses: Sequence[Course], attempts: Sequence[AttemptNotes], until: float
) -> Recovery | None:
    """Return what followed cycle ``index``, or None when there was nothing to recover from."""
    course = courses[index]
    start = course.stood_at
    following = courses[index + 1] if index + 1 < len(courses) else None
    if start is None or course.end is CycleEnd.FINISHED:
        return None
    if following is not None and following.attempt is not course.attempt and not course.attempt.goes_on:
        following = None  # started anew by a person: not this fault's recovery
    if course.end is CycleEnd.STOPPED and following is None:
        return None
    outcome, end = _outcome(course, following, attempts[-1], until)
    end = max(start, end)
    phases = _Phases(start, end)
    detect = None if course.detect_s is None else phases.until(course.ended_at)
    stop = phases.until(course.notes.stopped_at)
    queued = _queued(course, following, attempts)
    form = phases.until(_begun(following))
    queue = None
    if queued is not None:
        queue = min(queued, phases.left if form is None else form)
        form = None if form is None else form - queue
    ready = phases.until(following.notes.ready_at) if following else None
    first_step = phases.until(end) if outcome is RecoveryEnd.RESUMED else None
    resumed = following.resumed_from if following else None
    lost_steps = None if resumed is None or course.last_step is None else max(0, course.last_step - resumed)
    return Recovery(
        end=outcome,
        lost_s=end - start,
        detect_s=detect,
        stop_s=stop,
        queue_s=queue,
        form_s=form,
        ready_s=ready,
        first_step_s=first_step,
        steps_lost=lost_steps,
    )


def _begun(following: Course | None) -> float | None:
    """Return when the next cycle had its nodes or, where that is not recorded, a fault came before it."""
    if following is None:
        return None
    return following.notes.started[0] if following.notes.started else following.attempt.started_at


def _outcome(
    course: Course, following: Course | None, last: AttemptNotes, until: float
) -> tuple[RecoveryEnd, float]:
    if following is None and not course.attempt.goes_on:
        return RecoveryEnd.ENDED, course.attempt.over_at
    if following is None:
        return (RecoveryEnd.ENDED if last.ended else RecoveryEnd.ONGOING), until
    if following.first_step_at is not None:
        return RecoveryEnd.RESUMED, following.first_step_at
    if following.ended_at is None:
        return RecoveryEnd.ONGOING, until
    if following.end in (CycleEnd.FAULT, CycleEnd.CUT_OFF):
        return RecoveryEnd.FAILED_AGAIN, following.ended_at
    return RecoveryEnd.ENDED, following.ended_at


def _queued(course: Course, following: Course | None, attempts: Sequence[AttemptNotes]) -> float | None:
    """Return the time between attempts that lies between two cycles; None within one attempt."""
    first = attempts.index(course.attempt)
    if following is None and not course.attempt.goes_on:
        return None
    last = attempts.index(following.attempt) if following else len(attempts) - 1
    if first == last:
        return None
    return sum(
        max(0.0, attempts[position + 1].started_at - attempts[position].over_at)
        for position in range(first, last)
    )
