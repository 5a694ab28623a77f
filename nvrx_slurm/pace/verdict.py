"""What is said of a slow rank: the same struct on the wire, in the journal and in a training script."""

from __future__ import annotations

import msgspec

GPU_KERNELS = "GPU kernels"
"""Stands for a section where a rank is slow in the sum of all kernels."""


class KernelLoss(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A kernel that takes longer on the slow rank."""

    kernel: str
    lost_ms: float
    """In an iteration, or in the whole period where iterations are not counted."""


class StragglerVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank that has been slow in enough of the last reports, compared with those that do the same work."""

    rank: int
    node: str
    section: str
    """:data:`GPU_KERNELS`: the kernels of all sections."""
    score: float
    """0 to 1: the median of the comparable ranks' times over its own, in the last report."""
    lost_ms: float
    """How much longer it takes there: an iteration, or a passage where iterations are not counted."""
    reports: int
    """In how many of the last ones it was slow."""
    of_reports: int
    gpu: str = ""
    """The UUID of its GPU; empty: not known, or there is none."""
    kernels: list[KernelLoss] = []
    """The kernels that lose most of it, the worst first."""
    context: list[str] = []
    """What the node's hardware said of itself then: clocks, throttling, temperature, ECC, load."""

    @property
    def confidence(self) -> float:
        """From 0 to 1: the share of the last reports in which it was slow."""
        return self.reports / self.of_reports
