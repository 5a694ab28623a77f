"""Follow a journal while it grows: what to show when, and when to end. Reading and waiting are passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.report.build import build_report
from nvrx_slurm.report.model import JobReport, JobState, Moment, MomentKind
from nvrx_slurm.report.source import JournalSource

POLL_S = 0.25
"""The journal is looked at this often."""
REDRAW_S = 1.0
"""A live report is drawn at least this often, for the times in it."""
ASK_SLURM_S = 5.0
"""Slurm is asked at most this often, and only when the journal does not tell whether the job goes on."""
_REST_PER_WORK = 20
"""Building a report of a long journal takes longer; the wait after it is so many times that."""


class View(Protocol):
    """What shows a growing report."""

    redraws: bool
    """Whether it wants to be shown a report without news, too."""

    def waiting(self) -> None:
        """There is no event yet; called once."""

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        """Show a report; ``new`` are the moments that no earlier call had."""


@dataclass(frozen=True)
class World:
    """What following needs from outside."""

    now: Callable[[], float]
    """Unix seconds."""
    wait: Callable[[float], None]
    """Sleep for so many seconds."""
    in_slurm: Callable[[str], bool | None]
    """Whether Slurm still has a job; None when it cannot be asked."""


def follow(source: JournalSource, view: View, world: World) -> JobReport:
    """Show the journal until the job is over; return the last report.

    It is over when ``job_ended`` is there. Code 75 asks for a requeue: then it is over when Slurm no longer
    has the job, or cannot be asked. A job without an end that wrote nothing for a minute is over when Slurm
    no longer has it; if Slurm cannot be asked it may be training in silence, and is followed on.

    Raises:
        OSError, JournalError: the journal cannot be read.
    """
    _wait_for_first(source, view, world)
    news, slurm = _News(), _SlurmAnswer(world)
    unseen, next_build, built_at = True, float("-inf"), float("-inf")
    while True:
        now = world.now()
        due = now - built_at >= (REDRAW_S if view.redraws else ASK_SLURM_S)
        if now >= next_build and (unseen or due):
            report = _build(source, now, slurm)
            over = is_over(report)
            if unseen or view.redraws or over:
                view.show(report, news.of(report))
            if over:
                return report
            unseen, built_at = False, now
            next_build = now + _REST_PER_WORK * (world.now() - now)
        world.wait(POLL_S)
        unseen = source.update() or unseen


def is_over(report: JobReport) -> bool:
    """Tell whether nothing more is to come, as :func:`follow` decides it."""
    match report.state:
        case JobState.FINISHED | JobState.FAILED | JobState.STOPPED:
            return True
        case JobState.REQUEUE:
            return report.in_slurm is not True
        case JobState.NO_END:
            return report.in_slurm is False
        case _:
            return False


def report_now(source: JournalSource, world: World) -> JobReport:
    """Return the report of what ``source`` has read; Slurm is asked only if the journal leaves it open."""
    return _build(source, world.now(), _SlurmAnswer(world))


def _wait_for_first(source: JournalSource, view: View, world: World) -> None:
    if source.update():
        return
    view.waiting()
    while not source.update():
        world.wait(POLL_S)


def _build(source: JournalSource, now: float, slurm: _SlurmAnswer) -> JobReport:
    report = build_report(source.records, now, read=source.read_state)
    if report.state not in (JobState.REQUEUE, JobState.NO_END):
        return report
    answer = slurm.about(report.job, now)
    return build_report(source.records, now, in_slurm=answer, read=source.read_state)


class _SlurmAnswer:
    """Whether Slurm still has the job, asked again when the answer is :data:`ASK_SLURM_S` old."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._answer: bool | None = None
        self._at = float("-inf")

    def about(self, job: str, now: float) -> bool | None:
        if now - self._at >= ASK_SLURM_S:
            self._answer, self._at = self._world.in_slurm(job), now
        return self._answer


class _News:
    """The moments of successive reports that were not there before."""

    def __init__(self) -> None:
        self._told: Counter[tuple[float, int, str]] = Counter()
        self._until = float("-inf")

    def of(self, report: JobReport) -> tuple[Moment, ...]:
        """Return the new moments. What an old one is called may change later; that makes it no news."""
        new = []
        here: Counter[tuple[float, int, str]] = Counter()
        for moment in report.timeline:
            if moment.at < self._until:
                continue
            key = (moment.at, moment.cycle, _lasting_name(moment))
            here[key] += 1
            if here[key] > self._told[key]:
                new.append(moment)
        self._told |= here
        if report.last_event_at is not None:
            self._until = report.last_event_at
        return tuple(new)


def _lasting_name(moment: Moment) -> str:
    if moment.kind in (MomentKind.FAULT, MomentKind.CASCADE):
        return "fault"
    if moment.kind is MomentKind.NO_END:
        return "no end"
    return f"{moment.kind.value}: {moment.text}"
