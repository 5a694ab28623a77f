"""Who is slow for good: judged over several reports, against the ranks that do the same work.

Scores relative to the fastest rank are what other tools compute; one rank that is fast by chance, or that has
less to do, then makes all others look slow. Here a rank is compared with the median of the comparable ranks,
those with the same sections, and it must stand out from their scatter, in several reports.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.straggler.report import Report

_MAD_TO_SIGMA = 1.4826
"""Of a normal distribution; Rousseeuw and Croux, 1993."""
_FEWEST = 3
"""With two ranks nobody can tell which of them is the odd one."""


@dataclass(frozen=True)
class StragglerVerdict:
    """A rank that has been slow in enough of the last reports."""

    rank: int
    node: str
    section: str
    score: float
    """Median of the comparable ranks over its own time, in the last report."""
    lost_ms: float
    """How much longer a passage of the section takes there."""
    reports: int
    """In how many of the last ones it was slow."""
    of_reports: int

    @property
    def confidence(self) -> float:
        """From 0 to 1: the share of the last reports in which it was slow."""
        return self.reports / self.of_reports


class Watch:
    """Feed it every gathered report; it returns who is slow for good.

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
        deviations: float = 4.0,
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
        self._needed = slow_reports
        self._deviations = deviations
        self._recent: defaultdict[tuple[int, str], deque[bool]] = defaultdict(
            lambda: deque(maxlen=of_reports)
        )
        self._kept = of_reports

    def add(self, report: Report) -> list[StragglerVerdict]:
        """Return the verdicts after ``report``, the most time lost first."""
        verdicts = []
        judged = set()
        for section, rank, score, lost_ms, is_slow in self._judge(report.section_medians):
            judged.add((rank, section))
            recent = self._recent[rank, section]
            recent.append(is_slow)
            # Slow now, too: who has recovered is not named.
            if is_slow and sum(recent) >= self._needed:
                node = report.rank_to_node[rank]
                verdicts.append(
                    StragglerVerdict(rank, node, section, score, lost_ms, sum(recent), self._kept)
                )
        for gone in self._recent.keys() - judged:
            del self._recent[gone]
        return sorted(verdicts, key=lambda verdict: -verdict.lost_ms)

    def _judge(
        self, medians: Mapping[str, Mapping[int, float]]
    ) -> Iterator[tuple[str, int, float, float, bool]]:
        for ranks in _comparable(medians):
            for section, of_ranks in medians.items():
                times = {rank: of_ranks[rank] for rank in ranks if not math.isnan(of_ranks[rank])}
                if len(times) < _FEWEST:
                    continue
                middle = statistics.median(times.values())
                scatter = statistics.median(abs(value - middle) for value in times.values())
                limit = middle + self._deviations * _MAD_TO_SIGMA * scatter
                for rank, value in times.items():
                    score = min(middle / value, 1.0) if value > 0 else 1.0
                    is_slow = score < self._threshold and value > limit
                    yield section, rank, score, value - middle, is_slow


def _comparable(medians: Mapping[str, Mapping[int, float]]) -> Sequence[Sequence[int]]:
    """Return groups of ranks that pass through the same sections, as those of one pipeline stage do."""
    passed: defaultdict[int, set[str]] = defaultdict(set)
    for section, of_ranks in medians.items():
        for rank, value in of_ranks.items():
            if not math.isnan(value):
                passed[rank].add(section)
    groups: defaultdict[frozenset[str], list[int]] = defaultdict(list)
    for rank, sections in passed.items():
        groups[frozenset(sections)].append(rank)
    return list(groups.values())
