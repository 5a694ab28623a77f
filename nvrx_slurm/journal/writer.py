"""Append events to a journal."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from nvrx_slurm.journal.events import AnyEvent, JobEnded, Record, Verdict
from nvrx_slurm.journal.reader import JournalError, decode_line

_TAIL_BYTES = 256 * 1024
"""Holds the last event, which has a stack or two at most."""
_MAX_SKEW_S = 86_400.0
"""No clock of a cluster is further ahead; such a time was not read from one."""


class JournalWriter:
    """The one writer of a job's ``journal.jsonl``.

    Every event is one ``write`` of one line, so a crash or a full disk can tear at most that line; the next
    event, or opening the file again, closes such a line off, and readers skip it. Verdicts and the end of the
    job are also fsynced. Times go on from the last event, also when that was written on a host whose clock is
    ahead of this one's.
    """

    def __init__(self, path: Path, job: str, attempt: int) -> None:
        """Open ``path`` for appending, mode 0600.

        Raises:
            OSError: the file cannot be created or written.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.write(self._fd, b"\n")
        self._torn = False
        self._job = job
        self._attempt = attempt
        now, last = time.time(), _last_time(tail)
        self._epoch = (last if now < last < now + _MAX_SKEW_S else now) - time.monotonic()

    def append(self, cycle: int, event: AnyEvent) -> Record:
        """Write ``event`` and return the record as written.

        Raises:
            OSError: the write failed (disk full, stale handle).
        """
        record = Record(
            ts=round(self._epoch + time.monotonic(), 6),
            job=self._job,
            attempt=self._attempt,
            cycle=cycle,
            event=event,
        )
        line = b"\n" * self._torn + record.to_line()
        written = os.write(self._fd, line)
        if written != len(line):
            self._torn = True
            raise OSError(f"journal: only {written} of {len(line)} bytes were written")
        self._torn = False
        if isinstance(event, Verdict | JobEnded):
            os.fsync(self._fd)
        return record

    def close(self) -> None:
        os.close(self._fd)


def _last_time(tail: bytes) -> float:
    """Return the time of the last whole line in the end of a journal, 0 without one."""
    for line in reversed(tail.splitlines()):
        with contextlib.suppress(JournalError):
            record = decode_line(line)
            if record is not None:
                return record.ts
    return 0.0
