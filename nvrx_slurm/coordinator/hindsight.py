"""What is found out of a cycle when the next may run already: whether the job should go on, and how soon."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.coordinator.budget import HOUR_S
from nvrx_slurm.coordinator.limits import StopAction
from nvrx_slurm.coordinator.progress import EARLY_S
from nvrx_slurm.coordinator.running_cycle import RunningCycle

BACK_OFF = "9-back-off"
"""The rule of the policy that counts restarts, whatever they were for."""


@dataclass(frozen=True)
class Useless:
    """Another try makes no sense."""

    cycle: int
    rule: str
    why: str
    hold: bool = False
    """But it may when somebody has made room."""


@dataclass(frozen=True)
class Delay:
    """A restart should wait."""

    cycle: int
    seconds: float
    rule: str
    why: str
    began: float
    """When it was found out."""


class Hindsight:
    """The last such findings, unless training has got further since."""

    def __init__(self, action: StopAction) -> None:
        self._action = action
        self._found: Useless | None = None
        self._delay: Delay | None = None
        self._progressed = -1
        """The last cycle that took training further."""

    def note(self, found: Useless) -> None:
        """Take a finding; one of a cycle that a later one has refuted counts for nothing."""
        if self._action is StopAction.NO_RESTART and found.cycle >= self._progressed:
            self._found = found

    def note_delay(self, cycle: int, delay: Delay | None) -> None:
        """Take how long a restart should wait; None: what was found out last asks for no wait."""
        if self._action is StopAction.NO_RESTART and cycle >= self._progressed:
            self._delay = delay

    def take_delay(self, now: float) -> Delay | None:
        """Return how long the restart that is due now waits; it is waited for once.

        The cause of the very fault that it follows is not known yet: it is that of the cycle before.
        """
        delay, self._delay = self._delay, None
        return None if delay is None or now - delay.began > HOUR_S else delay

    def note_progress(self, cycle: int) -> None:
        """A cycle took training further."""
        self._progressed, self._found = max(self._progressed, cycle), None
        if self._delay is not None and self._delay.rule != BACK_OFF:
            self._delay = None

    def stop(self, current: RunningCycle | None, now: float) -> Useless | None:
        """Return why the job should end now; None: it should not.

        ``current`` runs, None: no cycle does. One that may have trained goes on until a fault ends it.
        """
        if current is not None and may_have_trained(current, now):
            return None
        return self._found


def may_have_trained(cycle: RunningCycle, now: float) -> bool:
    """Tell whether a cycle, which may have ended at ``now``, has come to train, or nobody can tell."""
    return cycle.signs.trained or (not cycle.signs.monitored and now - cycle.began >= EARLY_S)
