"""Where the wall time went: one phase at every moment, without gaps.

Training is the time from a cycle's ``first_step`` to its end, less the time that a fault took to be noticed.
Steps that had been done before are not counted as training: theirs is the time until the cycle's step count
passes the highest step known before it, interpolated linearly between two step reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nvrx_slurm.journal import VerdictAction
from nvrx_slurm.report.collect import AttemptNotes, CycleNotes
from nvrx_slurm.report.model import CycleEnd, Phase, ResumeSource, Span, TimeShare


@dataclass(frozen=True)
class Course:
    """What the walk needs to know about a cycle beside its notes."""

    notes: CycleNotes
    attempt: AttemptNotes
    end: CycleEnd
    ended_at: float | None
    first_step_at: float | None
    resumed_from: int | None
    resumed_by: ResumeSource | None
    last_step: int | None
    detect_s: float | None
    """How long training had stood still before the fault that ended it was seen."""

    @property
    def stood_at(self) -> float | None:
        """When its training was over: the end, or earlier where a fault was seen late."""
        return None if self.ended_at is None else self.ended_at - (self.detect_s or 0.0)


@dataclass
class _StepsDone:
    """The highest step that any cycle of this training has reached."""

    highest: int | None = None
    trained: bool = False
    """Some cycle has trained, whether it told its steps or not."""

    def add(self, step: int | None) -> None:
        if step is not None:
            self.highest = step if self.highest is None else max(self.highest, step)


class _Walk:
    """Collects spans; time never runs backwards, empty spans are left out."""

    def __init__(self, start: float) -> None:
        self.spans: list[Span] = []
        self._at = start
        self._phase = Phase.STARTING
        self._cycle: int | None = None

    def until(self, at: float) -> None:
        """Extend the present phase to ``at``."""
        if at > self._at:
            last = self.spans[-1] if self.spans else None
            if last is not None and (last.phase, last.cycle) == (self._phase, self._cycle):
                self.spans[-1] = Span(last.phase, last.start, at, last.cycle)
            else:
                self.spans.append(Span(self._phase, self._at, at, self._cycle))
            self._at = at

    def stay(self, at: float, phase: Phase) -> None:
        """Spend the time up to ``at`` in ``phase``, for the present cycle."""
        self._phase = phase
        self.until(at)

    def turn(self, at: float, phase: Phase, cycle: int | None = None) -> None:
        """Begin ``phase`` at ``at``."""
        self.until(at)
        self._phase, self._cycle = phase, cycle


def walk(
    attempts: list[AttemptNotes], courses: list[Course], until: float
) -> tuple[tuple[Span, ...], Phase, bool]:
    """Return the spans up to ``until``, the phase at their end, and whether all repeated steps are known."""
    path = _Walk(attempts[0].started_at)
    done = _StepsDone()
    known = True
    phase = Phase.STARTING
    for position, attempt in enumerate(attempts):
        phase = _start_phase(attempts[:position], courses)
        path.turn(attempt.started_at, phase)
        for index, course in enumerate(courses):
            if course.attempt is not attempt:
                continue
            if course.first_step_at is not None:
                end = until if course.stood_at is None else course.stood_at
                known &= _train(path, index, course, done, end)
                phase = Phase.TRAINING
            if course.ended_at is not None:
                if course.detect_s is not None:
                    path.turn(course.ended_at - course.detect_s, Phase.RECOVERING)
                phase = _phase_after(course)
                path.turn(course.ended_at, phase)
        if attempt.stop is not None:
            phase = Phase.STOPPING
            path.turn(attempt.stop[0], phase)
        if position + 1 < len(attempts):
            path.turn(attempt.over_at, Phase.QUEUED)
        if attempt.ended is not None and attempt.ended[1].code == 0:
            done = _StepsDone()
    path.until(until)
    return tuple(path.spans), phase, known


def time_share(spans: Iterable[Span], redone_known: bool) -> TimeShare | None:
    """Add the spans up; None when they cover no time."""
    seconds = dict.fromkeys(Phase, 0.0)
    for span in spans:
        seconds[span.phase] += span.seconds
    wall = sum(seconds.values())
    return TimeShare(wall, seconds, redone_known) if wall > 0 else None


def _start_phase(earlier: list[AttemptNotes], courses: list[Course]) -> Phase:
    """Return what an attempt is doing until its first step: recovering if the one before had failed."""
    before = [course for course in courses if any(course.attempt is attempt for attempt in earlier)]
    failed = before and before[-1].end in (CycleEnd.FAULT, CycleEnd.CUT_OFF)
    return Phase.RECOVERING if failed and earlier[-1].goes_on else Phase.STARTING


def _phase_after(course: Course) -> Phase:
    verdict = course.notes.verdict
    if course.end is CycleEnd.CUT_OFF:
        return Phase.RECOVERING
    if course.end is CycleEnd.FAULT and (verdict is None or verdict[1].action is not VerdictAction.STOP):
        return Phase.RECOVERING
    return Phase.STOPPING


def _train(path: _Walk, index: int, course: Course, done: _StepsDone, end: float) -> bool:
    """Walk through a cycle's training; return whether it is known which of its steps are repeated."""
    assert course.first_step_at is not None
    # What is written after the fault was reached before it.
    reports = [(min(at, end), step) for at, step in course.notes.steps]
    later = [(at, step) for at, step in reports if at > course.first_step_at]
    at, step = course.first_step_at, course.resumed_from
    if step is not None:
        step = max([step, *(early for early_at, early in reports if early_at <= at)])
    highest = step if done.highest is None else done.highest
    path.turn(at, Phase.TRAINING, index)
    for next_at, next_step in later:
        if step is None or highest is None or step >= highest:
            path.stay(next_at, Phase.TRAINING)
        elif next_step <= highest:
            path.stay(next_at, Phase.REDOING)
        else:
            path.stay(at + (next_at - at) * (highest - step) / (next_step - step), Phase.REDOING)
            path.stay(next_at, Phase.TRAINING)
        at, step = next_at, next_step
        highest = step if highest is None else max(highest, step)
    behind = step is not None and highest is not None and step < highest
    path.stay(end, Phase.REDOING if behind and later else Phase.TRAINING)
    known = step is not None and done.highest is not None and bool(later or not behind)
    known = known or not done.trained or end <= course.first_step_at
    done.add(course.last_step)
    done.trained = True
    return known
