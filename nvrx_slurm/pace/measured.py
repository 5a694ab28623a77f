"""The times of all ranks in one period."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol


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
