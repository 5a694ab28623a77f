"""What is found out of a cycle when the next may run already: whether the job should go on at all."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.coordinator.limits import StopAction
from nvrx_slurm.coordinator.progress import EARLY_S
from nvrx_slurm.coordinator.running_cycle import RunningCycle


@dataclass(frozen=True)
class Useless:
    """Another try makes no sense."""

    cycle: int
    rule: str
    why: str


class Hindsight:
    """The last such finding, unless training has got further since."""

    def __init__(self, action: StopAction) -> None:
        self._action = action
        self._found: Useless | None = None
        self._progressed = -1
        """The last cycle that took training further."""

    def note(self, found: Useless) -> None:
        """Take a finding; one of a cycle that a later one has refuted counts for nothing."""
        if self._action is StopAction.NO_RESTART and found.cycle >= self._progressed:
            self._found = found

    def note_progress(self, cycle: int) -> None:
        """A cycle took training further."""
        self._progressed, self._found = max(self._progressed, cycle), None

    def stop(self, current: RunningCycle | None, now: float) -> Useless | None:
        """Return why the job should end now; None: it should not.

        ``current`` runs, None: no cycle does. One that may have trained goes on until a fault ends it.
        """
        if current is not None and current.signs.trained:
            return None
        if current is not None and not current.signs.monitored and now - current.began >= EARLY_S:
            return None
        return self._found
