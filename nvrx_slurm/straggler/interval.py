"""How many iterations lie between two reports."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable

_MEASURED = 16
_FITS = 1.45
"""A power of two is kept while it is so close to what is wanted; from 1.42 on the next one is closer."""


class ReportInterval:
    """Counts iterations; a report is due every ``interval_s`` or so, on all ranks in the same iteration.

    Before 16 iterations were measured no report is due. With each report the number of iterations to the next
    one is looked at again, for iterations become longer or shorter.

    Args:
        interval_s: seconds between reports.
        at_least: iterations between reports at the least.
        clock: seconds.
    """

    def __init__(self, interval_s: float, at_least: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._at_least = at_least
        self._clock = clock
        self.begin_anew()

    def begin_anew(self) -> None:
        """Count from here: the ranks were interrupted, and not all of them in the same iteration."""
        self._count = 0
        self._due: int | None = None
        """The count of the next report, once that is known."""
        self._times: deque[float] = deque(maxlen=_MEASURED + 1)
        """When the last iterations ended."""
        self._reported: tuple[int, float] | None = None
        """The count of the last report, and when that was."""
        self._apart = 0
        """Iterations between the reports of a rank that asks nobody."""

    def iterate(self, longest: Callable[[float], float]) -> bool:
        """Count one iteration; tell whether a report is due. Their length is the median of the last 16.

        Args:
            longest: returns the highest of a value over all ranks. All ranks call it in the same iteration.
        """

        def following() -> int:
            return self._count + max(self._wanted(self._median_length(), longest), self._at_least)

        return self._iterate(following)

    def iterate_alone(self) -> bool:
        """Count one iteration; tell whether a report is due, without a word of the other ranks.

        If each rank counted to a number of its own they would drift apart. Reports are due when a power of
        two divides the count, the one nearest to ``interval_s`` by the mean length since the last report,
        which is the same for ranks that wait for each other. Who chooses another one all the same meets the
        rest in every second report.
        """

        def following() -> int:
            wanted = max(self._wanted(self._mean_length(), lambda own: own), self._at_least)
            if not wanted / _FITS < self._apart < wanted * _FITS:
                self._apart = 2 ** round(math.log2(wanted))
                if self._apart < self._at_least:
                    self._apart *= 2
            return (self._count // self._apart + 1) * self._apart

        return self._iterate(following)

    def _iterate(self, following: Callable[[], int]) -> bool:
        self._times.append(self._clock())
        self._count += 1
        if self._due is None:
            if len(self._times) > _MEASURED:
                self._due = following()
            return False
        if self._count < self._due:
            return False
        self._due = following()
        self._reported = self._count, self._times[-1]
        return True

    def _wanted(self, length: float, longest: Callable[[float], float]) -> int:
        wanted = self._interval_s / length if length > 0 else 1.0
        return max(int(min(longest(wanted), 1e9)), 1)

    def _median_length(self) -> float:
        return statistics.median(after - before for before, after in itertools.pairwise(self._times))

    def _mean_length(self) -> float:
        if self._reported is None:
            return self._median_length()
        count, when = self._reported
        return (self._times[-1] - when) / (self._count - count)
