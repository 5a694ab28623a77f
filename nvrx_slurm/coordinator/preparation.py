"""What is decided once, before the first cycle."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.journal import CycleStarted, JobStarted, iterate_journal


def preferred_order(nodes: Sequence[str], batch_host: str | None, spares: int) -> tuple[str, ...]:
    """Return ``nodes`` in the order in which they should become active.

    Slurm's order, except that the batch host comes last when there is a spare: losing it loses the
    Coordinator, so training load should not be what takes it down.
    """
    if spares and batch_host is not None and batch_host in nodes:
        return (*(node for node in nodes if node != batch_host), batch_host)
    return tuple(nodes)


def first_cycle(run_dir: RunDir) -> int:
    """Return the number after the last cycle in the journal: cycles count on over requeues.

    Raises:
        JournalVersionError: the journal was written by a newer version.
    """
    first = 0
    with contextlib.suppress(FileNotFoundError):
        for record in iterate_journal(run_dir.journal):
            if isinstance(record.event, CycleStarted):
                first = max(first, record.cycle + 1)
    return first


def attempts(run_dir: RunDir) -> int:
    """Return how many Coordinators have written the journal before.

    Raises:
        JournalVersionError: the journal was written by a newer version.
    """
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for record in iterate_journal(run_dir.journal):
            count += isinstance(record.event, JobStarted)
    return count


def _belongs_to_another_job(run_dir: RunDir, job_id: str, restart_count: int, submitted: int) -> bool:
    """Tell whether the journal there is of an earlier job that had the same id: Slurm begins anew at times.

    Only a first attempt can tell, since a requeue changes the time of submission.

    Raises:
        JournalVersionError: the journal was written by a newer version.
    """
    if restart_count > 0 or not submitted:
        return False
    other = False
    with contextlib.suppress(FileNotFoundError):
        for record in iterate_journal(run_dir.journal):
            if record.job == job_id and isinstance(record.event, JobStarted):
                other = record.attempt > 0 or record.event.submitted not in (0, submitted)
    return other


def claim_own(run_dir: RunDir, job_id: str, restart_count: int, submitted: int) -> tuple[int, Path | None]:
    """Claim the run directory that is named after the job, and set an earlier job's aside.

    Returns:
        The lock as :meth:`RunDir.claim` returns it, and where the earlier job's directory is now.

    Raises:
        RunDirError, JournalVersionError, OSError
    """
    lock = run_dir.claim()
    if not _belongs_to_another_job(run_dir, job_id, restart_count, submitted):
        return lock, None
    aside = run_dir.set_aside()
    os.close(lock)
    return run_dir.claim(), aside
