"""Memory that a checkpoint worker can map, too, and that saves use again and again."""

from __future__ import annotations

import mmap
import os
import threading
import weakref

from nvrx_slurm.checkpointing.async_ckpt.arena import memory_keys


class SharedBuffer:
    """Page-aligned anonymous memory (memfd_create(2)), which a checkpoint worker maps by its descriptor."""

    def __init__(self, size: int) -> None:
        """
        Raises:
            OSError: there is no memory or no descriptor for it.
        """
        self.fd = os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, max(size, 1))
            self.memory = mmap.mmap(self.fd, max(size, 1))
        except BaseException:
            os.close(self.fd)
            raise
        self.size = size
        self.key = next(memory_keys)

    def __del__(self) -> None:
        # The memory itself goes when the last tensor that views it does.
        if hasattr(self, "memory"):
            os.close(self.fd)


class BufferPool:
    """Gives buffers out and takes them back, so that a save pays for new pages only the first time."""

    def __init__(self) -> None:
        self._free: list[SharedBuffer] = []
        self._made: weakref.WeakSet[SharedBuffer] = weakref.WeakSet()
        self._lock = threading.Lock()

    def take(self, size: int) -> SharedBuffer:
        """Return a buffer of at least ``size`` bytes, and not of more than twice as many."""
        with self._lock:
            fitting = [each for each in self._free if size <= each.size <= 2 * size]
            if fitting:
                best = min(fitting, key=lambda each: each.size)
                self._free.remove(best)
                return best
            self._free.clear()  # of another state than the one that is saved now
            buffer = SharedBuffer(size)
            self._made.add(buffer)
            return buffer

    @property
    def spare(self) -> int:
        """Bytes that can be taken without new memory."""
        with self._lock:
            return sum(each.size for each in self._free)

    def keys(self) -> set[int]:
        """Return the keys of all its buffers, those in use, too."""
        with self._lock:
            return {buffer.key for buffer in self._made}

    def release(self, buffer: SharedBuffer) -> None:
        """Take back a buffer that a worker has read."""
        self.give(buffer)

    def give(self, *buffers: SharedBuffer) -> None:
        """Take back buffers that nobody reads any more."""
        with self._lock:
            self._free.extend(buffers)
