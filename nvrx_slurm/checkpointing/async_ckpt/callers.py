"""How background work is executed: by a worker that stays, or by one for each save. Neither is forked."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from nvrx_slurm.checkpointing.async_ckpt.agreement import agree
from nvrx_slurm.checkpointing.async_ckpt.arena import ArenaPool, NoRoomError, WhenFull
from nvrx_slurm.checkpointing.async_ckpt.errors import AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.file_writes import FileWrites
from nvrx_slurm.checkpointing.async_ckpt.messages import CallWorld
from nvrx_slurm.checkpointing.async_ckpt.priority import WorkerPriority
from nvrx_slurm.checkpointing.async_ckpt.ready_writes import ReadyWrites
from nvrx_slurm.checkpointing.async_ckpt.request import AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.snapshot import SnapshotMode
from nvrx_slurm.checkpointing.async_ckpt.worker_process import Ticket, WorkerProcess
from nvrx_slurm.checkpointing.storage.layout import lay_out
from nvrx_slurm.checkpointing.storage.objects import absolute


class AsyncCaller(ABC):
    """Takes requests and works on them in their order."""

    def __init__(
        self,
        pool: ArenaPool | None = None,
        mode: SnapshotMode = SnapshotMode.OVERLAPPED,
        priority: WorkerPriority | None = None,
    ) -> None:
        self._pool = pool or ArenaPool()
        self._mode = mode
        self._priority = priority or WorkerPriority()
        self._calls: deque[Ticket] = deque()

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Begin a call without a queue, whose finalizers are not run."""
        self._calls.append(self.begin(async_req))

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether the oldest call is done, on all ranks; then the next is the oldest.

        Args:
            blocking: wait for it.
            no_dist: ask no other rank; else collective.

        Raises:
            AsyncSaveError: it has failed, here or on another rank.
        """
        ticket = self._calls[0] if self._calls else None
        if blocking and ticket is not None:
            ticket.wait()
        done = ticket is None or ticket.is_done
        error = ticket.error if ticket is not None and done else None
        if not no_dist:
            said = agree(0, done=done, failed=error is not None)
            done = said.all_done
            if done and error is None and said.failed_rank is not None:
                error = f"on rank {said.failed_rank}: see the error there"
        if done and ticket is not None:
            self._calls.popleft()
        if done and error is not None:
            raise AsyncSaveError(f"a call in the background has failed: {error}")
        return done

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Tell other ranks whether a call still runs here; return whether none does on any. Collective."""
        return agree(0, done=not is_alive, failed=False).all_done

    def begin(self, async_req: AsyncRequest) -> Ticket:
        """Snapshot what the request mentions, and begin; what goes wrong stands in the ticket."""
        ticket = Ticket()
        if async_req.async_fn is None:
            ticket.resolve()
            return ticket
        try:
            return self._hand_over(self._worker(), async_req)
        except NoRoomError as error:
            is_skipped = self._pool.when_full is WhenFull.SKIP
            self._pool.held_up(f"{'skipped' if is_skipped else 'failed'}: {error}")
            ticket.resolve(None if is_skipped else str(error), is_skipped=is_skipped)
            return ticket
        except Exception as error:
            # Raised here, it would leave this rank with a save less than the others have: they would wait.
            ticket.resolve(f"{type(error).__name__}: {error}")
            return ticket

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End workers, after what they have to do or, with ``abort``, now."""

    @abstractmethod
    def let_go(self) -> None:
        """Let workers finish what they have, and wait for nothing."""

    @abstractmethod
    def _worker(self) -> WorkerProcess: ...

    def _hand_over(self, worker: WorkerProcess, request: AsyncRequest) -> Ticket:
        if isinstance(request.async_fn, FileWrites):
            files = [(absolute(path), image) for path, image in request.async_fn.images()]
            return worker.hand_over(self._pool, files, self._mode)
        if isinstance(request.async_fn, ReadyWrites):
            return request.async_fn.hand_to(worker)
        arguments = list(request.async_fn_args)
        image = lay_out((request.async_fn, arguments, request.async_fn_kwargs or {}, request.preload_fn))
        mentions_main = any(b"__main__" in literal.data for literal in image.literals)
        world = CallWorld(tuple(sys.path), _main_path() if mentions_main else None)
        return worker.hand_over(self._pool, [("", image)], self._mode, call=world)


class PersistentAsyncCaller(AsyncCaller):
    """One worker for all requests, started for the first one and anew after its death."""

    _current: WorkerProcess | None = None

    def start(self) -> None:
        """Start the worker before it is needed."""
        self._worker()

    def _worker(self) -> WorkerProcess:
        if self._current is None or not self._current.is_alive:
            self._current = WorkerProcess(self._priority)
        return self._current

    def close(self, abort: bool = False) -> None:
        worker, self._current = self._current, None
        if worker is not None:
            _end(worker, abort)

    def let_go(self) -> None:
        if self._current is not None:
            self._current.let_go()

    def adopt(self, other: PersistentAsyncCaller) -> None:
        """Take the worker of another caller, which has no requests."""
        self._current, other._current = other._current, None


class TemporalAsyncCaller(AsyncCaller):
    """A worker for each request; it ends when that is done."""

    _workers: tuple[WorkerProcess, ...] = ()

    def _worker(self) -> WorkerProcess:
        worker = WorkerProcess(self._priority)
        self._workers = (*(each for each in self._workers if each.is_alive), worker)
        return worker

    def _hand_over(self, worker: WorkerProcess, request: AsyncRequest) -> Ticket:
        try:
            ticket = super()._hand_over(worker, request)
        except Exception:
            worker.close()
            raise
        ticket.when_done(worker.close)
        return ticket

    def close(self, abort: bool = False) -> None:
        workers, self._workers = self._workers, ()
        for worker in workers:
            _end(worker, abort)

    def let_go(self) -> None:
        pass  # each ends by itself


def _end(worker: WorkerProcess, abort: bool) -> None:
    if abort:
        worker.kill()
    else:
        worker.close()
        worker.join()


def _main_path() -> str | None:
    main: Any = sys.modules.get("__main__")
    return getattr(main, "__file__", None)
