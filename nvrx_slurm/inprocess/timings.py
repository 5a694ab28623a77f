"""How long the phases of a restart took on this rank."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from nvrx_slurm.inprocess.attribution import InterruptionRecord


@dataclass(frozen=True)
class RestartTimings:
    """One restart, as this rank saw it; seconds.

    ``total_s`` runs from the moment at which the rank heard of the fault, or had it itself, to the next call
    of ``initialize``; the phases follow one another and make it up.
    """

    iteration: int
    """The one that was interrupted."""
    records: tuple[InterruptionRecord, ...]
    """Whose faults they were, in the numbering of that iteration."""
    terminated_ranks: tuple[int, ...]
    """Those that are gone, in the same numbering."""
    interrupt_s: float
    """Until the main thread was out of the function: notice, abort, asynchronous exception."""
    finalize_s: float
    health_check_s: float
    barrier_s: float
    """Waiting for the other ranks."""
    assignment_s: float
    """Rank assignment, and what is tidied up."""
    total_s: float

    def phases(self) -> dict[str, float]:
        """Return the phases by name, without ``_s``, in their order."""
        return {
            field.name.removesuffix("_s"): getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_s") and field.name != "total_s"
        }


class Stopwatch:
    """Measures phases that follow one another."""

    def __init__(self, start: float) -> None:
        """``start`` is by time.monotonic()."""
        self.start = self._last = start

    def lap(self) -> float:
        """Return the seconds since the last lap, or the start."""
        now = time.monotonic()
        passed = now - self._last
        self._last = now
        return passed

    @property
    def total(self) -> float:
        """Seconds from the start to the last lap."""
        return self._last - self.start
