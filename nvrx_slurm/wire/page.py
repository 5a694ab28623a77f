"""A rank's heartbeat page: one memory-mapped file that the rank writes and its agent reads.

A heartbeat is three eight-byte stores, no system call and no reply. Stores of an aligned word are not torn on
the machines that this runs on; the time stamp is written last, so a reader that sees it sees the rest.
All times are CLOCK_MONOTONIC nanoseconds, one clock for every process of a node (clock_gettime(2)).
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
PAGE_VARIABLE = "NVRX_HEARTBEAT_PAGE"
"""Environment variable with the page's path."""

_MAGIC = 0x31_6761_7078_7276_6E  # "nvrxpag1", little endian
_NO_STEP = -1


class _Word(enum.IntEnum):
    """Index of each eight-byte word."""

    MAGIC = 0
    MONITORED_SINCE = 1
    """Time of ``init_workload_monitoring``; 0: not monitored."""
    HEARTBEATS = 2
    STEP = 3
    LAST_HEARTBEAT = 4
    STOP_REQUESTED = 5
    """Written by the agent."""


@dataclass(frozen=True)
class PageReading:
    """The page at one moment."""

    monitored_since_ns: int
    heartbeats: int
    step: int | None
    last_heartbeat_ns: int

    @property
    def monitored(self) -> bool:
        return self.monitored_since_ns != 0

    @property
    def last_sign_ns(self) -> int:
        """Last heartbeat or, before the first, the start of monitoring."""
        return self.last_heartbeat_ns or self.monitored_since_ns


class HeartbeatPage:
    """One page, seen from the agent or from the rank."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping).cast("q")

    @classmethod
    def create(cls, path: Path) -> HeartbeatPage:
        """Make a fresh page at ``path``, mode 0600 (agent side).

        Raises:
            OSError: no space, or the file exists.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            page = cls(mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)
        page._words[_Word.STEP] = _NO_STEP
        page._words[_Word.MAGIC] = _MAGIC
        return page

    @classmethod
    def open(cls, path: Path) -> HeartbeatPage:
        """Map an existing page (rank side).

        Raises:
            OSError: the file is missing or another user's.
            ValueError: the file is not a heartbeat page.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            info = os.fstat(fd)
            if info.st_uid != os.geteuid():
                raise PermissionError(f"{path} belongs to uid {info.st_uid}, not to uid {os.geteuid()}")
            if info.st_size < PAGE_BYTES:
                raise ValueError(f"{path} has {info.st_size} bytes; a heartbeat page has {PAGE_BYTES}")
            page = cls(mmap.mmap(fd, PAGE_BYTES))
        finally:
            os.close(fd)
        if page._words[_Word.MAGIC] != _MAGIC:
            page.close()
            raise ValueError(f"{path} is not a heartbeat page of this version")
        return page

    def close(self) -> None:
        self._words.release()
        self._mapping.close()

    # --- rank side -----------------------------------------------------------------------------------

    def start_monitoring(self) -> None:
        self._words[_Word.LAST_HEARTBEAT] = 0
        self._words[_Word.MONITORED_SINCE] = time.monotonic_ns()

    def stop_monitoring(self) -> None:
        self._words[_Word.MONITORED_SINCE] = 0

    def beat(self, step: int | None) -> None:
        words = self._words
        words[2] += 1  # _Word.HEARTBEATS; an enum look-up would double the cost of a beat
        if step is not None:
            words[3] = step
        words[4] = time.monotonic_ns()

    @property
    def stop_requested(self) -> bool:
        return self._words[5] != 0

    # --- agent side ----------------------------------------------------------------------------------

    def request_stop(self) -> None:
        self._words[_Word.STOP_REQUESTED] = 1

    def read(self) -> PageReading:
        last = self._words[_Word.LAST_HEARTBEAT]
        step = self._words[_Word.STEP]
        return PageReading(
            monitored_since_ns=self._words[_Word.MONITORED_SINCE],
            heartbeats=self._words[_Word.HEARTBEATS],
            step=None if step == _NO_STEP else step,
            last_heartbeat_ns=last,
        )
