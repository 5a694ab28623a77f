"""Copies of tensors as they are at the call, made at once or while training goes on.

A snapshot that is made later (overlapped) is guarded: before an optimizer of ``torch.optim`` changes a
parameter, what is not copied yet is copied. Other code calls :func:`ensure_snapshotted` before it changes
tensors. Small tensors, such as a normalisation's running statistics, are always copied at once. Should a
tensor have been changed all the same, torch's count of changes tells, and the save fails rather than lie.
"""

from __future__ import annotations

import collections
import ctypes
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, ClassVar

from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvrx_slurm.checkpointing.async_ckpt.arena import Arena
from nvrx_slurm.checkpointing.async_ckpt.device_copy import DeviceCopies, bytes_of
from nvrx_slurm.checkpointing.storage.layout import FileImage

_SMALL = 1 << 20
_SMALL_IN_ALL = 32 << 20
_PIECE = 8 << 20


class SnapshotMode(Enum):
    """When tensors are copied."""

    STRICT = "strict"
    """Before the call returns: whatever changes them afterwards is not in the checkpoint."""
    OVERLAPPED = "overlapped"
    """During the next forward and backward pass, at the latest before the next ``optimizer.step``."""


class ChangedTooEarlyError(RuntimeError):
    """A tensor was changed before its snapshot was made."""


class Snapshot:
    """Copies that are to be made into an arena, and the call that follows the last one."""

    def __init__(
        self,
        arena: Arena,
        images: Sequence[tuple[int, FileImage]],
        mode: SnapshotMode,
        when_copied: Callable[[Exception | None], None],
    ) -> None:
        """
        Args:
            images: with the offset of each in the arena.
            when_copied: called once, on any thread, with what went wrong.
        """
        self._when_copied = when_copied
        self._changed = threading.Condition()
        self.is_copied = False
        self._pieces: collections.deque[tuple[int, int, int]] = collections.deque()
        self._in_work = 0
        self._error: Exception | None = None
        self._judged = False
        self._tensors = [tensor for _, image in images for tensor in image.tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._arena = arena
        self._images = images  # keep storages alive
        self._device = DeviceCopies(arena)
        self._copy_now_or_note(images, mode)
        if mode is SnapshotMode.STRICT:
            self._device.wait()
            self._finish()
        else:
            _Copier.take(self)

    def _copy_now_or_note(self, images: Sequence[tuple[int, FileImage]], mode: SnapshotMode) -> None:
        at_once = 0
        for base, image in images:
            for literal in image.literals:
                self._arena.write(base + literal.offset, literal.data)
            for hole in image.holes:
                offset, size = base + hole.offset, hole.storage.nbytes()
                small = size < _SMALL and at_once + size <= _SMALL_IN_ALL
                if hole.storage.device.type != "cpu":
                    self._device.start(offset, hole.storage)
                elif mode is SnapshotMode.STRICT:
                    self._arena.as_tensor(offset, size).copy_(bytes_of(hole.storage))
                elif small:
                    at_once += size
                    ctypes.memmove(self._arena.address + offset, hole.storage.data_ptr(), size)
                else:
                    self._note(offset, hole.storage.data_ptr(), size)

    def _note(self, offset: int, source: int, size: int) -> None:
        for start in range(0, size, _PIECE):
            target = self._arena.address + offset + start
            self._pieces.append((target, source + start, min(_PIECE, size - start)))

    def work(self) -> None:
        """Copy what nobody copies yet, and end the snapshot when the devices have done their part."""
        self._copy_pieces()
        self._device.wait()
        self._finish()

    def guard(self) -> None:
        """Return when tensors may be changed: the processor has copied its own, streams wait for the rest."""
        self._copy_pieces()
        if self._device.pending:
            self._judge()
            self._device.guard()
        else:
            self._finish()

    def _copy_pieces(self) -> None:
        """Copy piece by piece, beside other threads that do the same; return when all are copied."""
        while True:
            with self._changed:
                if not self._pieces:
                    self._changed.wait_for(lambda: not self._in_work)
                    return
                target, source, size = self._pieces.popleft()
                self._in_work += 1
            ctypes.memmove(target, source, size)  # releases the GIL
            with self._changed:
                self._in_work -= 1
                self._changed.notify_all()

    def _judge(self) -> None:
        """See whether a tensor has been changed since the call; before the guard lets anybody change one."""
        with self._changed:
            if self._judged:
                return
            self._judged = True
            for tensor, version in zip(self._tensors, self._versions, strict=True):
                if _version(tensor) != version:
                    shape = "x".join(map(str, tensor.shape)) or "scalar"
                    self._error = ChangedTooEarlyError(
                        f"a tensor ({shape}, {tensor.dtype}) was changed before it was copied: "
                        "call ensure_snapshotted() before you change tensors, or use SnapshotMode.STRICT"
                    )

    def _finish(self) -> None:
        self._judge()
        with self._changed:
            if self.is_copied:
                return
            self.is_copied = True
            self._tensors, self._versions, self._images = [], [], ()
        self._when_copied(self._error)


class _Copier:
    """The thread that copies while training goes on, one for the process."""

    _lock = threading.Lock()
    _queue: queue.SimpleQueue[Snapshot] | None = None
    _pending: ClassVar[list[Snapshot]] = []

    @classmethod
    def take(cls, snapshot: Snapshot) -> None:
        with cls._lock:
            if cls._queue is None:
                cls._queue = queue.SimpleQueue()
                threading.Thread(target=cls._run, args=[cls._queue], daemon=True, name="nvrx-copier").start()
                register_optimizer_step_pre_hook(lambda _optimizer, _args, _kwargs: ensure_snapshotted())
            cls._pending.append(snapshot)
            cls._queue.put(snapshot)

    @classmethod
    def _run(cls, snapshots: queue.SimpleQueue[Snapshot]) -> None:
        while True:
            snapshot = snapshots.get()
            snapshot.work()
            with cls._lock:
                cls._pending.remove(snapshot)
            del snapshot  # its arena may be given back before another one comes

    @classmethod
    def pending(cls) -> Iterable[Snapshot]:
        with cls._lock:
            return list(cls._pending)


def ensure_snapshotted() -> None:
    """Return when every tensor whose save has been called is copied, so that it may be changed.

    Called by itself before each ``torch.optim.Optimizer.step``. Call it before anything else that changes
    large saved tensors: ``load_state_dict``, an average of weights, an optimizer that is not torch's. The
    calling thread copies, too. On a GPU nobody waits: the current stream does.
    """
    for snapshot in _Copier.pending():
        if not snapshot.is_copied:
            snapshot.guard()


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
