"""What is left to arrange with Slurm when a job has ended here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from nvrx_slurm import journal
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import (
    CannotRequeueError,
    SlurmClient,
    SlurmUnavailableError,
    UnknownJobError,
    requeue,
)

_FOLLOWER_S = 30.0
"""The old batch script, if it still runs, looks at the lease every few seconds, and ends the job then."""
_ASK_S = 2.0
_REFUSALS = (CannotRequeueError, SlurmUnavailableError, UnknownJobError)


def start_again(
    slurm: SlurmClient,
    job_id: str,
    without: Collection[str],
    num_nodes: int | None = None,
    held: str = "",
) -> AnyEvent:
    """Have Slurm start the job again without these nodes; return what to record. It ends us then."""
    try:
        plan = requeue(slurm, job_id, sorted(without), num_nodes, hold=bool(held))
    except _REFUSALS as error:
        return journal.NotRequeued(why=str(error))
    return journal.Requeued(
        excluded=list(plan.exclude),
        start_in_s=plan.start_in_s,
        warnings=list(plan.warnings),
        held=held if plan.held else "",
    )


def nodes_to_exclude(
    excluded: Collection[str],
    lost: Collection[str],
    nodes: Collection[str],
    host: str,
    say: Callable[[str], None],
) -> list[str]:
    """Return the nodes to leave out: the excluded and the lost ones.

    If several were lost and none is left but this host, it may be this host that was cut off: then the lost
    ones are not held to be bad.
    """
    lost = set(lost) - set(excluded)
    if len(lost) > 1 and not set(nodes) - lost - set(excluded) - {host}:
        say("every other node was lost: not excluding those, this host may have been the cause")
        lost = set()
    return sorted(lost | set(excluded))


def leave_exit_code(
    slurm: SlurmClient, job_id: str, lost: str, code: int, record: Callable[[AnyEvent], None]
) -> None:
    """Let Slurm learn how the job ended although the batch script may be gone with its host.

    If the old batch script still runs (its host was cut off, and is back), it exits with ``code`` and so ends
    the job. Otherwise Slurm would keep the allocation until the time limit: the job is requeued, and the
    nvrx-srun that starts then finds the code in the journal and exits with it at once.
    """
    deadline = time.monotonic() + _FOLLOWER_S
    while _answers(slurm, job_id, lost):
        if time.monotonic() > deadline:
            break
        time.sleep(_ASK_S)
    else:
        if _is_over(slurm, job_id):
            return
    record(journal.ExitDeferred(code=code))
    # One node is enough to exit on.
    record(start_again(slurm, job_id, [lost], num_nodes=1))


def _answers(slurm: SlurmClient, job_id: str, host: str) -> bool:
    """Tell whether the job runs, and Slurm holds its former batch host for well."""
    try:
        job = slurm.job(job_id)
        if job.state != "RUNNING" or host not in job.nodes:
            return False
        return not has_lost(slurm, host)
    except (SlurmUnavailableError, UnknownJobError):
        return False


def _is_over(slurm: SlurmClient, job_id: str) -> bool:
    try:
        return slurm.job(job_id).state != "RUNNING"
    except SlurmUnavailableError:
        return False
    except UnknownJobError:
        return True


def has_lost(slurm: SlurmClient, host: str) -> bool:
    """Tell whether Slurm itself no longer hears from ``host``, or holds it for down.

    Raises:
        SlurmUnavailableError
    """
    return not slurm.node(host).responds
