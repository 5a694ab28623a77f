"""A rank's progress page: memory that it shares with its supervisor, words that one of the two writes.

The rank writes with plain stores: no system call, no reply. Times are CLOCK_MONOTONIC nanoseconds, one clock
for all processes of a node (clock_gettime(2)). The memory is a memfd(2) that the supervisor inherits.
"""

from __future__ import annotations

import enum
import mmap
import os
from dataclasses import dataclass

PAGE_BYTES = 4096


class Phase(enum.IntEnum):
    """What the rank's main thread is in."""

    WAITING = 0
    """The engine's own waits, each bounded."""
    USER = 1
    """The wrapped function: can be interrupted, and shows progress."""
    RECOVERY = 2
    """From a fault to the barrier, rank assignment, and what comes after the last iteration: has its time."""
    START = 3
    """Initialize and the health check before the function: can be interrupted, and has its time."""


class Plugin(enum.IntEnum):
    """What of the user's is under way outside the function, for whoever asks what hangs."""

    NONE = 0
    INITIALIZE = 1
    HEALTH_CHECK = 2
    FINALIZE = 3
    RANK_ASSIGNMENT = 4
    COMPLETION = 5
    TERMINATE = 6
    EXCEPTION_TEXT = 7

    @property
    def label(self) -> str:
        """Its name as users write it."""
        return "the restart" if self is Plugin.NONE else self.name.lower()


class Word(enum.IntEnum):
    """Index of each eight-byte word."""

    PHASE = 0
    BYTECODE_ASKED = 1
    """Since when the main thread has been asked for a sign of life that it has not given; 0: not asked."""
    PING = 2
    """Last ping of this iteration; 0: none."""
    PROTECTION_OFF = 3
    """How many ``disable_hang_protection`` are open."""
    ABORT_BEGUN = 4
    ABORT_ENDED = 5
    MAIN_THREAD = 6
    """Its kernel thread id."""
    SINCE = 7
    """When the phase began, or hang protection came back."""
    PLUGIN = 8


@dataclass(frozen=True)
class Reading:
    """The page at one moment."""

    phase: Phase
    bytecode_asked_ns: int
    ping_ns: int
    protected: bool
    abort_begun_ns: int
    abort_ended_ns: int
    main_thread: int
    since_ns: int
    plugin: Plugin = Plugin.NONE


class ProgressPage:
    """One page, seen from either side."""

    def __init__(self, fd: int | None = None) -> None:
        """Make a new page, or map the one behind the descriptor ``fd``, which stays open.

        Raises:
            OSError: no memory, or no page.
        """
        if fd is None:
            fd = os.memfd_create("nvrx-progress", os.MFD_CLOEXEC)
            os.ftruncate(fd, PAGE_BYTES)
        self.fd = fd
        self._mapping = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._mapping).cast("q")

    def read(self) -> Reading:
        words = self.words
        return Reading(
            phase=Phase(words[Word.PHASE]),
            bytecode_asked_ns=words[Word.BYTECODE_ASKED],
            ping_ns=words[Word.PING],
            protected=words[Word.PROTECTION_OFF] == 0,
            abort_begun_ns=words[Word.ABORT_BEGUN],
            abort_ended_ns=words[Word.ABORT_ENDED],
            main_thread=words[Word.MAIN_THREAD],
            since_ns=words[Word.SINCE],
            plugin=Plugin(words[Word.PLUGIN]),
        )

    def set_phase(self, phase: Phase, now_ns: int) -> None:
        """Note what the main thread does from now on."""
        words = self.words
        words[Word.SINCE] = now_ns
        words[Word.PHASE] = phase

    def close(self) -> None:
        """Let go of it; may be called again."""
        self.words.release()
        self._mapping.close()
        # Nothing comes between the two: a signal's handler would leave it open, or have another's closed.
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
