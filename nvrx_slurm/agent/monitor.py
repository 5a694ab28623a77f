"""Rank monitors: heartbeat deadlines of the ranks on this node, one timer each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvrx_slurm import linux
from nvrx_slurm.wire.messages import HeartbeatTimeouts, RankSnapshot
from nvrx_slurm.wire.page import HeartbeatPage, PageReading


@dataclass(frozen=True)
class Deadline:
    """When a rank is late, and by which time-out."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    timeout_s: float


def deadline_of(reading: PageReading, timeouts: HeartbeatTimeouts) -> Deadline | None:
    """Return the deadline that ``reading`` implies; None when none runs."""
    if not reading.monitored:
        return None
    timeout = timeouts.subsequent_s if reading.last_heartbeat_ns else timeouts.initial_s
    if timeout is None:
        return None
    return Deadline(reading.last_sign_ns + int(timeout * 1e9), timeout)


class RankMonitors:
    """Watches one cycle's pages. A timer sleeps until the deadline that the page implied when it was set; if
    the rank has sent heartbeats since, it is set anew: no heartbeat costs the agent anything.
    """

    def __init__(
        self,
        pages: Mapping[int, HeartbeatPage],
        timeouts: HeartbeatTimeouts,
        on_stalled: Callable[[int, float], None],
    ) -> None:
        self._pages = pages
        self._timeouts = timeouts
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._pids: dict[int, int] = {}

    def started(self, pids: Mapping[int, int]) -> None:
        """Note the process of each rank."""
        self._pids = dict(pids)

    def watch(self, rank: int) -> None:
        """Begin or go on to watch ``rank``: it has said that it is monitored."""
        self.forget(rank)
        page = self._pages.get(rank)
        if page is None:
            return
        deadline = deadline_of(page.read(), self._timeouts)
        if deadline is None:
            return
        if deadline.at_ns <= time.monotonic_ns():
            self._on_stalled(rank, deadline.timeout_s)
            return
        # The loop's clock is CLOCK_MONOTONIC too; a hair later, so that the deadline has passed then.
        self._timers[rank] = self._loop.call_at(deadline.at_ns / 1e9 + 0.001, self.watch, rank)

    def forget(self, rank: int) -> None:
        """Stop watching ``rank``: it has exited."""
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()

    def snapshots(self) -> list[RankSnapshot]:
        """Return what can be said of every rank right now."""
        now = time.monotonic_ns()
        taken = []
        for rank, page in self._pages.items():
            reading = page.read()
            pid = self._pids.get(rank)
            taken.append(
                RankSnapshot(
                    rank=rank,
                    heartbeats=reading.heartbeats,
                    age_s=(now - reading.last_sign_ns) / 1e9 if reading.monitored else 0.0,
                    process_state="" if pid is None else linux.process_state(pid),
                    monitored=reading.monitored,
                )
            )
        return taken

    def lowest_step(self) -> int | None:
        """Return the lowest step of the ranks that report one."""
        steps = [reading.step for reading in (page.read() for page in self._pages.values())]
        known = [step for step in steps if step is not None]
        return min(known, default=None)

    def close(self) -> None:
        """End all timers and unmap the pages."""
        for rank in list(self._timers):
            self.forget(rank)
        for page in self._pages.values():
            page.close()
