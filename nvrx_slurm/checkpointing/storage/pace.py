"""A limit on how fast files are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pace:
    """Lets writers, on any number of threads, begin no sooner than the limit allows for all together."""

    def __init__(
        self,
        bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._next = 0.0

    def __call__(self, size: int) -> None:
        """Return when ``size`` bytes may be written."""
        with self._lock:
            now = self._clock()
            begin = max(now, self._next)
            self._next = begin + size / self._bytes_per_s
        if begin > now:
            self._wait(begin - now)
