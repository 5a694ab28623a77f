"""What the ranks are held to, for every cycle anew: a rank may have calculated better time-outs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.coordinator.ft_state import adopt, save_ft_state
from nvrx_slurm.coordinator.job_files import JobFiles
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.timeouts import Monitoring


class AdoptedTimeouts:
    """The time-outs of one job.

    Args:
        first: those of the first cycle.
        path: where later jobs find what was calculated; None: it is not kept.
        say: tells the person who watches the job.
    """

    def __init__(
        self,
        first: Monitoring,
        path: Path | None,
        files: JobFiles,
        tasks: Tasks,
        say: Callable[[str], None],
    ) -> None:
        self.monitoring = first
        self._path = path
        self._files = files
        self._tasks = tasks
        self._say = say

    def calculated(self, node: str, m: msg.TimeoutsCalculated) -> journal.TimeoutsCalculated | None:
        """Let later cycles begin with them, and later jobs if they are kept; return what is new to record."""
        try:
            adopted = adopt(self.monitoring, m.heartbeat, m.section)
        except ValueError as error:
            self._say(f"WARNING: time-outs that a rank on {node} calculated are ignored: {error}")
            return None
        if adopted == self.monitoring:
            return None
        self.monitoring = adopted
        heartbeat, section = adopted.heartbeat, adopted.section
        if self._path is not None:
            save = partial(save_ft_state, self._path, heartbeat, section)
            self._tasks.spawn(self._files.write_in_order("calculated time-outs", save))
        return journal.TimeoutsCalculated(
            initial=heartbeat.initial,
            subsequent=heartbeat.subsequent,
            section=section.section,
            out_of_section=section.out_of_section,
        )
