"""Whether the job gets further: each cycle's highest step beside those of all earlier cycles.

What counts is the step of checkpoints as soon as the job has told of one, by a rank or in the
checkpoint-iteration file: what is not saved is lost with the next fault. Else it is the step of heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.journal import CycleScored, FaultDetected, FaultKind

EARLY_S = 60.0
"""A program without a client that fails by itself within this time is taken not to have trained."""

_FROM_OUTSIDE = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
"""Signals that a program does not bring on itself."""


def highest(*steps: int | None) -> int | None:
    """Return the highest step that is known; None: none is."""
    return max((step for step in steps if step is not None), default=None)


@dataclass
class Signs:
    """What the ranks of one cycle have told of their training."""

    step: int | None = None
    """The highest of a heartbeat."""
    saved: int | None = None
    """The highest of a checkpoint."""
    loaded: int | None = None
    monitored: bool = False
    """All ranks of a node have begun monitoring."""
    heartbeat: bool = False
    """A rank has sent one."""

    @property
    def trained(self) -> bool:
        """Tell whether training has come to a step."""
        return self.heartbeat or self.step is not None or self.saved is not None


@dataclass
class Progress:
    """The count of cycles without progress; it goes on over requeues."""

    step: int | None = None
    """The highest of a heartbeat in all cycles that are over."""
    saved: int | None = None
    """The same of a checkpoint."""
    in_a_row: int = 0
    """Cycles without progress."""
    monitored: bool = False
    """Some cycle's ranks have used the client."""
    early_end: str = ""
    """How the cycle before ended, if it was before any step."""
    _told: bool = field(default=False, compare=False)
    """That nobody says a step has been told."""

    def close(self, signs: Signs) -> bool:
        """Take what a cycle has told that is not scored; to have got further ends the count.

        Returns:
            Whether it had.
        """
        grew = self._take(signs, None, minimum=1)
        if grew:
            self.in_a_row, self.early_end = 0, ""
        return grew

    def note_client(self, signs: Signs) -> None:
        """Take whether the cycle's ranks use the client."""
        self.monitored |= signs.monitored or signs.trained

    def begin_at(self, file_step: int | None) -> None:
        """Take what the checkpoint-iteration file says before the first cycle has ended."""
        self.saved = highest(self.saved, file_step)

    def take_score(self, scored: CycleScored) -> None:
        """Go on from where an earlier attempt was."""
        self.in_a_row, self.early_end = scored.in_a_row, scored.early_end
        if scored.checkpoints:
            self.saved = highest(self.saved, scored.step)
        else:
            self.step = highest(self.step, scored.step)

    def score(
        self,
        signs: Signs,
        culprit: FaultDetected,
        seconds: float,
        minimum: int,
        *,
        file_step: int | None = None,
        file_unread: bool = False,
    ) -> CycleScored | None:
        """Judge a cycle that ended by a fault.

        Args:
            signs: of the cycle.
            culprit: what ended it.
            seconds: how long it ran until then.
            minimum: how much growth is progress.
            file_step: what the checkpoint-iteration file says.
            file_unread: there is such a file, and it could not be read.

        Returns:
            None: it can't be told, and that has been said before, or the cycle had hardly begun.
        """
        had_saved = self.saved is not None
        grew = self._take(signs, file_step, minimum)
        early = "" if grew else self._early_end(signs, culprit, seconds)
        silent = signs.step is None and signs.saved is None and file_step is None
        # Where checkpoints count, to train and save none is no progress; but an unread file may tell of one.
        unknown = silent or (file_unread and had_saved and signs.saved is None)
        if grew:
            self.in_a_row = 0
        elif early and not self.monitored and file_step is None:
            self.in_a_row = self.in_a_row + 1 if early == self.early_end else 1
        elif early or not unknown:
            self.in_a_row += 1
        else:
            self.early_end = ""
            # A cycle that had hardly begun does not show that nobody will ever tell a step.
            return self._not_told() if signs.trained or seconds >= EARLY_S else None
        self.early_end = early
        return self._scored(progressed=grew)

    def stuck(self, limits: Limits) -> str | None:
        """Return why the job should not go on, as one clause; None: it may."""
        if not 0 < limits.max_no_progress_cycles <= self.in_a_row:
            return None
        cycles = f"{self.in_a_row} cycle{'' if self.in_a_row == 1 else 's'} in a row"
        early = f", and the last ended before its first step by {self.early_end}" if self.early_end else ""
        if self.saved is not None:
            return f"{cycles} without progress: no checkpoint after step {self.saved}{early}"
        if self.step is not None:
            return f"{cycles} without progress: none came {_beyond(limits)} step {self.step}{early}"
        return f"{cycles} ended before the first step, the last by {self.early_end}"

    def _take(self, signs: Signs, file_step: int | None, minimum: int) -> bool:
        """Note the steps; tell whether they grew."""
        self.note_client(signs)
        now = highest(signs.saved, file_step)
        if now is not None or self.saved is not None:
            before = self.saved if signs.loaded is None else highest(self.saved, signs.loaded)
        else:
            now, before = signs.step, highest(self.step, signs.loaded)
        self.step = highest(self.step, signs.step)
        saved = highest(self.saved, signs.saved, file_step)
        self.saved = saved if saved is None else highest(saved, signs.loaded)
        return now is not None and (before is None or now - before >= minimum)

    def _early_end(self, signs: Signs, culprit: FaultDetected, seconds: float) -> str:
        """Return how the program failed before any step; empty: it came further, or others made it fail."""
        others = (FaultKind.NODE_LOST, FaultKind.UNHEALTHY, FaultKind.REQUEST, FaultKind.SLOW)
        by_others = culprit.kind in others or culprit.detector == "store"
        if signs.trained or by_others:
            return ""
        # A client would have told of a step; without one only a failure soon after the start is plain.
        plain = (
            seconds < EARLY_S and culprit.kind is not FaultKind.HANG and culprit.signal not in _FROM_OUTSIDE
        )
        if not self.monitored and not plain:
            return ""
        match culprit.kind:
            case FaultKind.EXIT:
                return f"exit {culprit.exit}"
            case FaultKind.SIGNAL:
                return str(culprit.signal)
            case kind:
                return {
                    FaultKind.OOM: "lack of memory",
                    FaultKind.HANG: "a hang",
                    FaultKind.NO_PROGRESS: "faults that restarts in process did not heal",
                }.get(kind, "a failed start")

    def _scored(self, progressed: bool | None) -> CycleScored:
        return CycleScored(
            progressed=progressed,
            in_a_row=self.in_a_row,
            step=self.step if self.saved is None else self.saved,
            checkpoints=self.saved is not None,
            early_end=self.early_end,
        )

    def _not_told(self) -> CycleScored | None:
        if self._told:
            return None
        self._told = True
        return self._scored(progressed=None)


def _beyond(limits: Limits) -> str:
    least = limits.min_progress_iterations
    return "beyond" if least <= 1 else f"{least} or more beyond"
