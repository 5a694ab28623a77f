"""Memory for parts, that saves and loads use again and again; a checkpoint worker can map some of it, too."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import TypeVar

from nvrx_slurm.checkpointing.async_ckpt.arena import memory_keys
from nvrx_slurm.checkpointing.storage.host_memory import huge_pages


class Buffer:
    """Page-aligned memory of this process, on huge pages where there are: a new one is soon filled."""

    def __init__(self, size: int) -> None:
        """
        Raises:
            OSError: there is no memory for it.
        """
        self.size = size
        self.memory = self._map(max(size, 1))

    def _map(self, size: int) -> mmap.mmap:
        return huge_pages(size)


class SharedBuffer(Buffer):
    """Page-aligned anonymous memory (memfd_create(2)), which a checkpoint worker maps by its descriptor."""

    def __init__(self, size: int) -> None:
        """
        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        self.fd = os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC)
        self.key = next(memory_keys)
        super().__init__(size)

    def _map(self, size: int) -> mmap.mmap:
        os.ftruncate(self.fd, size)
        return mmap.mmap(self.fd, size)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)  # the memory itself goes when the last tensor that views it does


_Kind = TypeVar("_Kind", bound=Buffer)


class BufferPool:
    """Gives buffers out and takes them back, so that a save pays for new pages only the first time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._made: weakref.WeakSet[SharedBuffer] = weakref.WeakSet()
        self._lock = threading.Lock()

    def take(self, size: int) -> SharedBuffer:
        """Return a buffer of at least ``size`` bytes, and not of more than twice as many."""
        with self._lock:
            buffer = self._fitting(size, SharedBuffer)
            if buffer is None:
                buffer = SharedBuffer(size)
                self._made.add(buffer)
            return buffer

    def take_any(self, size: int) -> Buffer:
        """Return one for what no worker reads: a new one is filled in a third of the time."""
        with self._lock:
            return self._fitting(size, Buffer) or Buffer(size)

    def _fitting(self, size: int, kind: type[_Kind]) -> _Kind | None:
        fitting = [each for each in self._free if isinstance(each, kind) and size <= each.size <= 2 * size]
        if not fitting:
            self._free.clear()  # of another state than the one that is saved now
            return None
        best = min(fitting, key=lambda each: each.size)
        self._free.remove(best)
        return best

    @property
    def spare(self) -> int:
        """Bytes that can be taken without new memory."""
        with self._lock:
            return sum(each.size for each in self._free if isinstance(each, SharedBuffer))

    def keys(self) -> set[int]:
        """Return the keys of all its buffers, those in use, too."""
        with self._lock:
            return {buffer.key for buffer in self._made}

    def release(self, buffer: SharedBuffer) -> None:
        """Take back a buffer that a worker has read."""
        self.give(buffer)

    def give(self, *buffers: Buffer) -> None:
        """Take back buffers that nobody reads any more."""
        with self._lock:
            self._free.extend(buffers)
