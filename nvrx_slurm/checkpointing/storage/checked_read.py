"""Read parts of a file on several threads, and hash each piece while it is in a cache. Needs no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from nvrx_slurm.checkpointing.storage.checksums import Region

_MOST_THREADS = 8
_PIECE = 1 << 20  # fits into a core's cache; hashing it takes far longer than a switch of threads
_SMALL = 256 << 10  # is read sooner than it is handed to another thread


class Reading:
    """One part of a file on its way to memory: any threads read it, one at a time hashes behind them."""

    def __init__(self, fd: int, region: Region, target: memoryview) -> None:
        self._fd = fd
        self._region = region
        self._target = target
        self._numbers = itertools.count()  # its next() is atomic
        self._lock = threading.Lock()
        self._sum = xxhash.xxh3_64()
        self._read: set[int] = set()
        self._hashed = 0
        self._hashing = False
        self._threads: list[Future[None]] = []
        self._is_cut_off = False

    def start(self, pool: ThreadPoolExecutor, threads: int) -> None:
        if self._region.length <= _SMALL:
            self._work()
        else:
            pieces = -(-self._region.length // _PIECE)
            self._threads = [pool.submit(self._work) for _ in range(min(threads, pieces))]

    def wait(self) -> None:
        """Return when everything is there.

        Raises:
            OSError: it can't be read.
        """
        for thread in self._threads:
            thread.result()

    def checksum(self) -> int | None:
        """Return that of what has been read, once it is there; None: the file has ended before."""
        self.wait()
        return None if self._is_cut_off else int(self._sum.intdigest())

    def _work(self) -> None:
        for number in self._numbers:
            start = number * _PIECE
            if start >= self._region.length:
                return
            if not fill(self._fd, self._target[start : start + _PIECE], self._region.offset + start):
                self._is_cut_off = True
                return
            self._hash_after(number)

    def _hash_after(self, number: int) -> None:
        """Hash what can be hashed now that this piece is there, unless another thread is about it."""
        with self._lock:
            self._read.add(number)
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._lock:
                following = self._hashed
                if following not in self._read:
                    self._hashing = False
                    return
                self._read.remove(following)
                self._hashed += 1
            self._sum.update(self._target[following * _PIECE : (following + 1) * _PIECE])


class CheckedReads:
    """Threads that read parts of a file."""

    def __init__(self, fd: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self._fd = fd
        self._pool = pool
        self._threads = threads

    def start(self, region: Region, target: memoryview) -> Reading:
        """Begin to read a part into memory of the same length."""
        reading = Reading(self._fd, region, target)
        reading.start(self._pool, self._threads)
        return reading


@contextlib.contextmanager
def reading(fd: int) -> Iterator[CheckedReads]:
    """Yield threads that read an open file, as many as this process has cores, at most 8."""
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(threads) as pool:
        yield CheckedReads(fd, pool, threads)


def fill(fd: int, target: memoryview, offset: int) -> bool:
    """Read until ``target`` is full; return whether the file reaches so far."""
    while target:
        count = os.preadv(fd, [target], offset)
        if not count:
            return False
        target, offset = target[count:], offset + count
    return True
