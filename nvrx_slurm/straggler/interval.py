"""How many iterations lie between two reports."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

_MEASURED = 16


class ReportInterval:
    """Counts iterations; a report is due every ``interval_s`` or so, on all ranks in the same iteration.

    The length of an iteration is the median of the last 16; before there are so many no report is due, and
    with each report it is looked at again, for iterations become longer or shorter.

    Args:
        interval_s: seconds between reports.
        at_least: iterations between reports at the least.
        clock: seconds.
    """

    def __init__(self, interval_s: float, at_least: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._at_least = at_least
        self._clock = clock
        self._last: float | None = None
        self._lengths: deque[float] = deque(maxlen=_MEASURED)
        self._left: int | None = None
        """Iterations until the next report, once that is known."""

    def iterate(self, longest: Callable[[float], float]) -> bool:
        """Count one iteration; tell whether a report is due.

        Args:
            longest: returns the highest of a value over all ranks. All ranks call it in the same iteration.
        """
        now = self._clock()
        if self._last is not None:
            self._lengths.append(now - self._last)
        self._last = now
        if self._left is None:
            if len(self._lengths) == _MEASURED:
                self._left = self._iterations(longest)
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._iterations(longest)
        return True

    def _iterations(self, longest: Callable[[float], float]) -> int:
        length = statistics.median(self._lengths)
        wanted = self._interval_s / length if length > 0 else 1.0
        return max(int(min(longest(wanted), 1e9)), self._at_least, 1)
