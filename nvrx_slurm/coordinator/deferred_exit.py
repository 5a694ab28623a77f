"""The exit code of a job that ended when its batch script was gone: its next start tells Slurm."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm import journal
from nvrx_slurm.journal import JournalWriter, iterate_journal


def deferred_code(journal_path: Path, job_id: str) -> int | None:
    """Return the exit code that the job has ended with and that nobody has told Slurm, None without one.

    Raises:
        JournalVersionError: the journal was written by a newer version.
    """
    code = None
    try:
        for record in iterate_journal(journal_path):
            match record.event:
                case journal.ExitDeferred() as event if record.job == job_id:
                    code = event.code
                case journal.ExitReported() | journal.JobStarted():
                    code = None
                case _:
                    pass
    except FileNotFoundError:
        return None
    return code


def report_exit(journal_path: Path, job_id: str, restart_count: int, code: int) -> None:
    """Note that this start of the job exits with ``code``, and does nothing else.

    Raises:
        OSError: the journal can't be written.
    """
    log = JournalWriter(journal_path, job_id, restart_count)
    try:
        log.append(0, journal.ExitReported(code=code))
    finally:
        log.close()
