"""How many restarts a job has left, and whether another is of use."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.progress import Progress

HOUR_S = 3600.0


NO_PROGRESS = "no-progress"
RESTARTS_PER_HOUR = "restarts-per-hour"


@dataclass(frozen=True)
class UsedUp:
    """Why there is no further restart."""

    why: str
    rule: str | None = None
    """The verdict's, where it is not the one that found the culprit."""


class Budget:
    """The restarts of one attempt, and the progress of the whole job."""

    def __init__(self, max_restarts: int, limits: Limits, progress: Progress) -> None:
        self.progress = progress
        self.restarts = 0
        self._max_restarts = max_restarts
        self._limits = limits
        self._times: deque[float] = deque(maxlen=limits.max_restarts_per_hour or 0)
        """Of the last restarts, as many as an hour may have."""

    def spend(self, now: float) -> None:
        """Note a restart."""
        self.restarts += 1
        self._times.append(now)

    def used_up(self, now: float) -> UsedUp | None:
        """Return why there is no further restart; None: there is one."""
        if self.restarts >= self._max_restarts:
            return UsedUp(f"restart budget of {self._max_restarts} used up")
        stuck = self.progress.stuck(self._limits)
        if stuck is not None:
            return UsedUp(stuck, NO_PROGRESS)
        most = self._limits.max_restarts_per_hour
        if most is not None and len(self._times) == most and now - self._times[0] < HOUR_S:
            return UsedUp(f"{most} restarts within the last hour, and no more are allowed", RESTARTS_PER_HOUR)
        return None
