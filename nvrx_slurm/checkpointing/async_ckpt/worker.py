"""The process that writes: started by the trainer, ends with it, imports torch only for calls of the user's.

A task whose snapshot is complete is finished when the trainer is gone, within :func:`grace_s`. Files get
their names only when they are whole, so being killed instead does no harm. A trainer's agent spares this
process for as long when it stops the trainer (``agent/worker_server.py``). The last of the ranks' workers
commits what all of them have written.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm import linux
from nvrx_slurm.checkpointing.async_ckpt.messages import Copied, Dismissed, Result, Task, receive, send
from nvrx_slurm.checkpointing.async_ckpt.priority import WorkerPriority
from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.durable import remove_leftovers
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.filling import AbandonedError, Filling
from nvrx_slurm.checkpointing.storage.image import ImageSpec, write_image
from nvrx_slurm.checkpointing.storage.objects import is_url
from nvrx_slurm.checkpointing.storage.pace import Pace
from nvrx_slurm.wire import checkpoint_writer

_MOST_WRITERS = 16
_WRITES_AT_ONCE = 4
_FOLDERS = 8
_PAUSES_S = (1.0, 4.0, 15.0)
_PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.EINTR)
_ERROR_LENGTH = 16_000


def main() -> None:
    """Serve the trainer whose process id and socket are in ``sys.argv``."""
    trainer, fd = map(int, sys.argv[2:4])
    priority = msgspec.json.decode(sys.argv[4], type=WorkerPriority)
    linux.set_process_name("nvrx-ckpt")
    priority.apply()
    pace = Pace(priority.bytes_per_s) if priority.bytes_per_s else None
    worker = _Worker(socket.socket(fileno=fd), trainer, pace)
    # Ctrl-C, and what Slurm sends to all processes of a job, are the trainer's to answer: it may save then.
    for sig in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sig, signal.SIG_IGN)
    worker.serve()
    os._exit(0)  # threads may still wait


def grace_s() -> float:
    """Return for how long this process goes on without its trainer, in seconds."""
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ[checkpoint_writer.GRACE_VARIABLE])
    return checkpoint_writer.DEFAULT_GRACE_S


def patiently(write: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> None:
    """Write, again after a while where a network file system, or a store, has stumbled (EIO, ESTALE, …).

    A full disk (ENOSPC, EDQUOT) is an error at once: waiting would hold the snapshot's memory.
    """
    for pause_s in _PAUSES_S:
        try:
            return write()
        except OSError as error:
            if error.errno not in _PASSING and not isinstance(error, (ConnectionError, TimeoutError)):
                raise
            wait(pause_s)
    return write()


class _Worker:
    def __init__(self, sock: socket.socket, trainer: int, pace: Pace | None) -> None:
        self._socket = sock
        self._trainer = trainer
        self._pace = pace
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._arenas: dict[int, tuple[int, mmap.mmap]] = {}
        self._swept: set[Path] = set()
        self._fillings: dict[int, Filling] = {}
        self._ending = False
        self._is_dismissed = False
        self._folders: deque[Path] = deque(maxlen=_FOLDERS)
        """Where files have been written last."""

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while (task := self._tasks.get()) is not None:
            began = time.monotonic()
            error = self._run(task)
            with contextlib.suppress(OSError):
                send(self._socket, Result(task.number, error, time.monotonic() - began))
            del self._fillings[task.number]
            for key in task.dropped:
                self._drop(key)
        if not self._is_dismissed:
            self._commit_for_the_ranks()

    def _commit_for_the_ranks(self) -> None:
        """Commit what all ranks' workers have written, if this one is the last: nobody else does it now."""
        for folder in dict.fromkeys(self._folders):
            with contextlib.suppress(CorruptCheckpointError, OSError):
                if manifest.unfinished(folder):
                    from nvrx_slurm.checkpointing.async_ckpt.roll_forward import finish_written_save

                    finish_written_save(folder)

    def end_soon(self) -> None:
        """End after the tasks that are here, and in any case soon."""
        if not self._ending:
            self._ending = True
            timer = threading.Timer(grace_s(), os._exit, [1])
            timer.daemon = True
            timer.start()
            self._tasks.put(None)

    def _read(self) -> None:
        """Take tasks until the trainer closes its side, or is gone while its children keep that open."""
        try:
            with contextlib.suppress(EOFError), self._trainer_fd() as trainer:
                while self._socket in select.select([self._socket, trainer], [], [])[0]:
                    message, fd = receive(self._socket, Task | Copied | Dismissed)
                    match message:
                        case Task():
                            self._take(message, fd)
                        case Copied():
                            self._note(message)
                        case Dismissed():
                            self._is_dismissed = True
        finally:
            for filling in list(self._fillings.values()):
                filling.fail("the trainer has ended before everything was copied")
            self.end_soon()  # whatever it was: without a reader the trainer would wait in vain

    def _take(self, task: Task, fd: int | None) -> None:
        if fd is not None:
            self._arenas[task.arena] = (fd, mmap.mmap(fd, os.fstat(fd).st_size))
        self._fillings[task.number] = Filling()
        self._tasks.put(task)

    def _note(self, copied: Copied) -> None:
        filling = self._fillings.get(copied.task)
        if filling is None:
            return  # its task has failed already
        filling.advance(copied.up_to)
        if copied.is_whole:
            filling.finish()
        elif copied.failure is not None:
            filling.fail(copied.failure)

    @contextlib.contextmanager
    def _trainer_fd(self) -> Any:
        try:
            fd = os.pidfd_open(self._trainer)
        except ProcessLookupError:
            raise EOFError from None
        try:
            yield fd
        finally:
            os.close(fd)

    def _drop(self, key: int) -> None:
        fd, memory = self._arenas.pop(key)
        memory.close()
        os.close(fd)

    def _run(self, task: Task) -> str | None:
        fd, memory = self._arenas[task.arena]
        filling = self._fillings[task.number]
        try:
            if task.call is not None:
                from nvrx_slurm.checkpointing.async_ckpt.call import run_call

                filling.wait_until_whole()
                run_call(fd, task.images[0], task.call)
            else:
                self._write(task.images, memory, filling)
        except AbandonedError as error:
            return str(error)
        except BaseException as error:
            first = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError) and task.call is None:
                return first[:_ERROR_LENGTH]  # it says what and where: a stack would only hide that
            return f"{first}\n{''.join(traceback.format_exception(error))}"[:_ERROR_LENGTH]
        return None

    def _write(self, specs: tuple[ImageSpec, ...], memory: mmap.mmap, filling: Filling) -> None:
        for folder in {Path(spec.path).parent for spec in specs if not is_url(spec.path)} - self._swept:
            with contextlib.suppress(OSError):
                remove_leftovers(folder)
                self._swept.add(folder)
        self._folders.extend(Path(spec.path).parent for spec in specs if not is_url(spec.path))
        view = memoryview(memory)
        try:
            at_once = max(1, _WRITES_AT_ONCE // max(1, len(specs)))
            writes = [
                partial(write_image, spec, view, filling, at_once=at_once, pace=self._pace) for spec in specs
            ]
            with ThreadPoolExecutor(min(max(1, len(specs)), _MOST_WRITERS)) as pool:
                for done in [pool.submit(patiently, write) for write in writes]:
                    done.result()
        finally:
            view.release()
