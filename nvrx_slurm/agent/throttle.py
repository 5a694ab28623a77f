"""What a rank may say as often as it likes goes out at a bounded rate; the last of its kind always does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from nvrx_slurm.wire.messages import AgentMessage

_log = logging.getLogger(__name__)
MAX_PER_INTERVAL = 20
INTERVAL_S = 1.0


@dataclass
class _Interval:
    said: int = 0
    held: dict[Hashable, AgentMessage] = field(default_factory=dict)
    """The last message of each kind, oldest first; :data:`MAX_PER_INTERVAL` at most."""


class Throttle:
    """Passes a rank's messages on to ``say``; of a flood, the last of each kind once an interval."""

    def __init__(self, say: Callable[[AgentMessage], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._intervals: dict[int, _Interval] = {}
        self._warned: set[int] = set()

    def say(self, rank: int, kind: Hashable, message: AgentMessage) -> None:
        interval = self._intervals.get(rank)
        if interval is None:
            interval = self._intervals[rank] = _Interval()
            self._loop.call_later(INTERVAL_S, self._end_interval, rank)
        if interval.said < MAX_PER_INTERVAL:
            interval.said += 1
            self._say(message)
            return
        if rank not in self._warned:
            self._warned.add(rank)
            _log.warning(
                "rank %d sends more than %d checkpoints, requests or time-outs in %g s: the last is kept",
                rank,
                MAX_PER_INTERVAL,
                INTERVAL_S,
            )
        interval.held.pop(kind, None)
        if len(interval.held) == MAX_PER_INTERVAL:
            del interval.held[next(iter(interval.held))]
        interval.held[kind] = message

    def flush(self) -> None:
        """Say what is held back: what follows must come after it."""
        for interval in self._intervals.values():
            self._release(interval)

    def _end_interval(self, rank: int) -> None:
        interval = self._intervals.pop(rank)
        if interval.held:
            self._intervals[rank] = _Interval(said=len(interval.held))
            self._release(interval)
            self._loop.call_later(INTERVAL_S, self._end_interval, rank)

    def _release(self, interval: _Interval) -> None:
        held, interval.held = interval.held, {}
        for message in held.values():
            self._say(message)
