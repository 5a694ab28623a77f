"""Memory that another process of this user can map, too, and that saves use again and again."""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any


class SharedBuffer:
    """Page-aligned anonymous memory. Pickled, it is a reference: whoever unpickles it maps the same memory.

    That works as long as this object lives, in processes of the same user on the same machine.
    """

    def __init__(self, size: int) -> None:
        """
        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        self._fd = os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, max(size, 1))
            self.memory = mmap.mmap(self._fd, max(size, 1))
        except BaseException:
            os.close(self._fd)
            raise
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (os.getpid(), self._fd, self.size)

    def __del__(self) -> None:
        # The memory itself goes when the last tensor that views it does.
        if hasattr(self, "memory"):
            os.close(self._fd)


def _mapped(pid: int, fd: int, size: int) -> MappedBuffer:
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return MappedBuffer(mmap.mmap(opened, max(size, 1)), size)
    finally:
        os.close(opened)


class MappedBuffer:
    """Another process's :class:`SharedBuffer`, mapped."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self.memory = memory
        self.size = size


Buffer = SharedBuffer | MappedBuffer


class BufferPool:
    """Gives buffers out and takes them back, so that a save pays for new pages only the first time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least ``size`` bytes, and not of more than twice as many."""
        with self._lock:
            fitting = [each for each in self._free if size <= each.size <= 2 * size]
            if fitting:
                best = min(fitting, key=lambda each: each.size)
                self._free.remove(best)
                return best
            self._free.clear()  # of another state than the one that is saved now
        return SharedBuffer(size)

    @property
    def spare(self) -> int:
        """Bytes that can be taken without new memory."""
        with self._lock:
            return sum(each.size for each in self._free)

    def give(self, *buffers: Buffer) -> None:
        """Take back buffers that nobody reads any more."""
        with self._lock:
            self._free.extend(buffers)
