"""Append events to a journal."""

from __future__ import annotations

import os
import time
from pathlib import Path

from nvrx_slurm.journal.events import AnyEvent, JobEnded, Record, Verdict


class JournalWriter:
    """The one writer of a job's ``journal.jsonl``.

    Every event is one ``write`` of one line, so a crash or a full disk can tear at most that line; the next
    event, or opening the file again, closes such a line off, and readers skip it. Verdicts and the end of the
    job are also fsynced.
    """

    def __init__(self, path: Path, job: str, attempt: int) -> None:
        """Open ``path`` for appending, mode 0600.

        Raises:
            OSError: the file cannot be created or written.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
        self._torn = False
        self._job = job
        self._attempt = attempt
        self._epoch = time.time() - time.monotonic()

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
