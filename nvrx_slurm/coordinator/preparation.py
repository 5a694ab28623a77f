"""What is decided once, before the first cycle."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.journal import CycleStarted, read_journal


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
    try:
        records = read_journal(run_dir.journal)
    except FileNotFoundError:
        return 0
    return max((record.cycle + 1 for record in records if isinstance(record.event, CycleStarted)), default=0)
