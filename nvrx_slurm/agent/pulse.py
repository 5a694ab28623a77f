"""Shows the guardian that the agent's event loop runs: a counter in memory that both share.

An agent that is stopped, by a debugger or SIGSTOP, is lost to the Coordinator, which starts the next cycle
elsewhere; its ranks would live on beside it.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import time
from collections.abc import Callable

BEAT_S = 1.0
CHECK_S = 2.5
"""Three of them are below the 10 s within which a cut-off node kills its ranks."""
MAX_UNCHANGED = 3

_COUNT = struct.Struct("Q")
_shared = mmap.mmap(-1, _COUNT.size)
"""Anonymous and shared by fork(2)."""


def _set(count: int) -> None:
    _COUNT.pack_into(_shared, 0, count)


def count() -> int:
    """Return how often the agent has beaten; 0: it need not, for it begins or ends."""
    return int(_COUNT.unpack_from(_shared)[0])


async def beat() -> None:
    """Beat until cancelled."""
    try:
        while True:
            _set(count() + 1)
            await asyncio.sleep(BEAT_S)
    finally:
        _set(0)


class PulseWatch:
    """The guardian's side. Several checks, for after a suspension of both the guardian may wake up first."""

    def __init__(self, read: Callable[[], int] = count, clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._last = 0
        self._unchanged = 0
        self._next = clock() + CHECK_S

    def seconds_to_check(self) -> float:
        return max(0.0, self._next - self._clock())

    def has_stopped(self) -> bool:
        """Check if it is time to; tell whether the agent has stood still for :data:`MAX_UNCHANGED` checks."""
        now = self._clock()
        if now < self._next:
            return False
        # This process itself: what it has seen before counts no more.
        stood_still = now > self._next + CHECK_S
        self._next = now + CHECK_S
        seen = self._read()
        if seen == 0 or seen != self._last or stood_still:
            self._unchanged = 0
        else:
            self._unchanged += 1
        self._last = seen
        return self._unchanged >= MAX_UNCHANGED
