"""The times of all ranks in one period."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

COLLECTIVE = "ncclDev"
"""In the names of kernels that wait for other ranks: their time says nothing of this one."""


def score(reference: float, own: float) -> float:
    """Return how close a time is to the reference, from 0 to 1; one of 0 is as good as any.

    NaN: one of them is missing.
    """
    if own > 0:
        return min(reference / own, 1.0)
    return 1.0 if own == 0 and not math.isnan(reference) else math.nan


class Kernel(NamedTuple):
    """A GPU kernel, where it runs."""

    name: str
    section: str = ""
    """The section that it is launched in; empty: not known."""


class KernelTime(NamedTuple):
    """Of one kernel on one rank."""

    median_us: float
    total_us: float
    """All launches of the period."""


class Measured(Protocol):
    """One period. A rank that has no time of a section or kernel is missing there, or has NaN."""

    @property
    def section_medians(self) -> Mapping[str, Mapping[int, float]]:
        """Milliseconds of a passage, by section and rank."""
        ...

    @property
    def rank_to_node(self) -> Mapping[int, str]: ...

    @property
    def passages(self) -> Mapping[str, float]:
        """How often an iteration passes through a section; a section that is missing: once."""
        ...

    @property
    def iterations(self) -> float:
        """Of the period; 0: they are not counted."""
        ...

    @property
    def kernel_times(self) -> Mapping[Kernel, Mapping[int, KernelTime]]: ...

    @property
    def gpus(self) -> Mapping[int, str]:
        """The UUID of each rank's GPU, as far as it is known."""
        ...
