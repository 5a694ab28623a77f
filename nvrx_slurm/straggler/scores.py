"""Scores from 0 to 1, 1 being the best: this rank's times beside the best ones. Values in, values out.

Relative scores compare with the fastest rank of the same period, individual ones with the fastest period of
the same rank. NaN: there is nothing to compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nvrx_slurm.pace.measured import COLLECTIVE, score
from nvrx_slurm.pace.names import MOST_NAMES
from nvrx_slurm.straggler.statistic import Statistic, Summary


def medians(summaries: Mapping[str, Summary]) -> dict[str, float]:
    """Return the median of each."""
    return {name: summary[Statistic.MED] for name, summary in summaries.items()}


def own_kernels(summaries: Mapping[str, Summary]) -> dict[str, Summary]:
    """Return those that do not wait for other ranks."""
    return {name: summary for name, summary in summaries.items() if COLLECTIVE not in name}


def section_scores(reference: Mapping[str, float], own: Mapping[str, Summary]) -> dict[str, float]:
    """Return the score of each section of this rank."""
    return {
        name: score(reference.get(name, math.nan), summary[Statistic.MED]) for name, summary in own.items()
    }


def gpu_score(reference: Mapping[str, float], own: Mapping[str, Summary]) -> float:
    """Return the mean of the kernels' scores, each weighed with the total time that was spent in it.

    Kernels without a reference are left out; NaN if none is left.
    """
    weighed = total = 0.0
    for name, summary in own.items():
        value = score(reference.get(name, math.nan), summary[Statistic.MED])
        weight = summary[Statistic.NUM] * summary[Statistic.AVG]
        if not math.isnan(value):
            weighed += weight * value
            total += weight
    return weighed / total if total > 0 else math.nan


class BestOfThisRank:
    """The lowest median of each name so far: what individual scores compare with."""

    def __init__(self) -> None:
        self._lowest: dict[str, float] = {}

    def update(self, period: Mapping[str, float]) -> Mapping[str, float]:
        """Take in one period; return the references, which include it."""
        for name, median in period.items():
            if name in self._lowest or len(self._lowest) < MOST_NAMES:
                self._lowest[name] = min(median, self._lowest.get(name, math.inf))
        return self._lowest
