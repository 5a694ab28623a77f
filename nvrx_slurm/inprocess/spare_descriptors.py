"""Descriptors held back for what ends a fault: the function may have used up all others (``ulimit -n``)."""

from __future__ import annotations

import contextlib
import os

_COUNT = 8


class SpareDescriptors:
    """A few open files of no use."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self.take()

    def take(self) -> None:
        """Hold as many as there should be, or can."""
        with contextlib.suppress(OSError):
            while len(self._held) < _COUNT:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        """Leave them to whoever needs descriptors now; may be called again."""
        while self._held:
            os.close(self._held.pop())
