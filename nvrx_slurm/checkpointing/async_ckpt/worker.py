"""The process that writes: started by the trainer, ends with it, imports torch only for calls of the user's.

A task whose snapshot is complete is finished when the trainer is gone, within :func:`grace_s`. Files get
their names only when they are whole, so being killed instead does no harm. A trainer's agent spares this
process for as long when it stops the trainer (``agent/worker_server.py``).
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm import linux
from nvrx_slurm.checkpointing.async_ckpt.messages import Result, Task, receive, send
from nvrx_slurm.checkpointing.storage.durable import remove_leftovers
from nvrx_slurm.checkpointing.storage.image import ImageSpec, write_image
from nvrx_slurm.wire import checkpoint_writer

_MOST_WRITERS = 16
_PAUSES_S = (1.0, 4.0, 15.0)
_PASSING = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)
_ERROR_LENGTH = 16_000


def main() -> None:
    """Serve the trainer whose process id and socket are in ``sys.argv``."""
    trainer, fd, nice, io_priority = map(int, sys.argv[2:6])
    linux.set_process_name("nvrx-ckpt")
    _be_modest(nice, io_priority)
    worker = _Worker(socket.socket(fileno=fd), trainer)
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


def _be_modest(nice: int, io_priority: int) -> None:
    with contextlib.suppress(OSError):
        os.nice(max(0, nice - os.nice(0)))
    if io_priority:
        try:
            linux.set_io_priority(io_priority)
        except OSError as error:
            print(f"nvrx: checkpoint worker: I/O priority {io_priority}: {error}", file=sys.stderr)


def patiently(write: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> None:
    """Write, again after a while where a network file system has stumbled (EIO, ESTALE, …).

    A full disk (ENOSPC, EDQUOT) is an error at once: waiting would hold the snapshot's memory.
    """
    for pause_s in _PAUSES_S:
        try:
            return write()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
            wait(pause_s)
    return write()


class _Worker:
    def __init__(self, sock: socket.socket, trainer: int) -> None:
        self._socket = sock
        self._trainer = trainer
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._arenas: dict[int, tuple[int, mmap.mmap]] = {}
        self._swept: set[Path] = set()
        self._ending = False

    def serve(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while (task := self._tasks.get()) is not None:
            began = time.monotonic()
            error = self._run(task)
            with contextlib.suppress(OSError):
                send(self._socket, Result(task.number, error, time.monotonic() - began))
            for key in task.dropped:
                self._drop(key)

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
                    task, fd = receive(self._socket, Task)
                    if fd is not None:
                        self._arenas[task.arena] = (fd, mmap.mmap(fd, os.fstat(fd).st_size))
                    self._tasks.put(task)
        finally:
            self.end_soon()  # whatever it was: without a reader the trainer would wait in vain

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
        try:
            if task.call is not None:
                from nvrx_slurm.checkpointing.async_ckpt.call import run_call

                run_call(fd, task.images[0], task.call)
            else:
                self._write(task.images, memory)
        except BaseException as error:
            first = f"{type(error).__name__}: {error}"
            return f"{first}\n{''.join(traceback.format_exception(error))}"[:_ERROR_LENGTH]
        return None

    def _write(self, specs: tuple[ImageSpec, ...], memory: mmap.mmap) -> None:
        for folder in {Path(spec.path).parent for spec in specs} - self._swept:
            with contextlib.suppress(OSError):
                remove_leftovers(folder)
                self._swept.add(folder)
        view = memoryview(memory)
        try:
            with ThreadPoolExecutor(min(max(1, len(specs)), _MOST_WRITERS)) as pool:
                for done in [pool.submit(patiently, partial(write_image, spec, view)) for spec in specs]:
                    done.result()
        finally:
            view.release()
