"""Who is slow for good: judged over several reports, against the ranks that do the same work.

Scores relative to the fastest rank are what other tools compute; one rank that is fast by chance, or that has
less to do, then makes all others look slow. Here a rank is compared with the median of the comparable ranks,
those with the same sections, and it must stand out from their scatter, in several reports. What makes all
ranks slower shows in none of that; for it the ranks' middle time is compared with what it was before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from nvrx_slurm.pace.measured import Kernel, KernelTime, Measured, score
from nvrx_slurm.pace.verdict import GPU_KERNELS, KernelLoss, StragglerVerdict

_K = TypeVar("_K", bound=Hashable)
_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution; Rousseeuw and Croux, 1993."""
_FEWEST = 3
"""With two ranks nobody can tell which of them is the odd one."""
_NEGLIGIBLE = 0.01
"""A section that loses less than this share of the longest one's time slows nobody down."""
_MOST_KERNELS = 3
_USUAL = 32
"""Reports that tell what is usual for a job."""


@dataclass(frozen=True)
class RankScore:
    """How a rank stands in one report, in the section where it is worst."""

    score: float
    """0 to 1: the median of comparable ranks over its own time."""
    section: str


@dataclass(frozen=True)
class SlowDown:
    """Most ranks have become slower than they were: nobody stands out, and the job is slow all the same."""

    section: str
    score: float
    """0 to 1: the ranks' middle time as it was in the last reports over that of now."""
    ranks: int
    """How many were compared."""
    reports: int
    of_reports: int


@dataclass(frozen=True)
class Judgement:
    """What one more report says."""

    verdicts: list[StragglerVerdict]
    """Who is slow for good, the most time lost first."""
    scores: dict[int, RankScore]
    """Of every rank that could be compared."""
    slow_downs: list[SlowDown]


class Watch:
    """Feed it every report of all ranks; it returns who is slow for good.

    Args:
        threshold: a rank is slow if the median of comparable ranks is less than so much of its own time.
        slow_reports, of_reports: it is named if it was slow in so many of the last so many reports.
        deviations: and it must be so many standard deviations, estimated from the median absolute deviation,
            above the median.

    Raises:
        ValueError: a value is outside what is said.
    """

    def __init__(
        self,
        threshold: float = 0.75,
        slow_reports: int = 2,
        of_reports: int = 3,
        deviations: float = 3.0,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError(f"threshold is {threshold}: above 0 and below 1 is accepted")
        if not 2 <= slow_reports <= of_reports:
            raise ValueError(
                f"slow_reports is {slow_reports} of {of_reports}: from 2 to of_reports is accepted, for a "
                "single report names nobody"
            )
        if not deviations >= 0:
            raise ValueError(f"deviations is {deviations}: 0 or more is accepted")
        self._threshold = threshold
        self._deviations = deviations
        # By node, too: another node's rank of the same number begins anew.
        self._slow = Recent[tuple[str, int, str]](slow_reports, of_reports)
        self._slower = Recent[str](slow_reports, of_reports)
        self._before: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_USUAL))
        """The middle time of each section in the last reports."""

    def add(self, report: Measured) -> list[StragglerVerdict]:
        """Return the verdicts after ``report``, the most time lost first."""
        return self.judge(report).verdicts

    def judge(self, report: Measured) -> Judgement:
        """Take one more report."""
        scores: dict[int, RankScore] = {}
        slow: dict[tuple[str, int, str], _Slow] = {}
        for ranks in _comparable(report):
            for column in _columns(report, ranks):
                section, middle = column.section, column.middle
                sigma = _MAD_TO_SIGMA * _median(abs(value - middle) for value in column.times.values())
                limit = max(middle / self._threshold, middle + self._deviations * sigma)
                for rank, value in column.times.items():
                    own = score(middle, value)
                    known = scores.get(rank)
                    if known is None or own < known.score:
                        scores[rank] = RankScore(own, section)
                    if value > limit and (value - middle) * column.passages >= column.negligible:
                        lost_ms = (value - middle) * column.passages
                        slow[report.rank_to_node[rank], rank, section] = _Slow(own, lost_ms, ranks)
        verdicts = [
            _verdict(report, key, slow[key], reports, self._slow.of)
            for key, reports in self._slow.note(slow).items()
        ]
        verdicts.sort(key=lambda verdict: -verdict.lost_ms)
        return Judgement(verdicts, scores, self._slow_downs(report.section_medians))

    def _slow_downs(self, medians: Mapping[str, Mapping[int, float]]) -> list[SlowDown]:
        found: dict[str, tuple[float, int]] = {}
        for section, of_ranks in medians.items():
            times = [value for value in of_ranks.values() if _is_time(value)]
            if not times:
                continue
            now, before = _median(times), self._before[section]
            # Not the best of them: after one lucky report all that follow would be slow.
            usual = _median(before) if before else now
            if usual < self._threshold * now:
                found[section] = (usual / now, len(times))
            before.append(now)
        return [
            SlowDown(section, *found[section], reports, self._slower.of)
            for section, reports in self._slower.note(found).items()
        ]


class Recent(Generic[_K]):
    """In how many of the last reports each thing was so; what never was takes no room."""

    def __init__(self, needed: int, of: int) -> None:
        self.of = of
        self._needed = needed
        self._seen: dict[_K, deque[bool]] = {}

    def note(self, now: Collection[_K]) -> dict[_K, int]:
        """Take one report; return what is so now, and was in enough of the last ones, and in how many."""
        for key in now:
            self._seen.setdefault(key, deque(maxlen=self.of))
        for key, recent in list(self._seen.items()):
            recent.append(key in now)
            if not any(recent):
                del self._seen[key]
        # Now, too: who has recovered, or is not there, is not named.
        counts = {key: sum(self._seen[key]) for key in now}
        return {key: count for key, count in counts.items() if count >= self._needed}


class _Slow(NamedTuple):
    """A rank that is slow in one report."""

    score: float
    lost_ms: float
    comparable: Collection[int]


@dataclass(frozen=True)
class _Column:
    """What comparable ranks took for the same thing."""

    section: str
    times: Mapping[int, float]
    passages: float
    negligible: float
    """So much lost in an iteration is nothing, in milliseconds."""

    @cached_property
    def middle(self) -> float:
        return _median(self.times.values())


def _columns(report: Measured, ranks: Sequence[int]) -> list[_Column]:
    found = []
    for section, of_ranks in report.section_medians.items():
        times = {rank: of_ranks[rank] for rank in ranks if _is_time(of_ranks.get(rank, math.nan))}
        if len(times) >= _FEWEST:
            found.append(_Column(section, times, report.passages.get(section, 1.0), 0.0))
    longest = max((column.middle * column.passages for column in found), default=0.0)
    columns = [replace(column, negligible=_NEGLIGIBLE * longest) for column in found]
    slowness = _slowness_of_gpus(report.kernel_times, ranks)
    if len(slowness) >= _FEWEST:
        # A ratio, 1 being the others' pace; what is lost by it is told by the kernels.
        columns.append(_Column(GPU_KERNELS, slowness, 1.0, 0.0))
    return columns


def _slowness_of_gpus(
    kernels: Mapping[Kernel, Mapping[int, KernelTime]], ranks: Sequence[int]
) -> dict[int, float]:
    """Return each rank's time in the kernels that enough ranks run, over what it would take at their pace."""
    own: defaultdict[int, float] = defaultdict(float)
    at_their_pace: defaultdict[int, float] = defaultdict(float)
    for _, middle, times in _common_kernels(kernels, ranks):
        for rank, time in times.items():
            own[rank] += time.total_us
            at_their_pace[rank] += time.total_us * middle / time.median_us
    return {rank: own[rank] / pace for rank, pace in at_their_pace.items() if pace > 0}


def _common_kernels(
    kernels: Mapping[Kernel, Mapping[int, KernelTime]], ranks: Collection[int]
) -> Iterator[tuple[Kernel, float, Mapping[int, KernelTime]]]:
    for kernel, of_ranks in kernels.items():
        times = {rank: of_ranks[rank] for rank in ranks if rank in of_ranks}
        times = {
            rank: time for rank, time in times.items() if _is_time(time.median_us) and time.median_us > 0
        }
        if len(times) >= _FEWEST:
            yield kernel, _median(time.median_us for time in times.values()), times


def _verdict(
    report: Measured, key: tuple[str, int, str], slow: _Slow, reports: int, of_reports: int
) -> StragglerVerdict:
    node, rank, section = key
    losses = _lost_in_kernels(report, rank, section, slow.comparable)
    lost_ms = sum(loss.lost_ms for loss in losses) if section == GPU_KERNELS else slow.lost_ms
    return StragglerVerdict(
        rank=rank,
        node=node,
        section=section,
        score=slow.score,
        lost_ms=lost_ms,
        reports=reports,
        of_reports=of_reports,
        gpu=report.gpus.get(rank, ""),
        kernels=[loss for loss in losses if loss.lost_ms > 0][:_MOST_KERNELS],
    )


def _lost_in_kernels(
    report: Measured, rank: int, section: str, comparable: Collection[int]
) -> list[KernelLoss]:
    """Return what ``rank`` loses in each kernel of the section, the most first."""
    iterations = report.iterations or 1.0
    losses = [
        KernelLoss(
            kernel=kernel.name,
            lost_ms=times[rank].total_us * (1 - middle / times[rank].median_us) / 1e3 / iterations,
        )
        for kernel, middle, times in _common_kernels(report.kernel_times, comparable)
        if rank in times and section in (GPU_KERNELS, kernel.section)
    ]
    return sorted(losses, key=lambda loss: -loss.lost_ms)


def _comparable(report: Measured) -> Sequence[Sequence[int]]:
    """Return groups of ranks that pass through the same sections, as those of one pipeline stage do.

    A rank that passes through more, which no other has, as rank 0 when it writes a log, is in the group of
    the rest. Where there are no sections, ranks that run the same kernels.
    """
    passed: defaultdict[int, set[object]] = defaultdict(set)
    for section, of_ranks in report.section_medians.items():
        for rank, value in of_ranks.items():
            if _is_time(value):
                passed[rank].add(section)
    if not passed:
        for kernel, times in report.kernel_times.items():
            for rank in times:
                passed[rank].add(kernel)
    groups: defaultdict[frozenset[object], list[int]] = defaultdict(list)
    for rank, what in passed.items():
        groups[frozenset(what)].append(rank)
    having = Counter(each for what in passed.values() for each in what)
    for own, ranks in list(groups.items()):
        shared = frozenset(each for each in own if having[each] > 1)
        if shared != own and shared in groups:
            groups[shared] += ranks
            del groups[own]
    return list(groups.values())


def _is_time(value: float) -> bool:
    return 0 <= value < math.inf


def _median(values: Iterable[float]) -> float:
    """As that of statistics, in a third of its time."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
