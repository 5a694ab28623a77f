"""Requeue this process's own batch job with nodes left out, without an administrator.

Slurm's own requeue makes a job wait for two minutes and excludes nothing. Holding it while it is requeued
leaves no race with the scheduler; the exclusion and a start time just after the job's completion are set
meanwhile, and each step is read back. Found on Slurm 22.05; the steps are the same on later releases.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nvrx_slurm.slurm.client import (
    Job,
    Node,
    SlurmClient,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
)
from nvrx_slurm.slurm.hostlist import compress_hostlist


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


def plan_requeue(
    job: Job, bad_nodes: Iterable[str], partition: Sequence[Node], config: SlurmConfig
) -> RequeuePlan:
    """Decide what to exclude.

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
    if len(left) < job.num_nodes:
        warnings.append(
            f"excluding nothing more: the job needs {job.num_nodes} nodes, and without "
            f"{compress_hostlist(bad)} only {len(left)} of partition {job.partition} are usable"
        )
        exclude = job.excluded_nodes
    states = {node.name: node for node in partition}
    silent = [node for node in job.nodes if node in bad and node in states and states[node].usable]
    settle = config.kill_wait_s + 5
    if silent:
        # Completion waits for a dead node until Slurm itself gives it up.
        settle += 2 * config.slurmd_timeout_s
    return RequeuePlan(exclude=exclude, start_in_s=settle, warnings=tuple(warnings))


@contextlib.contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """The requeue kills its own caller, and the commands that it runs inherit this."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def requeue(client: SlurmClient, job_id: str, bad_nodes: Iterable[str]) -> RequeuePlan:
    """Requeue the job without ``bad_nodes``; return what was done.

    Slurm begins to kill the job, this process included, as soon as the first step is done; the rest takes a
    fraction of a second.

    Raises:
        CannotRequeueError: nothing was done, or a step was refused; the message says how the job stands.
        SlurmUnavailableError: Slurm did not answer at the start; nothing was done.
    """
    job = client.job(job_id)
    plan = plan_requeue(job, bad_nodes, client.partition_nodes(job.partition), client.config())
    with _deaf_to_sigterm():
        try:
            client.requeue_hold(job_id)
        except SlurmRefusedError as error:
            raise CannotRequeueError(f"Slurm does not requeue job {job_id}: {error}") from error
        try:
            if plan.exclude != job.excluded_nodes:
                client.update_job(job_id, ExcNodeList=compress_hostlist(plan.exclude))
            client.update_job(job_id, StartTime=f"now+{plan.start_in_s}")
            seen = client.job(job_id).excluded_nodes
            if set(seen) != set(plan.exclude):
                raise SlurmRefusedError(f"it still excludes {compress_hostlist(seen) or 'nothing'}")
            client.release(job_id)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            raise CannotRequeueError(
                f"job {job_id} is requeued but held, because a step failed: {error}; "
                f"release it with: scontrol release {job_id}"
            ) from error
    return plan
