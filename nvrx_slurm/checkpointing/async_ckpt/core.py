"""The queue of saves: scheduled in order, written in the background, finalized in order on all ranks.

::

    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)          # on all ranks, in the same order
    ...
    queue.maybe_finalize_async_calls()             # on all ranks, now and then: after each step, say
    ...
    queue.close()
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import ClassVar

from nvrx_slurm.checkpointing.async_ckpt.agreement import Agreement, agree
from nvrx_slurm.checkpointing.async_ckpt.arena import ArenaPool, WhenFull
from nvrx_slurm.checkpointing.async_ckpt.callers import (
    AsyncCaller,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)
from nvrx_slurm.checkpointing.async_ckpt.errors import AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.priority import WorkerPriority
from nvrx_slurm.checkpointing.async_ckpt.ready_writes import ReadyWrites
from nvrx_slurm.checkpointing.async_ckpt.request import AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.snapshot import SnapshotMode, ensure_snapshotted
from nvrx_slurm.checkpointing.async_ckpt.worker_process import Ticket
from nvrx_slurm.fault_tolerance.checkpoint_reports import job_journal

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "AsyncSaveError",
    "PersistentAsyncCaller",
    "SnapshotMode",
    "TemporalAsyncCaller",
    "WhenFull",
    "abort_nvrx_checkpoint",
    "ensure_snapshotted",
]


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    request: AsyncRequest
    ticket: Ticket

    @property
    def error(self) -> str | None:
        """What fails the save on this rank; None: nothing, or its finalizers tell of it."""
        return None if isinstance(self.request.async_fn, ReadyWrites) else self.ticket.error

    def finalize(self) -> int:
        if isinstance(self.request.async_fn, ReadyWrites) and self.ticket.error is not None:
            self.request.async_fn.when_failed(self.ticket.error)
        return self.request.execute_finalize_fns(validate_matching_call_idx=False)


class AsyncCallsQueue:
    """Saves that are not finalized yet, oldest first."""

    _queues: ClassVar[weakref.WeakSet[AsyncCallsQueue]] = weakref.WeakSet()
    _warm: ClassVar[PersistentAsyncCaller | None] = None

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
        *,
        snapshot_mode: SnapshotMode = SnapshotMode.OVERLAPPED,
        max_inflight_bytes: int | None = None,
        when_full: WhenFull = WhenFull.WAIT,
        cpu_affinity: Iterable[int] = (),
        max_bytes_per_s: int | None = None,
    ) -> None:
        """
        Args:
            persistent: one worker for all saves; else one for each, which costs its start every time.
            is_daemon: without effect: a worker always ends with its trainer, and has no children.
            cpu_priority: niceness of the worker, 0 to 19.
            io_priority: its class, 1 real time, 2 best effort, 3 idle; None leaves it alone.
            sigterm_timeout: without effect: an aborted worker is killed, which does no harm to files.
            cpu_shm_mode: without effect: snapshots are always in shared host memory.
            snapshot_mode: whether the copies are made before ``schedule_async_request`` returns, or during
                the next forward and backward pass.
            max_inflight_bytes: of snapshots that are not written yet. Without it two snapshots are held at
                a time, if there is memory for them.
            when_full: what becomes of a save for which there is no room yet; the job's journal is told.
            cpu_affinity: cores that the worker may use, such as those that Slurm has given to the job and
                training leaves alone; empty for the trainer's.
            max_bytes_per_s: how fast the worker writes files; None for as fast as it can.

        Raises:
            ValueError: a priority that there is not, or no room at all.
            TypeError: a value of another type.
        """
        del is_daemon, sigterm_timeout, cpu_shm_mode
        for name, value, kind in (
            ("snapshot_mode", snapshot_mode, SnapshotMode),
            ("when_full", when_full, WhenFull),
        ):
            if not isinstance(value, kind):
                members = ", ".join(map(str, kind))
                raise TypeError(f"{name} is {value!r}, one of {members} is accepted")
        if max_inflight_bytes is not None and not isinstance(max_inflight_bytes, Real):
            raise TypeError(f"max_inflight_bytes is {max_inflight_bytes!r}, a number is accepted")
        if max_inflight_bytes is not None and max_inflight_bytes <= 0:
            raise ValueError(
                f"max_inflight_bytes is {max_inflight_bytes}, None or a number above 0 is accepted"
            )
        self._priority = WorkerPriority(cpu_priority, io_priority, tuple(cpu_affinity), max_bytes_per_s)
        self._mode = snapshot_mode
        self._pool = ArenaPool(
            max_bytes=max_inflight_bytes,
            when_full=when_full,
            held_up=partial(_say_held_up, weakref.ref(self)),
        )
        self._persistent = persistent
        self._caller: AsyncCaller | None = None
        self._pending: deque[_Pending] = deque()
        self._last_index = -1
        AsyncCallsQueue._queues.add(self)
        caller = self._get_caller()
        if isinstance(caller, PersistentAsyncCaller):
            with contextlib.suppress(OSError):  # the first save tries again, and says why it can't
                caller.start()

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Start a worker now, for the first queue that needs one; arguments as the constructor's."""
        del rank, is_daemon, sigterm_timeout, cpu_shm_mode
        if cls._warm is None:
            cls._warm = PersistentAsyncCaller(
                ArenaPool(), SnapshotMode.OVERLAPPED, WorkerPriority(cpu_priority, io_priority)
            )
        cls._warm.start()

    def prepare(self, size: int) -> None:
        """Allocate shared memory for a snapshot of ``size`` bytes; else the first one does.

        Raises:
            OutOfMemoryError: there is not enough.
        """
        self._pool.prepare(size)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Snapshot the request's tensors and begin; return its index, 0, 1, 2, …

        All ranks call this in the same order. What goes wrong, an object that can't be pickled too, is
        raised when the save is finalized, on all ranks. While there is no room for another snapshot it
        does as ``when_full`` says.
        """
        self._last_index += 1
        request = AsyncRequest(**async_request._asdict()).freeze()._replace(call_idx=self._last_index)
        self._pending.append(_Pending(request, self._get_caller().begin(request)))
        return self._last_index

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize, oldest first, what is done on all ranks; return the indices.

        Skipped saves are not among them. With saves pending and without ``no_dist`` this is collective: all
        ranks call it equally often.

        Args:
            blocking: wait until every pending save is done.
            no_dist: ask no other rank: a save counts when this rank is done.

        Raises:
            AsyncSaveError: a save failed somewhere: raised on all ranks, finalizers not run. Saves after it
                stay pending.
        """
        finalized = []
        if blocking:
            ensure_snapshotted()  # this thread has nothing better to do than to copy, too
        while self._pending:
            oldest = self._pending[0]
            if blocking:
                oldest.ticket.wait()
            said = self._ask(oldest, no_dist)
            if not said.all_done:
                if blocking:
                    continue
                break
            self._pending.popleft()
            self._refuse_failed(oldest, said)
            if said.is_skipped:
                continue
            finalized.append(oldest.finalize())
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many saves are pending."""
        return len(self._pending)

    def ensure_snapshotted(self) -> None:
        """Return when all tensors are copied, so that they may be changed."""
        ensure_snapshotted()

    def close(self, abort: bool = False) -> None:
        """Finalize what is pending, collectively, and end the worker; the queue can be used again.

        Args:
            abort: kill the worker and forget what is pending, finalizers included; not collective.

        Raises:
            AsyncSaveError: a pending save failed; the worker has ended all the same.
        """
        try:
            if abort:
                self._pending.clear()
            else:
                self.maybe_finalize_async_calls(blocking=True)
        finally:
            caller, self._caller = self._caller, None
            if caller is not None:
                caller.close(abort)
            self._pool.clear()
            self._last_index = -1

    def __del__(self) -> None:
        # No collective from a destructor. The worker finishes what it has.
        caller = getattr(self, "_caller", None)
        if caller is not None:
            caller.let_go()

    @classmethod
    def _leave_all_to_parent(cls) -> None:
        """In a forked process: what is pending is its parent's; saves of its own get another worker."""
        cls._warm = None
        for queue in list(cls._queues):
            queue._pending.clear()
            queue._caller = None
            queue._pool = queue._pool.empty()
            queue._last_index = -1

    def _get_caller(self) -> AsyncCaller:
        if self._caller is None:
            kind = PersistentAsyncCaller if self._persistent else TemporalAsyncCaller
            self._caller = kind(self._pool, self._mode, self._priority)
            if isinstance(self._caller, PersistentAsyncCaller) and AsyncCallsQueue._warm is not None:
                self._caller.adopt(AsyncCallsQueue._warm)
                AsyncCallsQueue._warm = None
        return self._caller

    def _ask(self, pending: _Pending, no_dist: bool) -> Agreement:
        index, ticket = pending.request.call_idx, pending.ticket
        done = ticket.is_done
        failed = done and pending.error is not None
        if no_dist:
            return Agreement(done, 0 if failed else None, index, index, ticket.is_skipped)
        return agree(index, done=done, failed=failed, skipped=ticket.is_skipped)

    def _refuse_failed(self, pending: _Pending, said: Agreement) -> None:
        index = pending.request.call_idx
        if said.lowest_index != said.highest_index:
            raise AsyncSaveError(
                f"ranks finalize different saves: {said.lowest_index} and {said.highest_index}, here {index}"
            )
        if pending.error is not None:
            raise AsyncSaveError(f"save {index} failed on this rank: {pending.error}")
        if said.failed_rank is not None:
            raise AsyncSaveError(f"save {index} failed on rank {said.failed_rank}: see the error there")


os.register_at_fork(after_in_child=AsyncCallsQueue._leave_all_to_parent)


def _say_held_up(queue: weakref.ref[AsyncCallsQueue], why: str) -> None:
    this = queue()
    if this is not None:
        _log.warning("save %d %s", this._last_index, why)
        job_journal().report_checkpoint_held_up(this._last_index, why)


def abort_nvrx_checkpoint() -> None:
    """Abort all saves of this process, and kill the workers: for a restart within the process."""
    for each in list(AsyncCallsQueue._queues):
        each.close(abort=True)
    warm, AsyncCallsQueue._warm = AsyncCallsQueue._warm, None
    if warm is not None:
        warm.close(abort=True)
