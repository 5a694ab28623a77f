"""The job's directory on the shared file system; its layout is a contract (see DESIGN)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.coordinator.lease import Fence, LeaseError, LeaseFile
from nvrx_slurm.whole_file import temporary_file


class RunDirError(RuntimeError):
    """The run directory can't be used; the message says why and what to do."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one job."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def ft_state(self) -> Path:
        return self.path / "ft_state.json"

    @property
    def _lock(self) -> Path:
        return self.path / "coordinator.lock"

    @property
    def handover(self) -> Path:
        return self.path / "handover.json"

    def cycle(self, number: int) -> Path:
        return self.path / "cycles" / str(number)

    def rank_log(self, cycle: int, rank: int) -> Path:
        return self.cycle(cycle) / f"rank_{rank}.log"

    def rank_stacks(self, cycle: int, rank: int) -> Path:
        return self.cycle(cycle) / f"rank_{rank}.stacks"

    def merged_log(self, cycle: int) -> Path:
        return self.cycle(cycle) / "merged.log"

    def claim(self, fence: Fence | None = None) -> int:
        """Create the directory, mode 0700, and lock it; the lock lives as long as the returned descriptor.

        A Coordinator of an earlier start of the job than that of ``fence`` does not count: the lock of a host
        that was lost may live on in the file server.

        Raises:
            RunDirError: it can't be created, is another user's, or another Coordinator holds it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunDirError(
                f"run directory {self.path}: {error.strerror}; choose one that is writable from every node "
                "with --run-dir or NVRX_RUN_DIR"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if fence is not None and self._is_left_over(fence):
                return self._replace_lock()
            raise RunDirError(
                f"run directory {self.path} is in use by another nvrx-srun: wait for it, or choose another "
                "with --run-dir"
            ) from error
        return fd

    def _is_left_over(self, fence: Fence) -> bool:
        try:
            lease = LeaseFile(self.path).read()
        except LeaseError:
            return False
        holder = None if lease is None else Fence.parse(lease.fence)
        return holder is not None and fence.is_newer_than(holder) and fence.restart > holder.restart

    def _replace_lock(self) -> int:
        with temporary_file(self._lock, b"") as path:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(path, self._lock)
        return fd

    def _check_owner(self) -> None:
        """Refuse what another user could have written, and would be believed or followed."""
        info = self.path.stat()
        if info.st_uid != os.geteuid():
            raise RunDirError(
                f"run directory {self.path} belongs to uid {info.st_uid}: choose another with --run-dir"
            )
        if info.st_mode & 0o022:
            raise RunDirError(
                f"run directory {self.path} is writable by others: `chmod go-w` it, or choose another "
                "with --run-dir"
            )
        for file in (self.journal, self.ft_state, self.handover, self._lock):
            with contextlib.suppress(FileNotFoundError):
                there = file.lstat()
                if there.st_uid != os.geteuid() or not stat.S_ISREG(there.st_mode):
                    raise RunDirError(f"{file} is not a regular file of yours: choose another --run-dir")

    def set_aside(self) -> Path:
        """Rename the directory, which is another job's, to the first free name beside it; return that."""
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside
