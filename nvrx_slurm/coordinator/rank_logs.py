"""Writes the ranks' output: ``rank_<r>.log`` as it came, ``merged.log`` line by line in order of time."""

from __future__ import annotations

import datetime
import heapq
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.wire.messages import LogChunk, LogEnd, LogMessage

REORDER_S = 0.5
"""Lines of different nodes arrive out of order; they wait this long for earlier ones."""
_MAX_LINE_BYTES = 64 * 1024


class RankLogs:
    """One writer for all ranks. Not for several threads at once.

    Args:
        on_line: called with cycle, rank and text of every complete line, in the order of arrival.
        max_open_files: beyond them the one that was written longest ago is closed.
    """

    def __init__(
        self, run_dir: RunDir, on_line: Callable[[int, int, bytes], None], max_open_files: int = 256
    ) -> None:
        self._run_dir = run_dir
        self._on_line = on_line
        self._max_open_files = max_open_files
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._partial: dict[tuple[int, int], bytes] = {}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._sequence = 0
        self._newest_cycle = 0

    def write(self, node: str, message: LogMessage, now: float) -> None:
        """Take one message of ``node``; ``now`` in Unix seconds. Its lines are merged by :meth:`flush`.

        Raises:
            OSError: the run directory can't be written.
        """
        match message:
            case LogChunk() if message.cycle >= 0 and message.rank >= 0:
                if message.cycle > self._newest_cycle:
                    self._close(self._run_dir.merged_log(self._newest_cycle))
                    self._newest_cycle = message.cycle
                try:
                    self._append(self._run_dir.rank_log(message.cycle, message.rank), message.data)
                finally:
                    self._split(node, message, now)
            case LogEnd():
                self._close(self._run_dir.rank_log(message.cycle, message.rank))
                rest = self._partial.pop((message.cycle, message.rank), b"")
                if rest:
                    self._line(node, message.cycle, message.rank, now, rest)
            case _:
                pass

    @property
    def waits(self) -> bool:
        """Lines wait for earlier ones: call :meth:`flush` in a moment, also if nothing comes."""
        return bool(self._waiting)

    def flush(self, until: float) -> None:
        """Write the merged lines that are not younger than ``until`` (Unix seconds).

        Raises:
            OSError: the run directory can't be written.
        """
        due: dict[int, list[bytes]] = {}
        while self._waiting and self._waiting[0][0] <= until:
            _, _, cycle, line = heapq.heappop(self._waiting)
            due.setdefault(cycle, []).append(line)
        failed = None
        for cycle, lines in due.items():
            try:
                self._append(self._run_dir.merged_log(cycle), b"".join(lines))
            except OSError as error:
                failed = error
            if cycle < self._newest_cycle:
                self._close(self._run_dir.merged_log(cycle))
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Write what waits and close the files.

        Raises:
            OSError: the run directory can't be written.
        """
        try:
            self.flush(float("inf"))
        finally:
            while self._open:
                _, fd = self._open.popitem()
                os.close(fd)

    def _split(self, node: str, chunk: LogChunk, now: float) -> None:
        # A node whose clock is ahead must not hold its lines back.
        ts = min(chunk.ts, now)
        key = (chunk.cycle, chunk.rank)
        *lines, rest = (self._partial.pop(key, b"") + chunk.data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        if rest:
            self._partial[key] = rest
        for line in lines:
            self._line(node, chunk.cycle, chunk.rank, ts, line)

    def _line(self, node: str, cycle: int, rank: int, ts: float, line: bytes) -> None:
        stamp = datetime.datetime.fromtimestamp(ts).isoformat(timespec="milliseconds")
        text = line.rstrip(b"\r")
        merged = f"{stamp} {node} rank {rank}: ".encode() + text + b"\n"
        self._sequence += 1
        heapq.heappush(self._waiting, (ts, self._sequence, cycle, merged))
        self._on_line(cycle, rank, text)

    def _append(self, path: Path, data: bytes) -> None:
        fd = self._open.pop(path, None)
        if fd is None:
            if len(self._open) >= self._max_open_files:
                _, oldest = self._open.popitem(last=False)
                os.close(oldest)
            fd = _open(path)
        self._open[path] = fd
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]

    def _close(self, path: Path) -> None:
        """Close a file that is complete; more for it would open it again."""
        fd = self._open.pop(path, None)
        if fd is not None:
            os.close(fd)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:  # its cycle's first
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last ``count`` lines of a log, none if there is no such file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_LINE_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
