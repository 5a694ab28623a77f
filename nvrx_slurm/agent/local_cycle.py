"""What the agent knows of the cycle that runs on its node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from nvrx_slurm.agent.deadlines import Deadline
from nvrx_slurm.agent.error_file import error_path
from nvrx_slurm.agent.monitor import RankMonitors
from nvrx_slurm.wire.flight_recorder import trace_socket_path
from nvrx_slurm.wire.messages import StartWorkers
from nvrx_slurm.wire.page import AgentPage, HeartbeatPage
from nvrx_slurm.wire.rank_channel import pace_path
from nvrx_slurm.wire.stacks import stacks_path


class LocalCycle:
    """Ranks, pages and progress of one cycle on one node."""

    def __init__(
        self,
        start: StartWorkers,
        slots: int,
        private_dir: Path,
        on_stalled: Callable[[int, Sequence[Deadline]], None],
    ) -> None:
        """Create the heartbeat pages.

        Raises:
            OSError: the private directory is full or gone.
        """
        self.start = start
        self.cycle = start.cycle
        self.ranks = list(range(start.first_rank, start.first_rank + slots))
        self.alive = set(self.ranks)
        self.told_exits: set[int] = set()
        """Ranks whose exit the Coordinator knows of."""
        self.ready: set[int] = set()
        self.stepping: set[int] = set()
        self.stopping = False
        self.stop_deadline = 0.0
        """By ``time.monotonic``: when ranks that were asked to stop are killed."""
        self.last_step: int | None = None
        self.told_timeouts = (start.monitoring.heartbeat, start.monitoring.section)
        """What the Coordinator has been told last."""
        self.page_paths = {rank: private_dir / f"cycle{start.cycle}-rank{rank}.page" for rank in self.ranks}
        self.pages: dict[int, AgentPage] = {}
        try:
            for rank, path in self.page_paths.items():
                self.pages[rank] = HeartbeatPage.create(path)
                self.pages[rank].set_timeouts(start.monitoring.heartbeat, start.monitoring.section)
        except OSError:
            for page in self.pages.values():
                page.close()
            self._remove()
            raise
        self.monitors = RankMonitors(self.pages, start.monitoring, on_stalled)

    def new_step(self) -> int | None:
        """Return the lowest step of the ranks if it has changed since the last call."""
        step = self.monitors.lowest_step()
        if step is None or step == self.last_step:
            return None
        self.last_step = step
        return step

    def close(self) -> None:
        """Close and remove the pages."""
        self.monitors.close()
        self._remove()

    def _remove(self) -> None:
        for path in self.page_paths.values():
            for each in (
                path,
                stacks_path(path),
                error_path(path),
                trace_socket_path(path),
                pace_path(path),
            ):
                with contextlib.suppress(OSError):
                    each.unlink()
