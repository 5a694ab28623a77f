"""What is decided once, before the first cycle."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from nvrx_slurm.coordinator.lease import Fence
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.journal import CycleStarted, JobStarted, iterate_journal


class NodeCountError(ValueError):
    """The job can't be divided into active nodes and spares as asked; the message is one sentence."""


def parse_nnodes(text: str) -> tuple[int, int]:
    """Read torchrun's ``--nnodes``: ``MIN:MAX``, or one number for both.

    Raises:
        NodeCountError: it is neither.
    """
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text, re.ASCII)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < least <= most:
        raise NodeCountError(f"--nnodes {text[:40]!r}: MIN:MAX or one number is accepted, 0 < MIN <= MAX")
    return least, most


def count_active(nodes: int, spares: int | None, nnodes: str | None, segment: int) -> int:
    """Return how many of the job's ``nodes`` train; the others are spares.

    Args:
        spares: ``--spares``; None: not given.
        nnodes: ``--nnodes``: MIN nodes train, the rest, at most up to MAX, are spares; None: not given.
        segment: ``--ft-segment``.

    Raises:
        NodeCountError: the options contradict each other or the job.
    """
    kept = spares or 0
    if nnodes is None:
        if kept >= nodes:
            raise NodeCountError(f"--spares: {kept} of {nodes} nodes leave none to train on")
        active = nodes - kept
    else:
        active, most = parse_nnodes(nnodes)
        if ":" not in nnodes:
            most += kept
        if nodes < active:
            raise NodeCountError(f"--nnodes {nnodes}: this job has only {nodes} nodes")
        if nodes > most:
            raise NodeCountError(
                f"--nnodes {nnodes}: this job has {nodes} nodes; "
                f"--nnodes {active}:{nodes} keeps the rest as spares"
            )
        if spares is not None and spares != nodes - active:
            raise NodeCountError(
                f"--nnodes {nnodes} leaves {nodes - active} of {nodes} nodes as spares, "
                f"--spares says {spares}"
            )
    if active % segment:
        raise NodeCountError(
            f"--ft-segment {segment}: the {active} nodes that train are no multiple of {segment}"
        )
    return active


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
    lock = run_dir.claim(Fence(job_id, restart_count, 0))
    if not _belongs_to_another_job(run_dir, job_id, restart_count, submitted):
        return lock, None
    aside = run_dir.set_aside()
    os.close(lock)
    return run_dir.claim(), aside
