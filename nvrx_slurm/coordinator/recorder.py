"""What happens in a job, for whoever reads of it: the journal, the cycles' files, the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.coordinator import console
from nvrx_slurm.coordinator.cycle_info import CycleInfos, write_cycle_info
from nvrx_slurm.coordinator.job_files import JobFiles
from nvrx_slurm.coordinator.progress import highest
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.journal import JournalWriter, Record
from nvrx_slurm.journal.events import AnyEvent

_PROGRESS_INTERVAL_S = 5.0


class Recorder:
    """One job's events, as they happen. Needs a running event loop.

    Args:
        cycle: the one that events belong to which name no other.
        may_write: the job's files are this Coordinator's.
        cycle_infos: what a file tells of each cycle; the files are in ``cycle_info_dir``, None: nowhere.
        say: tells the person who watches the job.
        told: called with every event.
    """

    def __init__(
        self,
        writer: JournalWriter,
        cycle: Callable[[], int],
        may_write: Callable[[], bool],
        cycle_infos: CycleInfos,
        cycle_info_dir: Path | None,
        files: JobFiles,
        tasks: Tasks,
        say: Callable[[str], None],
        told: Callable[[Record], None],
    ) -> None:
        self._journal = writer
        self._cycle = cycle
        self._may_write = may_write
        self._cycle_infos = cycle_infos
        self._cycle_info_dir = cycle_info_dir
        self._files = files
        self._tasks = tasks
        self._say = say
        self._told = told
        self._step: int | None = None
        """The highest that is not in the journal yet."""
        self._step_written = 0.0

    def record(self, event: AnyEvent, cycle: int | None = None) -> None:
        """Write it to the journal, and to the console if that shows it."""
        if not self._may_write():
            return
        if cycle is None:
            cycle = self._cycle()
        if isinstance(event, journal.WorkersStopped | journal.JobEnded):
            self._record_progress(cycle)
        try:
            record = self._journal.append(cycle, event)
        except OSError as error:
            self._files.complain("journal", error)
            record = Record(ts=time.time(), job="", attempt=0, cycle=cycle, event=event)
        info = self._cycle_infos.take(record)
        if info is not None and self._cycle_info_dir is not None:
            write = partial(write_cycle_info, self._cycle_info_dir, info)
            self._tasks.spawn(self._files.write_in_order("cycle info", write))
        line = console.line_for(record)
        if line is not None:
            self._say(line)
        self._told(record)

    def cycle_started(self) -> None:
        """Forget the former cycle's step."""
        self._step = None

    def step_reached(self, step: int, cycle: int) -> None:
        """Note how far training is; the journal hears of it now and then."""
        self._step = highest(self._step, step)
        if time.monotonic() - self._step_written >= _PROGRESS_INTERVAL_S:
            self._record_progress(cycle)

    def close(self) -> None:
        self._journal.close()

    def _record_progress(self, cycle: int) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._step_written = time.monotonic()
            self.record(journal.Progress(step=step), cycle)
