"""Requeue this process's own batch job with nodes left out, without an administrator.

Slurm's own requeue makes a job wait for two minutes and excludes nothing. Holding it while it is requeued
leaves no race with the scheduler; the exclusion and a start time just after the job's completion are set
meanwhile, and each step is read back. Found on Slurm 22.05; the steps are the same on later releases.

Once Slurm has taken a lost node out of the job, and there is no slurmdbd, nothing of the job can be changed
until it is pending again ("the DB index is being set"), and so a hold could not be released. Such a job is
requeued without: it starts two minutes later, with as many nodes as it was submitted with.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.slurm.client import (
    Job,
    Node,
    SlurmClient,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
)
from nvrx_slurm.slurm.hostlist import compress_hostlist

_SLURM_DELAY_S = 121
"""What Slurm itself adds to a requeue: the life of a credential, and one second."""


class CannotRequeueError(RuntimeError):
    """The job stays as it is; the message says why and what a person can do."""


@dataclass(frozen=True)
class RequeuePlan:
    """What a requeue would do."""

    exclude: tuple[str, ...]
    """The job's whole new exclusion list: an update replaces the old one."""
    start_in_s: int
    """When Slurm may start the job again; later than its completion, or Slurm would add two minutes."""
    warnings: tuple[str, ...] = ()
    num_nodes: int | None = None
    """How many nodes to ask for instead of what the job was submitted with."""
    held: bool = False
    """Slurm holds the job until somebody releases it."""


def plan_requeue(
    job: Job,
    bad_nodes: Iterable[str],
    partition: Sequence[Node],
    config: SlurmConfig,
    num_nodes: int | None = None,
) -> RequeuePlan:
    """Decide what to exclude, and what else to change.

    Never a node that the job itself requires, and nothing at all if the job could not start then.

    Raises:
        CannotRequeueError: not a batch job, or submitted with ``--no-requeue``.
    """
    if not job.batch:
        raise CannotRequeueError(f"job {job.job_id} is interactive: only batch jobs can be requeued")
    if not job.requeue:
        raise CannotRequeueError(f"job {job.job_id} was submitted with --no-requeue")
    warnings: list[str] = []
    bad = [node for node in dict.fromkeys(bad_nodes) if node not in job.excluded_nodes]
    required = [node for node in bad if node in job.required_nodes]
    if required:
        warnings.append(f"not excluding {compress_hostlist(required)}: the job was submitted with -w for it")
    exclude = (*job.excluded_nodes, *(node for node in bad if node not in job.required_nodes))
    left = [node for node in partition if node.usable and node.name not in exclude]
    needs = num_nodes or job.num_nodes
    if len(left) < needs:
        warnings.append(
            f"excluding nothing more: the job needs {needs} nodes, and without "
            f"{compress_hostlist(bad)} only {len(left)} of partition {job.partition} are usable"
        )
        exclude = job.excluded_nodes
    states = {node.name: node for node in partition}
    silent = [node for node in job.nodes if node in bad and node in states and states[node].usable]
    settle = config.kill_wait_s + 5
    if silent:
        # Completion waits for a dead node until Slurm itself gives it up.
        settle += 2 * config.slurmd_timeout_s
    if config.max_batch_requeue is not None and job.launches >= config.max_batch_requeue:
        warnings.append(
            f"Slurm has had to launch the job {job.launches} times; after MaxBatchRequeue="
            f"{config.max_batch_requeue} failed launches only an administrator can release it"
        )
    return RequeuePlan(
        exclude=exclude,
        start_in_s=settle,
        warnings=tuple(warnings),
        num_nodes=num_nodes,
    )


def _as_it_is(plan: RequeuePlan, job: Job) -> RequeuePlan:
    """Return what is left of ``plan`` where Slurm takes no changes."""
    missed = [node for node in plan.exclude if node not in job.excluded_nodes]
    warning = "Slurm takes no changes of a job that has lost a node, for it has no slurmdbd"
    if missed:
        warning += f": {compress_hostlist(missed)} is kept out only as long as Slurm holds it for down"
    return replace(
        plan,
        exclude=job.excluded_nodes,
        start_in_s=_SLURM_DELAY_S,
        warnings=(*plan.warnings, warning),
        num_nodes=None,
    )


@contextlib.contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """The requeue kills its own caller, and the commands that it runs inherit this."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def requeue(
    client: SlurmClient,
    job_id: str,
    bad_nodes: Iterable[str],
    num_nodes: int | None = None,
    *,
    hold: bool = False,
) -> RequeuePlan:
    """Requeue the job without ``bad_nodes``; return what was done.

    Slurm begins to kill the job, this process included, as soon as the first step is done; the rest takes a
    fraction of a second.

    Args:
        num_nodes: how many nodes to ask for; None: as many as the job was submitted with.
        hold: leave it held until somebody releases it; the plan tells whether it is.

    Raises:
        CannotRequeueError: nothing was done, or a step was refused; the message says how the job stands.
        SlurmUnavailableError: Slurm did not answer at the start; nothing was done.
    """
    bad = tuple(bad_nodes)
    job = client.job(job_id)
    plan = plan_requeue(job, bad, client.partition_nodes(job.partition), client.config(), num_nodes)
    with _deaf_to_sigterm():
        if any(node not in job.nodes for node in bad) and not _takes_changes(client, job_id):
            plan = _as_it_is(plan, job)
            if hold:
                plan = replace(plan, warnings=(*plan.warnings, "not held: it could not be released then"))
            try:
                client.requeue(job_id)
            except SlurmRefusedError as error:
                raise CannotRequeueError(f"Slurm does not requeue job {job_id}: {error}") from error
        else:
            plan = replace(plan, held=hold)
            _requeue_changed(client, job, plan)
    return plan


def _takes_changes(client: SlurmClient, job_id: str) -> bool:
    """Tell whether Slurm would change the job, by a change that changes nothing."""
    try:
        client.update_job(job_id, Requeue="1")
    except (SlurmRefusedError, SlurmUnavailableError):
        return False
    return True


def _requeue_changed(client: SlurmClient, job: Job, plan: RequeuePlan) -> None:
    job_id = job.job_id
    try:
        client.requeue_hold(job_id)
    except SlurmRefusedError as error:
        raise CannotRequeueError(f"Slurm does not requeue job {job_id}: {error}") from error
    try:
        if plan.exclude != job.excluded_nodes:
            client.update_job(job_id, ExcNodeList=compress_hostlist(plan.exclude))
        if plan.num_nodes is not None:
            client.update_job(job_id, NumNodes=str(plan.num_nodes))
        client.update_job(job_id, StartTime=f"now+{plan.start_in_s}")
        seen = client.job(job_id).excluded_nodes
        if set(seen) != set(plan.exclude):
            raise SlurmRefusedError(f"it still excludes {compress_hostlist(seen) or 'nothing'}")
        if not plan.held:
            client.release(job_id)
    except (SlurmRefusedError, SlurmUnavailableError) as error:
        raise CannotRequeueError(
            f"job {job_id} is requeued but held, because a step failed: {error}; "
            f"release it with: scontrol release {job_id}"
        ) from error
