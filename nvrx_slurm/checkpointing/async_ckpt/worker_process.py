"""The trainer's side of the worker: start it, hand it tasks, learn what came of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nvrx_slurm import interpreter
from nvrx_slurm.checkpointing.async_ckpt.arena import ArenaPool
from nvrx_slurm.checkpointing.async_ckpt.messages import (
    CallWorld,
    Copied,
    Dismissed,
    Result,
    Task,
    receive,
    send,
)
from nvrx_slurm.checkpointing.async_ckpt.priority import WorkerPriority
from nvrx_slurm.checkpointing.async_ckpt.snapshot import Snapshot, SnapshotMode
from nvrx_slurm.checkpointing.async_ckpt.stall import StallWatch
from nvrx_slurm.checkpointing.storage.durable import remove_leftovers
from nvrx_slurm.checkpointing.storage.image import ImageSpec, aligned
from nvrx_slurm.checkpointing.storage.layout import FileImage
from nvrx_slurm.checkpointing.storage.objects import is_url
from nvrx_slurm.wire import checkpoint_writer

_log = logging.getLogger(__name__)

LOOK_S = 5.0
"""So often a worker that says nothing is looked at."""
STALL_S = 600.0
"""One that is held by the kernel for so long is given up; its saves have failed."""
END_S = 30.0
"""In this time a worker ends that has nothing more to do."""


class Ticket:
    """A save that was handed over: whether it is done, and what went wrong."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.error: str | None = None
        """First line: what happened; a traceback may follow. None while it runs and when all is well."""
        self.is_skipped = False
        """It was not begun, for want of room."""
        self.seconds = 0.0
        """What the worker took."""

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._done.wait(timeout_s)

    def resolve(self, error: str | None = None, seconds: float = 0.0, *, is_skipped: bool = False) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self.error, self.seconds, self.is_skipped = error, seconds, is_skipped
            self._done.set()
        for callback in self._callbacks:
            callback()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, when it is done; at once if it is."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback()


class SharedMemory(Protocol):
    """A memory file."""

    key: int
    """Names it among all that this process gives to workers."""
    fd: int
    memory: mmap.mmap


class MemoryPool(Protocol):
    """Where shared memory comes from."""

    def release(self, memory: Any, /) -> None:
        """Take back what no worker reads any more."""

    def keys(self) -> set[int]:
        """Return which of its memory there is."""


class _Handed:
    """A task of the worker's; its memory is given back when worker and snapshot are done with it."""

    def __init__(
        self, number: int, pool: MemoryPool, arena: SharedMemory, folders: frozenset[Path], *users: str
    ) -> None:
        self.number = number
        self.pool = pool
        self.arena = arena
        self.folders = folders
        self.ticket = Ticket()
        self._users = {"worker", *users}
        self._lock = threading.Lock()

    def leave(self, user: str) -> None:
        with self._lock:
            is_last = self._users == {user}
            self._users.discard(user)
        if is_last:
            self.pool.release(self.arena)


class _Feed:
    """Tells the worker how a snapshot goes."""

    def __init__(self, handed: _Handed, say: Callable[[Copied], None]) -> None:
        self._handed = handed
        self._say = say

    def advanced(self, up_to: int) -> None:
        self._say(Copied(self._handed.number, up_to))

    def ended(self, error: Exception | None) -> None:
        self._handed.leave("snapshot")
        if error is None:
            self._say(Copied(self._handed.number, is_whole=True))
        else:
            why = f"{type(error).__name__}: {error}"
            self._handed.ticket.resolve(why)
            self._say(Copied(self._handed.number, failure=why))


def _folders_of(specs: Sequence[ImageSpec]) -> frozenset[Path]:
    """Where a killed worker may leave half a file."""
    return frozenset(Path(spec.path).parent for spec in specs if not is_url(spec.path))


class WorkerProcess:
    """One worker. Its death ends its tasks with an error; it is not started again."""

    def __init__(self, priority: WorkerPriority) -> None:
        """
        Raises:
            OSError: no process could be started.
        """
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            how = msgspec.json.encode(priority).decode()
            self._process = subprocess.Popen(
                interpreter.command_for(
                    checkpoint_writer.MODULE, str(os.getpid()), str(theirs.fileno()), how
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # not a process of the group that is killed with the trainer
            )
        self._numbers = itertools.count()
        self._known: dict[int, MemoryPool] = {}
        """Memory that the worker has mapped, by key."""
        self._handed: dict[int, _Handed] = {}
        self._copying: set[int] = set()
        self._closing = False
        self._is_dismissed = False
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self.is_alive = True
        self._reader = threading.Thread(target=self._read, daemon=True, name="nvrx-checkpoint-results")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def hand_over(
        self,
        pool: ArenaPool,
        images: Sequence[tuple[str, FileImage]],
        mode: SnapshotMode,
        *,
        call: CallWorld | None = None,
    ) -> Ticket:
        """Make a snapshot of what the images hold and have the worker write, or call, it.

        Raises:
            OutOfMemoryError: there is no memory for the snapshot.
        """
        specs, placed, end = [], [], 0
        for path, image in images:
            regions = tuple(hole.region for hole in image.holes)
            specs.append(ImageSpec(path, end, image.size, regions, image.table, image.sync))
            placed.append((end, image))
            end += aligned(image.size)
        arena = pool.acquire(end)
        folders = frozenset() if call is not None else _folders_of(specs)
        handed = _Handed(next(self._numbers), pool, arena, folders, "snapshot")
        try:
            self._send_task(Task(handed.number, arena.key, tuple(specs), call), handed)
        except Exception:  # a path that is no UTF-8
            pool.release(arena)
            raise
        feed = _Feed(handed, self._say)
        try:
            Snapshot(arena, placed, mode, feed)
        except Exception as error:
            feed.ended(error)
        return handed.ticket

    def hand_over_ready(self, pool: MemoryPool, memory: SharedMemory, spec: ImageSpec) -> Ticket:
        """Have the worker write a file that lies whole in shared memory."""
        handed = _Handed(next(self._numbers), pool, memory, _folders_of([spec]))
        try:
            if self._send_task(Task(handed.number, memory.key, (spec,)), handed):
                self._say(Copied(handed.number, is_whole=True))
        except Exception as error:
            handed.leave("worker")
            handed.ticket.resolve(f"{type(error).__name__}: {error}")
        return handed.ticket

    def _send_task(self, task: Task, handed: _Handed) -> bool:
        """Return whether there is a worker to work on it."""
        with self._sending:
            with self._lock:
                alive = self.is_alive
                if alive:
                    self._handed[handed.number] = handed
                    self._copying.add(handed.number)
            if not alive:
                self._fail(handed)
                return False
            new = handed.arena.key not in self._known
            current = handed.pool.keys()
            gone = [key for key, pool in self._known.items() if pool is handed.pool and key not in current]
            task = msgspec.structs.replace(task, dropped=tuple(gone))
            for key in gone:
                del self._known[key]
            self._known[handed.arena.key] = handed.pool
            try:
                with contextlib.suppress(OSError):  # it is dead: the reader sees that, too
                    send(self._socket, task, handed.arena.fd if new else None)
            except Exception:
                with self._lock:
                    self._handed.pop(handed.number, None)
                    self._copying.discard(handed.number)
                self._known.pop(handed.arena.key, None)
                raise
        return True

    def _say(self, copied: Copied) -> None:
        with self._sending, contextlib.suppress(OSError):
            send(self._socket, copied)
        if copied.is_whole or copied.failure is not None:
            with self._lock:
                self._copying.discard(copied.task)
            self._shut_down_if_closing()

    def _read(self) -> None:
        watch = StallWatch(self.pid)
        with contextlib.suppress(EOFError):
            while True:
                if not select.select([self._socket], [], [], LOOK_S)[0]:
                    self._give_up_if_held(watch)
                    continue
                result, _ = receive(self._socket, Result)
                with self._lock:
                    handed = self._handed.pop(result.number, None)
                if handed is not None:  # else it was given up
                    handed.leave("worker")
                    handed.ticket.resolve(result.error, result.seconds)
        self._process.wait()
        self._fail_what_is_left(self._epitaph())

    def _give_up_if_held(self, watch: StallWatch) -> None:
        """Storage may never answer. Then nobody waits for this worker any more; another one may do better.

        Killed, it does nothing more when the kernel lets go of it: its files never get their names.
        """
        held_s = watch.held_s()
        with self._lock:
            is_held = bool(self._handed) and held_s >= STALL_S
        if is_held:
            why = (
                f"the checkpoint worker (process {self.pid}) has been held by the kernel for {held_s:.0f} s "
                f"(threads in state {watch.states()}): its storage does not answer, or it was stopped"
            )
            self._process.kill()
            self._fail_what_is_left(why)

    def _fail_what_is_left(self, why: str) -> None:
        with self._lock:
            self.is_alive = False
            left, self._handed = list(self._handed.values()), {}
        for handed in left:
            for folder in handed.folders:
                with contextlib.suppress(OSError):
                    remove_leftovers(folder)
            handed.leave("worker")
            handed.ticket.resolve(why)

    def _fail(self, handed: _Handed) -> None:
        handed.leave("worker")
        handed.ticket.resolve(self._epitaph())

    def _epitaph(self) -> str:
        code = self._process.returncode
        if code is None:
            return f"the checkpoint worker (process {self.pid}) was given up, and has not ended yet"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the checkpoint worker (process {self._process.pid}) {how} before the checkpoint was written"

    def close(self) -> None:
        """Let the worker finish what it has, or will have been copied, and end; returns at once."""
        self._is_dismissed = True
        self.let_go()

    def let_go(self) -> None:
        """As :meth:`close`; what nobody finalizes any more the worker commits, if all ranks have written."""
        with self._lock:
            self._closing = True
        self._shut_down_if_closing()

    def _shut_down_if_closing(self) -> None:
        with self._lock:
            is_over = self._closing and not self._copying
        if is_over:
            with self._sending, contextlib.suppress(OSError):
                if self._is_dismissed:
                    send(self._socket, Dismissed())
                self._socket.shutdown(socket.SHUT_WR)

    def join(self) -> None:
        """Wait until a closed worker has ended; one that the kernel holds is left, with a SIGKILL."""
        self._reader.join(END_S)
        if self._reader.is_alive():
            self._process.kill()
            _log.warning(
                "the checkpoint worker (process %d) has not ended within %g s: left", self.pid, END_S
            )
            return
        self._socket.close()

    def kill(self) -> None:
        """End the worker now; files that it was writing are removed."""
        self._process.kill()
        self.join()
