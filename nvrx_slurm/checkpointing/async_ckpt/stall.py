"""Whether a worker hangs in the kernel: storage that does not answer leaves it there, and SIGKILL with it."""

from __future__ import annotations

import contextlib
import os
import time

_HELD = "DTt"
"""States of a thread (proc(5)) that waits for a device or a file server, or that somebody has stopped."""


class StallWatch:
    """Looks at a process now and then."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen = (0, 0)
        self._since = time.monotonic()

    def held_s(self) -> float:
        """Return for how long no thread has written or computed while one is held by the kernel.

        As far as the looks so far show: since the first that saw what the last one saw.
        """
        now, signs = time.monotonic(), (self._ticks(), self._written())
        if signs != self._seen or not any(state in _HELD for state in self.states()):
            self._seen, self._since = signs, now
        return now - self._since

    def states(self) -> str:
        """Return the state letter of each thread."""
        found = []
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self._pid}/task"):
                fields = self._fields(f"task/{thread}/stat")
                found += fields[:1]
        return "".join(sorted(found))

    def _ticks(self) -> int:
        return sum(map(int, self._fields("stat")[11:13]))  # utime and stime, of all threads

    def _fields(self, name: str) -> list[str]:
        """Return what stands behind the command name, which may itself hold any character."""
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/{name}", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
        return []

    def _written(self) -> int:
        with contextlib.suppress(OSError), open(f"/proc/{self._pid}/io") as file:
            for line in file:
                name, _, count = line.partition(": ")
                if name == "wchar":
                    return int(count)
        return 0
