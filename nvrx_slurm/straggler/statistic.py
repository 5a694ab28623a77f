"""What is said of the times that were measured in one period."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

import torch


class Statistic(enum.Enum):
    """Of the samples of one section (ms) or kernel (µs)."""

    MIN = "MIN"
    MAX = "MAX"
    MED = "MED"
    """The lower one of two in the middle; of kernels their mean, to 1 %."""
    AVG = "AVG"
    STD = "STD"
    """Unbiased, NaN for one sample; of kernels that of the samples themselves."""
    NUM = "NUM"
    """How many samples there are."""


Summary = Mapping[Statistic, float]


def summarize(samples: Sequence[float]) -> dict[Statistic, float]:
    """Return all statistics of at least one sample; what is no finite number, or below 0, is left out.

    Returns:
        An empty dictionary if nothing is left.
    """
    usable = [sample for sample in samples if math.isfinite(sample) and sample >= 0]
    if not usable:
        return {}
    times = torch.tensor(usable, dtype=torch.float64)
    return {
        Statistic.MIN: float(times.min()),
        Statistic.MAX: float(times.max()),
        Statistic.MED: float(times.median()),
        Statistic.AVG: float(times.mean()),
        Statistic.STD: float(times.std()) if len(usable) > 1 else math.nan,
        Statistic.NUM: float(len(usable)),
    }
