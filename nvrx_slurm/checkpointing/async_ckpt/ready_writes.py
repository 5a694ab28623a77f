"""Files whose content lies in shared memory already, or soon will: a worker writes them, no copy is made."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nvrx_slurm.checkpointing.async_ckpt.worker_process import MemoryPool, SharedMemory, Ticket, WorkerProcess
from nvrx_slurm.checkpointing.storage.image import ImageSpec, write_image


@dataclass(frozen=True)
class ReadyFile:
    """A whole file in memory."""

    path: Path
    memory: SharedMemory
    """Begins with the file; nobody changes it until it is released."""
    size: int
    """Of the file, in bytes."""

    @property
    def spec(self) -> ImageSpec:
        return ImageSpec(str(self.path.absolute()), 0, self.size, (), None)


class ReadyWrites:
    """As the function of an :class:`AsyncRequest`. What goes wrong is no error of the queue.

    Finalizers run all the same, and are told before: they can tell other ranks, and clean up on all.
    """

    def __init__(
        self,
        files: Future[list[ReadyFile]],
        pool: MemoryPool,
        when_failed: Callable[[str], None],
    ) -> None:
        """
        Args:
            files: done when they can be written.
            pool: gets each file's memory back when it is written, or can't be.
            when_failed: told of each thing that goes wrong; the first line says what.
        """
        self._files = files
        self._pool = pool
        self.when_failed = when_failed

    def hand_to(self, worker: WorkerProcess) -> Ticket:
        """Have ``worker`` write the files as soon as they can be."""
        ticket = Ticket()
        self._files.add_done_callback(partial(self._begin, worker, ticket))
        return ticket

    def _begin(self, worker: WorkerProcess, all_done: Ticket, ready: Future[list[ReadyFile]]) -> None:
        try:
            files = ready.result()
            tickets = [worker.hand_over_ready(self._pool, file.memory, file.spec) for file in files]
        except Exception as error:
            all_done.resolve(_text_of(error))
            return
        left, lock = set(tickets), threading.Lock()

        def ended(ticket: Ticket) -> None:
            with lock:
                left.discard(ticket)
                if left:
                    return
            errors = dict.fromkeys(each.error for each in tickets if each.error)
            all_done.resolve("; ".join(errors) or None, sum(each.seconds for each in tickets))

        if not tickets:
            all_done.resolve()
        for ticket in tickets:
            ticket.when_done(partial(ended, ticket))

    def __call__(self, *_arguments: object, **_keywords: object) -> None:
        """Write them here and now."""
        for file in self._files.result():
            try:
                with memoryview(file.memory.memory) as view:
                    write_image(file.spec, view)
            except Exception as error:
                self.when_failed(_text_of(error))
            finally:
                self._pool.release(file.memory)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
