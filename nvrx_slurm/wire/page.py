"""A rank's heartbeat page: one file that the rank maps and writes, and its agent reads.

A heartbeat is three eight-byte stores, opening or closing a section one or two; no system call, no reply.
Stores of an aligned word are not torn on the machines that this runs on; a time stamp is written last, so a
reader that sees it sees the rest. All times are CLOCK_MONOTONIC nanoseconds, one clock for every process of a
node (clock_gettime(2)); 0 stands for "not now", and as a time-out for "none".

The page holds the time-outs too, so what the agent enforces is what the page says at that moment. Sections
have numbers here: their position in the configuration, which rank and agent both know.

The agent does not map the page: a rank that shortens its file would kill it (SIGBUS, mmap(2)). It reads and
writes through the descriptor, which sees the same memory; that costs a system call, and it reads rarely.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.wire.timeouts import MAX_SECTIONS, HeartbeatTimeouts, SectionTimeouts

PAGE_BYTES = 4096
PAGE_VARIABLE = "NVRX_HEARTBEAT_PAGE"
"""Environment variable with the page's path."""

_MAGIC = 0x32_6761_7078_7276_6E  # "nvrxpag2", little endian
_NO_STEP = -1
_WORD = struct.Struct("q")
_PAGE = struct.Struct(f"{PAGE_BYTES // 8}q")
_LONGEST_S = 1e9
"""Of a time-out; more would not fit a word."""
_FIRST_SLOT = 16
"""Word of the first section's slot; a slot is two words: opened at, time-out."""
assert (_FIRST_SLOT + 2 * MAX_SECTIONS) * 8 <= PAGE_BYTES


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
    INITIAL_TIMEOUT = 6
    SUBSEQUENT_TIMEOUT = 7
    OUT_OF_SECTION_TIMEOUT = 8
    OUT_OF_SECTION_SINCE = 9
    """0 while a section is open."""


@dataclass(frozen=True)
class OpenSection:
    slot: int
    opened_ns: int
    timeout_ns: int


@dataclass(frozen=True)
class PageReading:
    """The page at one moment."""

    monitored_since_ns: int
    heartbeats: int
    step: int | None
    last_heartbeat_ns: int
    initial_timeout_ns: int = 0
    subsequent_timeout_ns: int = 0
    out_of_section_timeout_ns: int = 0
    out_of_section_since_ns: int = 0
    sections: tuple[OpenSection, ...] = ()
    """The open ones."""

    @property
    def monitored(self) -> bool:
        return self.monitored_since_ns != 0

    @property
    def last_sign_ns(self) -> int:
        """Last heartbeat, opening of a section, or closing of the last open one; else the start."""
        opened = max((section.opened_ns for section in self.sections), default=0)
        return max(self.monitored_since_ns, self.last_heartbeat_ns, self.out_of_section_since_ns, opened)

    @property
    def has_used_sections(self) -> bool:
        return self.out_of_section_since_ns != self.monitored_since_ns


class AgentPage:
    """One page, seen from the agent."""

    def __init__(self, fd: int, initial: bytes) -> None:
        self._fd = fd
        self._last = bytearray(initial)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def set_timeouts(self, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> None:
        """Enforce these from now on.

        Raises:
            OSError: no space.
        """
        for word, value in _timeout_words(heartbeat, section):
            self._write(word, value)

    def request_stop(self) -> None:
        """Raise ``stop_requested``.

        Raises:
            OSError: no space, where somebody has shortened the file.
        """
        self._write(_Word.STOP_REQUESTED, 1)

    def read(self, sections: int = 0) -> PageReading:
        """Return what the page says, the first ``sections`` slots included.

        A part that can't be read, for somebody has shortened the file, is as it was: no new sign of life.
        """
        # The head before the slots: a section that is just being opened or closed then never looks like none.
        self._update(0, _FIRST_SLOT)
        self._update(_FIRST_SLOT, 2 * sections)
        words = _PAGE.unpack(self._last)
        opened = []
        for slot in range(sections):
            since = words[_FIRST_SLOT + 2 * slot]
            if since:
                opened.append(OpenSection(slot, since, words[_FIRST_SLOT + 2 * slot + 1]))
        step = words[_Word.STEP]
        return PageReading(
            monitored_since_ns=words[_Word.MONITORED_SINCE],
            heartbeats=words[_Word.HEARTBEATS],
            step=None if step == _NO_STEP else step,
            last_heartbeat_ns=words[_Word.LAST_HEARTBEAT],
            initial_timeout_ns=words[_Word.INITIAL_TIMEOUT],
            subsequent_timeout_ns=words[_Word.SUBSEQUENT_TIMEOUT],
            out_of_section_timeout_ns=words[_Word.OUT_OF_SECTION_TIMEOUT],
            out_of_section_since_ns=words[_Word.OUT_OF_SECTION_SINCE],
            sections=tuple(opened),
        )

    def _update(self, word: int, count: int) -> None:
        try:
            data = os.pread(self._fd, 8 * count, 8 * word)
        except OSError:
            return
        if len(data) == 8 * count and (word != 0 or _WORD.unpack_from(data)[0] == _MAGIC):
            self._last[8 * word : 8 * (word + count)] = data

    def _write(self, word: int, value: int) -> None:
        os.pwrite(self._fd, _WORD.pack(value), 8 * word)


class HeartbeatPage:
    """One page, seen from the rank."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping).cast("q")

    @staticmethod
    def create(path: Path) -> AgentPage:
        """Make a fresh page at ``path``, mode 0600.

        Raises:
            OSError: no space, or the file exists; names ``path``.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        initial = _WORD.pack(_MAGIC) + bytes(8 * (_Word.STEP - 1)) + _WORD.pack(_NO_STEP)
        initial += bytes(PAGE_BYTES - len(initial))
        try:
            os.posix_fallocate(fd, 0, PAGE_BYTES)
            os.pwrite(fd, initial, 0)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(path)) from error
        return AgentPage(fd, initial)

    @classmethod
    def open(cls, path: Path) -> HeartbeatPage:
        """Map an existing page.

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

    def set_timeouts(self, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> None:
        """Enforce these from now on."""
        for word, value in _timeout_words(heartbeat, section):
            self._words[word] = value

    def start_monitoring(self, now_ns: int) -> None:
        self._close_all()
        self._words[_Word.LAST_HEARTBEAT] = 0
        self._words[_Word.OUT_OF_SECTION_SINCE] = now_ns
        self._words[_Word.MONITORED_SINCE] = now_ns

    def stop_monitoring(self) -> None:
        self._words[_Word.MONITORED_SINCE] = 0
        self._close_all()

    def _close_all(self) -> None:
        for slot in range(MAX_SECTIONS):
            self._words[_FIRST_SLOT + 2 * slot] = 0

    def beat(self, step: int | None, now_ns: int) -> None:
        """Note a heartbeat.

        Raises:
            TypeError: ``step`` is no integer.
            ValueError: it does not fit 64 bits.
        """
        words = self._words
        if step is not None:
            if step is True or step is False:
                raise TypeError
            words[3] = step
        words[2] += 1  # _Word.HEARTBEATS; an enum look-up would double the cost of a beat
        words[4] = now_ns

    def set_section_timeout(self, slot: int, timeout: float | None) -> None:
        self._words[_FIRST_SLOT + 2 * slot + 1] = _ns(timeout)

    def open_section(self, slot: int, now_ns: int, is_first: bool) -> None:
        """Note that a section was opened, and whether none was open before."""
        words = self._words
        words[16 + 2 * slot] = now_ns
        if is_first:
            words[9] = 0

    def close_section(self, slot: int, now_ns: int, is_last: bool) -> None:
        """Note that a section was closed, and whether none is open now."""
        words = self._words
        if is_last:
            words[9] = now_ns
        words[16 + 2 * slot] = 0

    @property
    def stop_requested(self) -> bool:
        return self._words[5] != 0


def _timeout_words(heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> Iterator[tuple[int, int]]:
    """Yield which words say these, and how."""
    yield _Word.INITIAL_TIMEOUT, _ns(heartbeat.initial)
    yield _Word.SUBSEQUENT_TIMEOUT, _ns(heartbeat.subsequent)
    yield _Word.OUT_OF_SECTION_TIMEOUT, _ns(section.out_of_section)
    for slot, timeout in enumerate(section.section.values()):
        yield _FIRST_SLOT + 2 * slot + 1, _ns(timeout)


def _ns(seconds: float | None) -> int:
    return 0 if seconds is None else max(1, int(min(seconds, _LONGEST_S) * 1e9))
