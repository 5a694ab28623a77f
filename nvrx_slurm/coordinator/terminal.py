"""Standard output and error of the Coordinator, written by a thread of its own.

So nobody can stop the job by not reading.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading

_MAX_WAITING = 20_000
"""Pieces of output; beyond them the newest are left out, and their number is told."""
STDOUT, STDERR = 1, 2
_UNPRINTABLE = "\ufffd"


class Terminal:
    """Takes output and returns at once.

    A stream that is closed, broken or full is no reason to stop: what it can't take is left out. Everything
    is in the run directory anyway.
    """

    def __init__(self, name: str = "nvrx-srun") -> None:
        """``name`` is the command's, and begins every line of :meth:`say`."""
        self._name = name
        self._waiting: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_MAX_WAITING)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write_all, name="terminal", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Print one line of the Coordinator's own to standard error, without control characters."""
        stamp = datetime.datetime.now().strftime("%H:%M:%S")
        clean = "".join(char if char.isprintable() or char == "\t" else _UNPRINTABLE for char in text)
        self._put(STDERR, f"{self._name} {stamp} {clean}\n".encode(errors="replace"))

    def show(self, data: bytes) -> None:
        """Copy ``data`` to standard output as it is."""
        self._put(STDOUT, data)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for ``timeout_s`` at most: a reader that does not read can't hold up the end."""
        try:
            self._waiting.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _put(self, fd: int, data: bytes) -> None:
        try:
            self._waiting.put_nowait((fd, data))
        except queue.Full:
            self._left_out += 1

    def _write_all(self) -> None:
        while (piece := self._waiting.get()) is not None:
            _write(*piece)
            if self._left_out and self._waiting.qsize() < _MAX_WAITING // 2:
                left_out, self._left_out = self._left_out, 0
                _write(STDERR, f"{self._name}: {left_out} lines not shown: nobody read them\n".encode())


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        return


def open_standard_streams() -> None:
    """Open /dev/null in place of a standard stream that was closed, lest another file take its number."""
    for fd in (0, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
