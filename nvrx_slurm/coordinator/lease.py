"""Who is in charge of a job: a fence that only grows, and the lease that its holder keeps renewing.

Both are files in the run directory. A fence ``job.restart.attempt`` is *claimed* once, by linking a file that
is named after it: link(2) succeeds for one caller only, on NFS too. The one *lease* file is replaced by its
holder every :data:`RENEW_S`; whoever finds a newer fence there has been replaced and must not act any more.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from nvrx_slurm.whole_file import replace_file, temporary_file

RENEW_S = 10.0
"""How often a Coordinator renews its lease."""
LAPSE_S = 30.0
"""Not renewed for as long, by an observer's own clock: the Coordinator's host is held for lost."""


class Fence(NamedTuple):
    """``job.restart.attempt``; of one job the greater is the newer."""

    job: str
    restart: int
    """How often Slurm has requeued the job."""
    attempt: int
    """How often another host has taken over in this start of the job."""

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}.{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Fence:
        """Read ``str(fence)``.

        Raises:
            ValueError: it is something else.
        """
        match = re.fullmatch(r"([0-9]+)\.([0-9]{1,9})\.([0-9]{1,9})", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text[:60]!r} is no fence job.restart.attempt")
        return cls(match[1], int(match[2]), int(match[3]))

    def is_newer_than(self, other: Fence) -> bool:
        """Tell whether it replaces ``other``; fences of two jobs do not compare."""
        return self.job == other.job and self > other

    def next_attempt(self, claimed: int = 0) -> Fence:
        """Return the fence to claim when ``claimed`` is the highest attempt that has been tried."""
        return self._replace(attempt=max(self.attempt, claimed) + 1)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in the file; nothing of it is secret."""

    fence: str
    counter: int
    """Grows with each renewal."""
    host: str
    """Where the Coordinator runs."""
    address: str = ""
    """``host:port`` of its server; empty: it is about to start."""
    ended: int | None = None
    """The job's exit code, once there is one."""


class LeaseError(RuntimeError):
    """The lease can't be read: nothing is known about who is in charge."""


_decoder = msgspec.json.Decoder(Lease)


class LeaseFile:
    """Reads and writes lease and claims below a run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._lease = run_dir / "lease.json"
        self._claims = run_dir / "claims"

    def read(self) -> Lease | None:
        """Return the lease, None if there has never been one.

        The file is opened anew each time: that is when NFS asks the server.

        Raises:
            LeaseError: the directory is not there or can't be read, or holds something else.
        """
        try:
            lease = _decoder.decode(self._lease.read_bytes())
            Fence.parse(lease.fence)
            return lease
        except FileNotFoundError:
            if self._lease.parent.is_dir():
                return None
            raise LeaseError(f"{self._lease.parent} is not there") from None
        except OSError as error:
            raise LeaseError(f"{self._lease}: {error.strerror}") from error
        except ValueError as error:
            raise LeaseError(f"{self._lease} is no lease: {error}") from error

    def write(self, lease: Lease) -> None:
        """Replace the lease; a reader sees the old one or the new one, whole.

        Raises:
            OSError: the directory can't be written.
        """
        replace_file(self._lease, msgspec.json.encode(lease))

    def highest_claim(self, fence: Fence) -> int:
        """Return the highest attempt that has been claimed in this start of the job, 0 if none has.

        Raises:
            LeaseError: the claims can't be read.
        """
        highest = 0
        try:
            names = os.listdir(self._claims)
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise LeaseError(f"{self._claims}: {error.strerror}") from error
        for name in names:
            with contextlib.suppress(ValueError):
                claimed = Fence.parse(name)
                if claimed[:2] == fence[:2]:
                    highest = max(highest, claimed.attempt)
        return highest

    def claim(self, fence: Fence, claimant: str) -> bool:
        """Take ``fence`` for ``claimant``; False if somebody has it.

        Raises:
            OSError: the directory can't be written.
        """
        self._claims.mkdir(mode=0o700, exist_ok=True)
        target = self._claims / str(fence)
        with temporary_file(target, f"{claimant}\n".encode()) as path:
            with contextlib.suppress(FileExistsError):
                os.link(path, target)
            # What link(2) returns may be of a request that NFS has sent twice; the count of links is not.
            return os.stat(path).st_nlink == 2

    def newest(self, fence: Fence) -> Fence:
        """Return the newest fence of the job that lease or claims show, ``fence`` itself if none is newer.

        Raises:
            LeaseError: they can't be read.
        """
        found = [fence._replace(attempt=max(fence.attempt, self.highest_claim(fence)))]
        lease = self.read()
        if lease is not None:
            found.append(Fence.parse(lease.fence))
        return max((other for other in found if other.job == fence.job), default=fence)
