"""What a job's user has left on the node: processes, and files in ``/dev/shm``.

Only where the user has no other job on the node. What was there before Slurm was asked for that is ended, and
nothing that came later, which may belong to a job that has begun meanwhile. The work is done with the user's
own rights: the kernel sees to it that nobody else's is touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import shutil
import signal
import stat
import time
from pathlib import Path

import msgspec

from nvrx_slurm.health.isolation import call_isolated
from nvrx_slurm.health.text import printable

_SHM = Path("/dev/shm")
_NOBODY = 65534
_TERM_S = 1.0
_KILL_S = 1.0
_CLEANING_S = 6.0
_MOST_ENTRIES = 100_000
"""A user may leave any number; the rest is left to the next epilog."""
_FILE_KINDS = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISFIFO, stat.S_ISSOCK, stat.S_ISLNK)


class LeftProcess(msgspec.Struct, frozen=True):
    pid: int
    started: int
    """Clock ticks since boot: no other process has the same of both."""
    name: str


class LeftFile(msgspec.Struct, frozen=True):
    path: str
    device: int
    inode: int


class Leftovers(msgspec.Struct, frozen=True):
    """What belongs to one user."""

    processes: tuple[LeftProcess, ...] = ()
    files: tuple[LeftFile, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.processes or self.files)

    def __str__(self) -> str:
        names = ", ".join(f"{process.name} ({process.pid})" for process in self.processes[:5])
        files = ", ".join(file.path for file in self.files[:5])
        return "; ".join(
            text
            for text in (
                f"{len(self.processes)} processes: {names}" if self.processes else "",
                f"{len(self.files)} files: {files}" if self.files else "",
            )
            if text
        )


def find_leftovers(uid: int, proc: Path = Path("/proc"), shm: Path = _SHM) -> Leftovers:
    """Return the processes whose real user is ``uid``, zombies aside, and the user's entries of ``shm``."""
    found = (_process(entry, uid) for entry in proc.iterdir() if entry.name.isdigit())
    return Leftovers(
        tuple(sorted((process for process in found if process), key=lambda process: process.pid)),
        tuple(_files(uid, shm)),
    )


def _process(entry: Path, uid: int) -> LeftProcess | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = dict(
            line.split(":", 1) for line in (entry / "status").read_text(errors="replace").splitlines()
        )
        if int(status["Uid"].split()[0]) != uid or status["State"].split()[0] in "ZX":
            return None
        return LeftProcess(int(entry.name), _started(entry), status["Name"].strip()[:15])
    return None


def _started(entry: Path) -> int:
    return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[19])


def _files(uid: int, shm: Path) -> list[LeftFile]:
    files = []
    with contextlib.suppress(OSError), os.scandir(shm) as entries:
        for entry in itertools.islice(entries, _MOST_ENTRIES):
            with contextlib.suppress(OSError):  # it has gone meanwhile
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == uid and any(kind(status.st_mode) for kind in _FILE_KINDS):
                    files.append(LeftFile(entry.path, status.st_dev, status.st_ino))
    return sorted(files, key=lambda file: file.path)


def clean(leftovers: Leftovers, uid: int) -> str:
    """End the processes and remove the files, with the rights of ``uid``; return what remains, or why."""
    answer = call_isolated({"clean": lambda: _clean_as(leftovers, uid)}, _CLEANING_S, str)["clean"]
    return f"still there: {answer.value}" if answer.value else answer.trouble


def _clean_as(leftovers: Leftovers, uid: int) -> str:
    """Return what remains."""
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(uid, uid, uid)
    processes = _end(leftovers.processes)
    for file in leftovers.files:
        if _is_there(file):
            _remove(file.path)
    # Names of files are any bytes.
    return printable(str(Leftovers(processes, tuple(file for file in leftovers.files if _is_there(file)))))


def _end(processes: tuple[LeftProcess, ...]) -> tuple[LeftProcess, ...]:
    """Send SIGTERM, then SIGKILL; return those that have not ended."""
    alive: dict[int, LeftProcess] = {}
    for process in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            descriptor = os.pidfd_open(process.pid)
            # The descriptor is of the process that has the id now.
            if _started(Path("/proc", str(process.pid))) == process.started:
                alive[descriptor] = process
            else:
                os.close(descriptor)
    for sig, patience_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        for descriptor in alive:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, sig)
        _await_end(alive, patience_s)
    return tuple(alive.values())


def _await_end(alive: dict[int, LeftProcess], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while alive and (left := deadline - time.monotonic()) > 0:
        poller = select.poll()
        for descriptor in alive:
            poller.register(descriptor, select.POLLIN)
        for descriptor, _ in poller.poll(left * 1000):
            os.close(descriptor)
            del alive[descriptor]


def _is_there(file: LeftFile) -> bool:
    try:
        status = os.lstat(file.path)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (file.device, file.inode)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
