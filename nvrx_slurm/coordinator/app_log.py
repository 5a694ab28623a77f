"""One log per cycle where the user wants it, in the layout of NVIDIA's ft_launcher: ``PREFIX_cycle<N>.log``.

Every line begins with its rank, as with ``srun -l``; the lines of all ranks come in the order of arrival.
"""

from __future__ import annotations

import os
from pathlib import Path


class AppLog:
    """Collects lines, and appends them to their cycle's file when told to. Not for several threads."""

    def __init__(self, prefix: Path) -> None:
        """``prefix``: the files are called as it, with ``_cycle<N>`` before its extension or ``.log``."""
        self._prefix = prefix
        self._lines: dict[int, list[bytes]] = {}

    def path(self, cycle: int) -> Path:
        prefix = self._prefix
        return prefix.with_name(f"{prefix.stem}_cycle{cycle}{prefix.suffix or '.log'}")

    def add(self, cycle: int, rank: int, world_size: int, text: bytes) -> None:
        """Take one line, without its end; the rank is padded to the width of the highest."""
        width = len(str(max(world_size - 1, 0)))
        line = f"{rank:>{width}}: ".encode() + text.replace(b"\0", b"<NUL>") + b"\n"
        self._lines.setdefault(cycle, []).append(line)

    def flush(self) -> None:
        """Append what was collected.

        Raises:
            OSError: the files can't be written; the lines are dropped.
        """
        waiting, self._lines = self._lines, {}
        for cycle, lines in waiting.items():
            path = self.path(cycle)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with open(fd, "ab") as file:
                file.write(b"".join(lines))
