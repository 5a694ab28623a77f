"""Each cycle that a fault has ended gets its score: at once, or when the iteration file has been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.progress import Progress, Signs
from nvrx_slurm.coordinator.steps import Command, IterationRead, ReadIteration, Write
from nvrx_slurm.journal import FaultDetected


@dataclass(frozen=True)
class EndedCycle:
    """What is known of a cycle that a fault has ended, but for what the file says."""

    number: int
    signs: Signs
    culprit: FaultDetected
    seconds: float


class Scoring:
    """Keeps the one cycle whose score waits for the file; all methods return what is to be done.

    Args:
        progress: what the scores are counted in.
        limits: whether there is a bound at all, and how much growth is progress.
        with_file: the training writes its newest checkpoint's step to a file.
        on_progress: called when a cycle came further than all before.
    """

    def __init__(
        self, progress: Progress, limits: Limits, with_file: bool, on_progress: Callable[[], None]
    ) -> None:
        self._progress = progress
        self._limits = limits
        self._with_file = with_file and limits.max_no_progress_cycles > 0
        self._on_progress = on_progress
        self._waits: EndedCycle | None = None

    def start(self) -> list[Command]:
        """Have the file read: what it says before the first cycle has ended is of an earlier job."""
        return [ReadIteration(None)] if self._with_file else []

    def cycle_ended(self, ended: EndedCycle) -> list[Command]:
        if not self._with_file:
            return self._judge(ended, None)
        # In a whole cycle the file could not be read.
        late = [] if self._waits is None else self._judge(self._waits, None)
        self._waits = ended
        return [*late, ReadIteration(ended.number)]

    def iteration_read(self, event: IterationRead) -> list[Command]:
        """Take an answer to :class:`ReadIteration`; one that comes too late counts for nothing."""
        if event.cycle is None:
            self._progress.begin_at(event.step)
            return []
        if self._waits is None or self._waits.number != event.cycle:
            return []
        ended, self._waits = self._waits, None
        return self._judge(ended, event.step)

    def _judge(self, ended: EndedCycle, file_step: int | None) -> list[Command]:
        scored = self._progress.score(
            ended.signs,
            ended.culprit,
            ended.seconds,
            self._limits.min_progress_iterations,
            file_step=file_step,
            file_unread=self._with_file and file_step is None,
        )
        if scored is None:
            return []
        if scored.progressed:
            self._on_progress()
        return [Write(scored, ended.number)] if self._limits.max_no_progress_cycles else []
