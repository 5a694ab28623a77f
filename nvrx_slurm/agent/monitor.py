"""Rank monitors: the deadlines of the ranks on this node, one timer each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from nvrx_slurm import linux
from nvrx_slurm.agent.deadlines import Deadline, deadlines_of
from nvrx_slurm.wire.messages import RankSnapshot
from nvrx_slurm.wire.page import AgentPage, PageReading
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

_HAIR_S = 0.001
"""A timer fires this much after the deadline, so that the deadline has passed then."""


class RankMonitors:
    """Watches one cycle's pages.

    A timer sleeps until the earliest deadline that the page implied when it was set, but no longer than the
    shortest time-out that is configured. A deadline that comes up meanwhile, of a section opened one moment
    later for instance, is at least that far away: it is seen before it passes. So neither a heartbeat nor a
    section costs the agent anything, nothing is polled, and no rank has to call the agent.
    """

    def __init__(
        self,
        pages: Mapping[int, AgentPage],
        monitoring: Monitoring,
        on_stalled: Callable[[int, Sequence[Deadline]], None],
    ) -> None:
        self._pages = pages
        self._sections = list(monitoring.section.section)
        self._monitoring = monitoring
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._pids: dict[int, int] = {}

    def started(self, pids: Mapping[int, int]) -> None:
        """Note the process of each rank."""
        self._pids = dict(pids)

    def pid_of(self, rank: int) -> int | None:
        return self._pids.get(rank)

    @property
    def pids(self) -> list[int]:
        """Processes of all ranks that have been started."""
        return list(self._pids.values())

    @property
    def sections(self) -> Sequence[str]:
        """Names, by slot."""
        return self._sections

    def read(self, rank: int) -> PageReading:
        return self._pages[rank].read(len(self._sections))

    def change(self, rank: int, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> None:
        """Note that ``rank`` has put other time-outs on its page, and watch it by them.

        Raises:
            ValueError: they are of other sections.
        """
        if list(section.section) != self._sections:
            raise ValueError("other sections than this job's")
        changed = Monitoring(heartbeat=heartbeat, section=section, warmup=self._monitoring.warmup)
        old, new = self._monitoring.smallest(), changed.smallest()
        if new is not None and (old is None or new < old):
            # For all ranks: a timer that wakes too often does no harm, one that sleeps too long does.
            self._monitoring = changed
        for each in [rank, *self._timers]:
            self.watch(each)

    def watch(self, rank: int) -> None:
        """Begin or go on to watch ``rank``: it has said that it is monitored."""
        self.forget(rank)
        if rank not in self._pages:
            return
        reading = self.read(rank)
        if not reading.monitored:
            return
        now = time.monotonic_ns()
        deadlines = deadlines_of(reading, self._sections)
        late = [deadline for deadline in deadlines if deadline.at_ns <= now]
        if late:
            self._on_stalled(rank, late)
            return
        sleeps = [deadline.at_ns / 1e9 for deadline in deadlines[:1]]
        smallest = self._monitoring.smallest()
        if smallest is not None:
            sleeps.append(now / 1e9 + smallest)
        if sleeps:
            # The loop's clock is CLOCK_MONOTONIC too.
            self._timers[rank] = self._loop.call_at(min(sleeps) + _HAIR_S, self.watch, rank)

    def forget(self, rank: int) -> None:
        """Stop watching ``rank``: it has exited."""
        timer = self._timers.pop(rank, None)
        if timer is not None:
            timer.cancel()

    def snapshots(self) -> list[RankSnapshot]:
        """Return what can be said of every rank right now."""
        now = time.monotonic_ns()
        taken = []
        for rank in self._pages:
            reading = self.read(rank)
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

    def stalled_s(self) -> float | None:
        """Return the time since the last heartbeat of any rank; None if none ever sent one."""
        last = max((page.read().last_heartbeat_ns for page in self._pages.values()), default=0)
        return (time.monotonic_ns() - last) / 1e9 if last else None

    def lowest_step(self) -> int | None:
        """Return the lowest step of the ranks that report one."""
        steps = [reading.step for reading in (page.read() for page in self._pages.values())]
        known = [step for step in steps if step is not None]
        return min(known, default=None)

    def close(self) -> None:
        """End all timers and close the pages."""
        for rank in list(self._timers):
            self.forget(rank)
        for page in self._pages.values():
            page.close()
