"""Whether what the journal says of slow ranks is what was planted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.straggler.plan import REPORTS, Kind, Window
from nvrx_slurm.journal import JobSlowed, RankScores, Record, StragglerReport

_NEEDED = 2


@dataclass
class Report:
    """What was told after one report of all ranks."""

    scores: RankScores
    stragglers: list[StragglerReport] = field(default_factory=list)
    slowed: list[JobSlowed] = field(default_factory=list)


@dataclass
class Found:
    """The windows of one kind."""

    windows: int = 0
    detected: int = 0
    """Named right, and within two reports. Of kinds where nobody is slow: nobody was named."""
    complaints: list[str] = field(default_factory=list)


def reports_of(records: Iterable[Record]) -> list[Report]:
    found: list[Report] = []
    for record in records:
        match record.event:
            case RankScores() as event:
                found.append(Report(event))
            case StragglerReport(told_by=None) as event:
                found[-1].stragglers.append(event)
            case JobSlowed() as event:
                found[-1].slowed.append(event)
            case _:
                pass
    return found


def judge(windows: Sequence[Window], reports: Sequence[Report]) -> dict[Kind, Found]:
    """Compare window by window."""
    found = {kind: Found() for kind in Kind}
    for index, window in enumerate(windows):
        own = reports[index * REPORTS : (index + 1) * REPORTS]
        result = found[window.kind]
        result.windows += 1
        why = _fault_of(window, own)
        if why is None:
            result.detected += 1
        else:
            result.complaints.append(f"window {index}, {window.kind.value} of {list(window.ranks)}: {why}")
    return found


def _fault_of(window: Window, reports: Sequence[Report]) -> str | None:
    named = {(event.rank, event.section) for report in reports for event in report.stragglers}
    early = {(event.rank, event.section) for report in reports[:_NEEDED] for event in report.stragglers}
    slow = window.kind in (Kind.NODE, Kind.WORK, Kind.LOADER)
    wanted = {(rank, section) for rank in window.ranks for section in window.sections} if slow else set()
    # A node without processor time may be late with everything.
    allowed = set(window.ranks) if window.kind is Kind.NODE else set()
    wrong = {each for each in named - wanted if each[0] not in allowed}
    if wrong:
        return f"named without a cause: {sorted(wrong)}"
    # A node is named by any of its ranks.
    missed = not wanted & early if window.kind is Kind.NODE else not wanted <= early
    if missed:
        scores = [dict(zip(r.scores.ranks, r.scores.scores, strict=True)) for r in reports]
        seen = [{rank: each.get(rank) for rank in window.ranks} for each in scores]
        return f"not named within {_NEEDED} reports: {sorted(wanted - early)}, scores {seen}"
    slowed = {event.section for report in reports[:_NEEDED] for event in report.slowed}
    if window.kind is Kind.ALL and not window.sections <= slowed:
        return f"that all ranks are slower was not told: {sorted(slowed)}"
    return None
