"""Whether restarts in process get a cycle any further; if not, its processes restart, from the budget."""

from __future__ import annotations

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.progress import EARLY_S, Signs, highest


class InprocessRestarts:
    """Those of one cycle.

    Args:
        limits: as many in a row without progress as cycles may be are given; 0: any number.
        began: when the cycle began.
        saved: the highest step of a checkpoint in all cycles before; None: none was told.
        step: the same of a heartbeat.
    """

    def __init__(
        self, limits: Limits, began: float, saved: int | None = None, step: int | None = None
    ) -> None:
        self._limits = limits
        self._last = began
        self._saved, self._step = saved, step
        self._in_a_row = 0

    def note(self, signs: Signs, now: float) -> str | None:
        """Take a restart; return why one more of them is of no use, as one clause; None: it may be.

        Where no rank tells its step, a restart soon after the last one is held to be without progress.
        """
        lasted, self._last = now - self._last, now
        told = highest(signs.saved, self._saved, signs.step, self._step) is not None
        without = not self._grew(signs) if told else lasted < EARLY_S
        self._in_a_row = self._in_a_row + 1 if without else 0
        most = self._limits.max_no_progress_cycles
        if not 0 < most <= self._in_a_row:
            return None
        plural = "" if self._in_a_row == 1 else "s"
        return f"{self._in_a_row} restart{plural} in process in a row without progress"

    def _grew(self, signs: Signs) -> bool:
        """Note the steps; where checkpoints are told they alone count, as between cycles."""
        if highest(signs.saved, self._saved) is not None:
            now, before = signs.saved, self._saved
        else:
            now, before = signs.step, self._step
        self._saved, self._step = highest(self._saved, signs.saved), highest(self._step, signs.step)
        least = self._limits.min_progress_iterations
        return now is not None and (before is None or now - before >= least)
