"""Shared memory that snapshots are copied to: allocated once, used again, mapped by trainer and worker."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from nvrx_slurm.checkpointing.async_ckpt import copying
from nvrx_slurm.checkpointing.async_ckpt.copying import Range
from nvrx_slurm.checkpointing.storage.host_memory import available_memory

_ROUND = 16 << 20  # states grow by a few bytes now and then; that must not cost a new arena
_LEFT_FREE = 256 << 20
_FAULTING_THREADS = 4
_PIECE = 4 << 20  # while it is mapped no other thread can map memory
_POPULATE_WRITE = 23  # madvise(2)
_libc = ctypes.CDLL(None)


memory_keys = itertools.count()
"""Names for shared memory, of arenas and others, in this process and its worker."""


class OutOfMemoryError(RuntimeError):
    """There is no memory for another snapshot."""


class NoRoomError(RuntimeError):
    """Too much waits to be written, and the policy is not to wait."""


class WhenFull(Enum):
    """What becomes of a save while too much is still to be written."""

    WAIT = "wait"
    """Training waits until there is room."""
    SKIP = "skip"
    """There is no such checkpoint, on any rank; its finalizers are not run."""
    FAIL = "fail"
    """It is an error of the save."""


class Arena:
    """Anonymous shared memory (memfd_create(2)); gone with the last process that has it."""

    def __init__(self, size: int) -> None:
        self.capacity = _capacity(size)
        self.fd = os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.capacity)
        self.memory = mmap.mmap(self.fd, self.capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.key = next(memory_keys)
        self._is_faulted_in = False
        self._is_faulting_in = False

    def as_tensor(self, offset: int, size: int) -> Any:
        """Return a part of it as a tensor of bytes."""
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=offset)

    def copy(self, ranges: Sequence[Range], threads: int = 1) -> None:
        """Copy host memory to it.

        The first copy, to memory that nobody has had yet, is written to the memory's file: half as dear as
        the faults of a mapping, for which it is soon enough when the first snapshot has been written.

        Args:
            ranges: places in it, addresses to copy from, and sizes in bytes; none overlap.
            threads: that copy, the caller's among them.

        Raises:
            OSError: the system has no memory for it.
        """
        if self._is_faulted_in:
            copying.copy([(self.address + place, source, size) for place, source, size in ranges], threads)
            return
        pieces = [
            (place + done, source + done, min(_PIECE, size - done))
            for place, source, size in ranges
            for done in range(0, size, _PIECE)
        ]
        left, errors, helpers = iter(pieces), list[Exception](), list[threading.Thread]()

        def write() -> None:
            try:
                for piece in left:
                    self._write_from(*piece)
            except Exception as error:
                errors.append(error)

        with contextlib.suppress(RuntimeError):  # no thread can be started: the program is ending
            for _ in range(min(threads, len(pieces)) - 1):
                helper = threading.Thread(target=write, daemon=True, name="nvrx-copier")
                helper.start()
                helpers.append(helper)
        write()
        for helper in helpers:
            helper.join()
        if errors:
            raise errors[0]

    def _write_from(self, place: int, source: int, size: int) -> None:
        content = memoryview((ctypes.c_char * size).from_address(source)).cast("B")
        while content:
            count = os.pwrite(self.fd, content, place)
            content, place = content[count:], place + count

    def fault_in(self) -> None:
        """Have the system give and map all of its memory, on several threads; a copy then finds it there.

        Raises:
            OSError: the system has no memory for it.
        """
        with ThreadPoolExecutor(_FAULTING_THREADS) as pool:
            list(pool.map(self._fault_in, range(0, self.capacity, _PIECE)))
        self._is_faulted_in = True

    def fault_in_meanwhile(self) -> None:
        """As :meth:`fault_in`, on a thread of its own, that ends when the arena goes."""
        if not self._is_faulted_in and not self._is_faulting_in:
            self._is_faulting_in = True
            threading.Thread(
                target=_fault_in_meanwhile,
                args=[weakref.ref(self), self.capacity],
                daemon=True,
                name="nvrx-memory",
            ).start()

    def _fault_in(self, start: int) -> None:
        size = min(_PIECE, self.capacity - start)
        if _libc.madvise(ctypes.c_void_p(self.address + start), ctypes.c_size_t(size), _POPULATE_WRITE):
            os.posix_fallocate(self.fd, start, size)  # before Linux 5.14

    def write(self, offset: int, data: bytes) -> None:
        self.memory[offset : offset + len(data)] = data

    def __del__(self) -> None:
        os.close(self.fd)  # the mapping goes with the last reference to it


def _fault_in_meanwhile(of: weakref.ref[Arena], capacity: int) -> None:
    with contextlib.suppress(OSError):  # the next copy says so
        for start in range(0, capacity, _PIECE):
            arena = of()
            if arena is None:
                return
            arena._fault_in(start)
            if start + _PIECE >= capacity:
                arena._is_faulted_in = True
            del arena  # it goes as soon as nobody else has it


def _capacity(size: int) -> int:
    return -(-max(size, 1) // _ROUND) * _ROUND


@dataclass
class ArenaPool:
    """As many arenas as may be in use at a time; whoever needs another waits.

    Args:
        count: two, so that a snapshot can be made while the one before is written.
        max_bytes: of all arenas together; None for as much as the machine has. A single snapshot that is
            larger is refused.
        when_full: what becomes of a snapshot while there is no room.
        held_up: told what became of one, and why.
        memory_available: bytes that this host, and the job's control groups, could give out now.
    """

    count: int = 2
    max_bytes: int | None = None
    when_full: WhenFull = WhenFull.WAIT
    held_up: Callable[[str], None] = lambda _why: None
    memory_available: Callable[[], int] = available_memory
    _free: list[Arena] = field(default_factory=list)
    _in_use: list[Arena] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def acquire(self, size: int) -> Arena:
        """Return an arena of at least ``size`` bytes; waits while too many are in use.

        Raises:
            OutOfMemoryError: a snapshot of this size does not fit, whatever is waited for.
            NoRoomError: it does not fit now, and the policy is not to wait.
        """
        if self.max_bytes is not None and size > self.max_bytes:
            raise OutOfMemoryError(
                f"a snapshot of {size / 2**20:.0f} MiB is larger than max_inflight_bytes allows "
                f"({self.max_bytes / 2**20:.0f} MiB)"
            )
        began, why = time.monotonic(), ""
        with self._changed:
            arena = self._take_or_make(size)
            if arena is None:
                why = f"no room for another snapshot beside {len(self._in_use)} that are being written"
                if self.when_full is not WhenFull.WAIT:
                    raise NoRoomError(why)
                while arena is None:
                    self._changed.wait()
                    arena = self._take_or_make(size)
            self._in_use.append(arena)
        if why:
            self.held_up(f"waited {time.monotonic() - began:.1f} s: {why}")
        return arena

    def prepare(self, size: int) -> None:
        """Allocate for a snapshot of this size now; the first one is then as quick as others.

        Raises:
            OutOfMemoryError: a snapshot of this size does not fit.
        """
        arena = self.acquire(size)
        try:
            arena.fault_in()
        finally:
            self.release(arena)

    def release(self, arena: Arena) -> None:
        arena.fault_in_meanwhile()
        with self._changed:
            self._in_use.remove(arena)
            self._free.append(arena)
            self._changed.notify_all()

    def keys(self) -> set[int]:
        """Return which arenas there are."""
        with self._changed:
            return {arena.key for arena in (*self._free, *self._in_use)}

    def empty(self) -> ArenaPool:
        """Return a pool by the same rules, with no arena yet."""
        return replace(self, _free=[], _in_use=[], _changed=threading.Condition())

    def clear(self) -> None:
        """Give unused memory back to the system."""
        with self._changed:
            self._free.clear()

    def _take_or_make(self, size: int) -> Arena | None:
        fitting = [arena for arena in self._free if arena.capacity >= size]
        if fitting:
            best = min(fitting, key=lambda arena: arena.capacity)
            self._free.remove(best)
            return best
        self._free.clear()  # all too small
        in_use = sum(arena.capacity for arena in self._in_use)
        budget = self.max_bytes is None or in_use + _capacity(size) <= self.max_bytes
        fits = size + _LEFT_FREE <= self.memory_available()
        if self._in_use and (len(self._in_use) >= self.count or not budget or not fits):
            return None
        if not fits:
            raise OutOfMemoryError(f"no memory for a snapshot of {size / 2**20:.0f} MiB")
        return Arena(size)
