"""Copies of tensors as they are at the call, made at once or while training goes on.

A snapshot that is made later (overlapped) is guarded: before an optimizer of ``torch.optim`` changes a
parameter, what is not copied yet is copied. Other code calls :func:`ensure_snapshotted` before it changes
tensors. Small tensors, such as a normalisation's running statistics, are always copied at once. Should a
tensor have been changed all the same, torch's count of changes tells, or, where torch does not count
(``tensor.data``, NumPy, a resized storage), samples of its bytes do, and the save fails rather than lie.
"""

from __future__ import annotations

import atexit
import collections
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvrx_slurm.checkpointing.async_ckpt.arena import Arena
from nvrx_slurm.checkpointing.async_ckpt.device_copy import DeviceCopies, bytes_of
from nvrx_slurm.checkpointing.async_ckpt.storage_guard import call_before_memory_goes
from nvrx_slurm.checkpointing.storage.layout import FileImage

_SMALL = 1 << 20
_SMALL_IN_ALL = 32 << 20
_PIECE = 8 << 20
_AT_ONCE = 64 << 20
"""Copied between two looks at what else there is to do, each of which costs training a turn of the GIL."""
_SAMPLE_EVERY = 256 << 10
_SAMPLE = 64  # one line of a processor's cache


class SnapshotMode(Enum):
    """When tensors are copied."""

    STRICT = "strict"
    """Before the call returns: whatever changes them afterwards is not in the checkpoint."""
    OVERLAPPED = "overlapped"
    """During the next forward and backward pass, at the latest before the next ``optimizer.step``."""


class ChangedTooEarlyError(RuntimeError):
    """A tensor was changed before its snapshot was made."""


class Listener(Protocol):
    """Is told, on any thread, how a snapshot goes."""

    def advanced(self, up_to: int) -> None:
        """Everything in the arena before ``up_to`` is there."""

    def ended(self, error: Exception | None) -> None:
        """It is whole, or has failed; called once."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of a storage, and where it goes."""

    target: int
    storage: Any
    start: int
    size: int


class _Samples:
    """Some bytes of a storage as they are at the call, and where they go.

    Training changes tensors as a whole: whoever changes one before its copy changes these bytes, too. Reading
    them costs less than 1 ms per GiB.
    """

    def __init__(self, target: int, storage: Any) -> None:
        self._storage = storage
        self._target, self._size = target, storage.nbytes()
        self._bytes = self._of(bytes_of(storage))

    def tell_change(self, arena: Arena) -> bool:
        """Whether what has been copied is not what was there at the call."""
        if self._storage.nbytes() != self._size:
            return True
        return not torch.equal(self._of(arena.as_tensor(self._target, self._size)), self._bytes)

    def _of(self, content: Any) -> Any:
        size = min(_SAMPLE, self._size)  # a small one, when there is no room among those copied at once
        return torch.cat([content.unfold(0, size, _SAMPLE_EVERY).flatten(), content[-size:]])


class Snapshot:
    """Copies that are to be made into an arena, in the order of their places there."""

    def __init__(
        self, arena: Arena, images: Sequence[tuple[int, FileImage]], mode: SnapshotMode, listener: Listener
    ) -> None:
        """
        Args:
            images: with the offset of each in the arena, rising.
        """
        self._listener = listener
        self._is_strict = mode is SnapshotMode.STRICT
        self._changed = threading.Condition()
        self.is_copied = False
        self._pieces: collections.deque[_Piece] = collections.deque()
        self._in_work: list[list[_Piece]] = []
        self._announced = 0
        self._end = max((base + image.size for base, image in images), default=0)
        self._error: Exception | None = None
        self._judged = False
        self._told = threading.Event()
        self._tensors = [tensor for _, image in images for tensor in image.tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._samples: list[_Samples] = []
        self._arena = arena
        self._images = images  # keeps storages alive until they are copied
        self._storages = {hole.storage._cdata for _, image in images for hole in image.holes}
        self._device = DeviceCopies(arena)
        self._copy_small_and_note_large(images, everything=mode is SnapshotMode.STRICT)
        if mode is SnapshotMode.STRICT:
            self._copy_pieces(self._copy_with_all_threads)
            self._device.wait()
            self._finish()
        else:
            _Copier.take(self)

    def _copy_small_and_note_large(
        self, images: Sequence[tuple[int, FileImage]], *, everything: bool
    ) -> None:
        at_once, small = 0, []
        for base, image in images:
            for literal in image.literals:
                self._arena.write(base + literal.offset, literal.data)
            for hole in image.holes:
                offset, size = base + hole.offset, hole.storage.nbytes()
                if hole.storage.device.type != "cpu":
                    self._device.start(offset, hole.storage)
                elif size < _SMALL and (everything or at_once + size <= _SMALL_IN_ALL):
                    at_once += size
                    small.append(_Piece(offset, hole.storage, 0, size))
                else:
                    self._samples.append(_Samples(offset, hole.storage))
                    for start in range(0, size, _PIECE):
                        count = min(_PIECE, size - start)
                        self._pieces.append(_Piece(offset + start, hole.storage, start, count))
        self._copy_with(1, small)

    def work(self) -> None:
        """Copy what nobody copies yet, and end the snapshot when the devices have done their part."""
        self._copy_pieces(self._copy)
        try:
            self._device.wait()
        except Exception as error:
            with self._changed:
                self._error = self._error or error
        self._finish()

    def holds(self, storage: Any) -> bool:
        """Whether a storage may still have to be copied."""
        return not self.is_copied and storage._cdata in self._storages

    def guard(self) -> None:
        """Return when tensors may be changed: the processor has copied its own, streams wait for the rest."""
        self._copy_pieces(self._copy_with_all_threads)
        if self._device.pending:
            self._judge()
            self._device.guard()
        else:
            self._finish()

    def _copy_pieces(self, copy: Callable[[Sequence[_Piece]], None]) -> None:
        """Copy some pieces at a time, beside other threads that do the same; return when all are copied."""
        while True:
            with self._changed:
                if not self._pieces:
                    self._changed.wait_for(lambda: not self._in_work)
                    return
                pieces = self._take()
            error = None
            try:
                copy(pieces)
            except Exception as failed:  # it fails the save; other threads must not wait for the pieces
                error = failed
            with self._changed:
                self._error = self._error or error
                self._in_work.remove(pieces)
                up_to = self._low_water()
                news = up_to > self._announced
                self._announced = max(self._announced, up_to)
                self._changed.notify_all()
            if news and not self._is_strict:  # a worker that writes would slow down what the caller waits for
                self._listener.advanced(up_to)

    def _take(self) -> list[_Piece]:
        """Take pieces; fewer towards the end, where whoever has copied all else waits for them."""
        left = self._end - self._pieces[0].target
        most = left if self._is_strict else min(_AT_ONCE, left // 2)
        taken = [self._pieces.popleft()]
        size = taken[0].size
        while self._pieces and (size := size + self._pieces[0].size) <= most:
            taken.append(self._pieces.popleft())
        self._in_work.append(taken)
        return taken

    def _copy(self, pieces: Sequence[_Piece]) -> None:
        self._copy_with(1, pieces)

    def _copy_with_all_threads(self, pieces: Sequence[_Piece]) -> None:
        """With as many as torch has, which have nothing else to do while the caller waits."""
        self._copy_with(torch.get_num_threads(), pieces)

    def _copy_with(self, threads: int, pieces: Sequence[_Piece]) -> None:
        memory = [piece.storage.data_ptr() for piece in pieces]
        if any(piece.storage.nbytes() < piece.start + piece.size for piece in pieces):
            raise ChangedTooEarlyError(_too_early("a storage was resized"))
        self._arena.copy(
            [(p.target, source + p.start, p.size) for p, source in zip(pieces, memory, strict=True)], threads
        )
        if any(piece.storage.data_ptr() != was for piece, was in zip(pieces, memory, strict=True)):
            raise ChangedTooEarlyError(_too_early("a storage was resized"))

    def _low_water(self) -> int:
        if self._device.pending:
            return 0
        undone = [pieces[0].target for pieces in self._in_work]
        if self._pieces:
            undone.append(self._pieces[0].target)
        return min(undone, default=self._end)

    def _judge(self) -> None:
        """See whether a tensor has been changed since the call; before the guard lets anybody change one."""
        with self._changed:
            if self._judged:
                return
            self._judged = True
            for tensor, version in zip(self._tensors, self._versions, strict=True):
                if _version(tensor) != version:
                    shape = "x".join(map(str, tensor.shape)) or "scalar"
                    what = f"a tensor ({shape}, {tensor.dtype}) was changed"
                    self._error = self._error or ChangedTooEarlyError(_too_early(what))
            if self._error is None and any(each.tell_change(self._arena) for each in self._samples):
                what = "a tensor was changed, through tensor.data, NumPy or another thread"
                self._error = ChangedTooEarlyError(_too_early(what))

    def _finish(self) -> None:
        self._judge()
        with self._changed:
            is_told = self.is_copied
            self.is_copied = True
            self._tensors, self._versions, self._samples, self._images = [], [], [], ()
        if is_told:  # by another thread: who goes on from here may count on it, even to be killed at once
            self._told.wait()
            return
        try:
            self._listener.ended(self._error)
        finally:
            self._told.set()


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
                call_before_memory_goes(_ensure_copied)
                atexit.register(ensure_snapshotted)  # then the worker writes what nobody waits for
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
    def leave_to_parent(cls) -> None:
        """In a forked process: its copies would go to its parent's snapshots, and the thread is not here."""
        cls._lock, cls._queue, cls._pending = threading.Lock(), None, []

    @classmethod
    def pending(cls) -> Iterable[Snapshot]:
        with cls._lock:
            return list(cls._pending)


os.register_at_fork(after_in_child=_Copier.leave_to_parent)


def ensure_snapshotted() -> None:
    """Return when every tensor whose save has been called is copied, so that it may be changed.

    Called by itself before each ``torch.optim.Optimizer.step``. Call it before anything else that changes
    large saved tensors: ``load_state_dict``, an average of weights, an optimizer that is not torch's. The
    calling thread copies, too. On a GPU nobody waits: the current stream does.
    """
    for snapshot in _Copier.pending():
        snapshot.guard()


def _ensure_copied(storage: Any) -> None:
    for snapshot in _Copier.pending():
        if snapshot.holds(storage):
            snapshot.guard()


def _too_early(what: str) -> str:
    return (
        f"{what} before it was copied: "
        "call ensure_snapshotted() before you change tensors, or use SnapshotMode.STRICT"
    )


def _version(tensor: Any) -> int:
    return -1 if tensor.is_inference() else int(tensor._version)
