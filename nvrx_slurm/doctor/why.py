"""W: why a job stands as it does, in plain words, and who can do what about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nvrx_slurm.doctor.findings import Answer, Finding, Rules, ok, problem, unknown, warn
from nvrx_slurm.doctor.pending import Pending, explain_reason
from nvrx_slurm.doctor.words import clean, count, duration, node_list
from nvrx_slurm.slurm import (
    DiagnosisClient,
    Node,
    QueuedJob,
    SiteConfig,
    SlurmUnavailableError,
)

Known = TypeVar("Known")
DEFAULT_MAX_BATCH_REQUEUE = 5
_LIMIT_EXCEEDED = "limit exceeded"
_LAUNCH_FAILED = "launch failed"


@dataclass(frozen=True)
class Case:
    """One job, and what its rules look at."""

    job: QueuedJob
    nodes: Sequence[Node] | None
    """Of the job's partition; None: Slurm could not be asked."""
    config: SiteConfig | None
    now: float

    @property
    def max_batch_requeue(self) -> int:
        shown = None if self.config is None else self.config.number("MaxBatchRequeue")
        return DEFAULT_MAX_BATCH_REQUEUE if shown is None else shown


def read_cases(client: DiagnosisClient, job_id: str, now: float) -> list[Case]:
    """Ask Slurm about the job, and once per partition about its nodes.

    Raises:
        SlurmUnavailableError: about the job itself.
        UnknownJobError, HostlistError
    """
    jobs = client.queued_jobs(job_id)
    config = _or_none(client.site_config)
    partitions = {job.partition for job in jobs}
    nodes = {name: _or_none(partial(client.partition_nodes, name)) for name in partitions}
    return [Case(job, nodes[job.partition], config, now) for job in jobs]


def _or_none(ask: Callable[[], Known]) -> Known | None:
    try:
        return ask()
    except SlurmUnavailableError:
        return None


WHY = Rules[Case]()


def explain(case: Case) -> list[Finding]:
    """Return what there is to say, the most important first."""
    return WHY.apply(case)


def headline(case: Case) -> str:
    """Say how the job stands in one sentence."""
    job = case.job
    name = f"job {job.job_id} ({clean(job.name)}, {clean(job.user)})"
    if job.state == "PENDING":
        return f"{name} {'is held' if job.held else 'waits'}: {clean(job.reason) or 'no reason given yet'}"
    if job.state == "RUNNING":
        return f"{name} runs on {count(len(job.nodes), 'node')}: {node_list(job.nodes)}"
    return f"{name}: {job.state.lower().replace('_', ' ')}"


@WHY.rule("W1", "held")
def held(case: Case) -> Answer | None:
    """Who can release it; the reason alone tells, apart from the priority of 0."""
    job = case.job
    if job.state not in ("PENDING", "REQUEUE_HOLD", "REQUEUED", "SPECIAL_EXIT"):
        return None
    reason = job.reason
    lower = reason.lower()
    release = f"the owner can: scontrol release {job.job_id}"
    if _LIMIT_EXCEEDED in lower:
        return problem(
            clean(reason),
            f"Slurm has failed to launch it too often (limit {case.max_batch_requeue}); the owner cannot "
            "release it any more",
            f"an operator can: scontrol release {job.job_id}; or submit it again",
        )
    if _LAUNCH_FAILED in lower:
        return problem(
            clean(reason),
            "a node failed to start it (its prolog failed, most often), so Slurm requeued and held it; the "
            f"node is drained, see: sinfo -R. From failure {case.max_batch_requeue + 1} on, only an operator "
            "can release it",
            release,
        )
    if "JobHeldAdmin" in reason:
        why = "an administrator or operator has held it; the owner cannot release it"
        return problem("JobHeldAdmin", why, f"ask them why; they can: scontrol release {job.job_id}")
    if "requeued in held state" in lower or job.state in ("REQUEUE_HOLD", "SPECIAL_EXIT"):
        why = (
            "it was requeued and held: by scontrol requeuehold (a requeue by nvrx-srun that was interrupted "
            "ends here, too), or because the batch script failed with a code that the site holds for"
        )
        return problem(clean(reason) or job.state, why, release)
    if "JobHeldUser" in reason:
        why = "its owner has held it (scontrol hold, sbatch --hold)"
        return problem("JobHeldUser", why, release)
    if job.held and "BadConstraints" not in reason:
        return problem(
            f"priority 0, {clean(reason) or 'no reason'}", "it has priority 0: it is held", release
        )
    return None


@WHY.rule("W2", "the reason")
def reason(case: Case) -> Answer | None:
    """What Slurm's own word for it means."""
    if case.job.state != "PENDING":
        return None
    return explain_reason(Pending(case.job, case.nodes, case.now))


@WHY.rule("W3", "enough nodes")
def enough_nodes(case: Case) -> Answer | None:
    """Whether the exclusions leave the job what it needs."""
    job = case.job
    if job.state not in ("PENDING", "REQUEUE_HOLD", "REQUEUED"):
        return None
    if case.nodes is None:
        return unknown("Slurm could not be asked about the partition's nodes")
    usable = [node for node in case.nodes if node.usable]
    excluded = [node.name for node in case.nodes if node.name in job.excluded_nodes]
    left = [node for node in usable if node.name not in job.excluded_nodes]
    all_left = len(case.nodes) - len(excluded)
    out = len(usable) - len(left)
    sum_said = (
        f"{len(usable)} usable of {len(case.nodes)} in {clean(job.partition)}"
        f"{f', {out} of them excluded' if out else ''}: {len(left)} left, {job.num_nodes} needed"
    )
    if len(left) >= job.num_nodes:
        return ok(sum_said)
    if excluded and all_left < job.num_nodes:
        keep = len(case.nodes) - job.num_nodes
        why = (
            f"it excludes {node_list(excluded)}; even with every other node back it cannot start"
            if keep >= 0
            else f"the partition has fewer nodes than it needs, {node_list(excluded)} excluded or not"
        )
        fix = (
            f"exclude {count(keep, 'node')} at most: scontrol update JobId={job.job_id} ExcNodeList="
            if keep >= 0
            else f"scontrol update JobId={job.job_id} NumNodes={len(case.nodes)}"
        )
        return problem(sum_said, why, fix)
    why = "it waits until nodes that are down or drained are back, or are excluded no longer"
    if not excluded:
        return problem(sum_said, "it waits until nodes that are down or drained are back", "see: sinfo -R")
    return problem(sum_said, why, f"sinfo -R, or: scontrol update JobId={job.job_id} ExcNodeList=")


@WHY.rule("W4", "required nodes")
def required_nodes(case: Case) -> Iterator[Answer]:
    """Whether what -w asks for can be had."""
    job = case.job
    if job.state != "PENDING" or not job.required_nodes:
        return
    both = set(job.required_nodes) & set(job.excluded_nodes)
    clear = f"the owner can: scontrol update JobId={job.job_id} ReqNodeList="
    if both:
        why = "it requires and excludes the same nodes: it never starts"
        yield problem(node_list(both), why, clear)
    broken = [n for n in case.nodes or () if n.name in job.required_nodes and not n.usable]
    if broken:
        states = ", ".join(f"{clean(n.name)} is {clean(n.state)} ({clean(n.reason)})" for n in broken[:3])
        why = f"it waits for exactly these nodes (-w): {states}"
        yield problem(node_list(n.name for n in broken), why, f"{clear} (only while it is pending)")


@WHY.rule("W5", "launches")
def launches(case: Case) -> Answer | None:
    """Slurm's own counter, one step before it bites."""
    job, limit = case.job, case.max_batch_requeue
    if not job.batch or job.batch_flag <= 1:
        return None
    said = f"BatchFlag {job.batch_flag} of MaxBatchRequeue {limit}, restarted {count(job.restarts, 'time')}"
    if job.batch_flag > limit:
        return problem(said, "the limit is exceeded: only an operator can release it", "submit it again")
    if job.batch_flag == limit:
        why = "one more failed launch, and Slurm holds it so that only an operator can release it"
        return warn(said, why, "find out which node fails to launch it: sinfo -R; exclude it")
    return ok(said)


@WHY.rule("W6", "after a requeue")
def requeued(case: Case) -> Answer | None:
    """How often it has been started, and what it no longer wants."""
    job = case.job
    if job.restarts == 0 or (job.batch and job.batch_flag > 1):
        return None
    excluded = f", now without {node_list(job.excluded_nodes)}" if job.excluded_nodes else ""
    return ok(f"Slurm has requeued it {count(job.restarts, 'time')}{excluded}")


@WHY.rule("W7", "heterogeneous jobs")
def heterogeneous(case: Case) -> Answer | None:
    if not case.job.heterogeneous:
        return None
    why = "losing a node of a heterogeneous job was never tried; nvrx-srun sees the first component only"
    return warn("it is a component of one", why, "submit it with one component")


@WHY.rule("W8", "completing")
def completing(case: Case) -> Answer | None:
    job = case.job
    if job.state != "COMPLETING" and "CONFIGURING" not in job.state:
        return None
    if "CONFIGURING" in job.state:
        return ok("configuring", "its nodes boot, or their prologs run; the batch script begins after that")
    since = "" if job.end_time is None else f" for {duration(max(0.0, round(case.now - job.end_time)))}"
    slow = [n for n in case.nodes or () if n.name in job.nodes and ("comp" in n.state or not n.usable)]
    wait = "Slurm kills its processes (KillWait, then SIGKILL) and runs the epilog"
    dead = [n for n in slow if not n.usable]
    if dead:
        why = f"{wait}; it waits for {node_list(n.name for n in dead)}, silent, until SlurmdTimeout"
        return warn(f"completing{since}", why, "sinfo -R; an administrator can set such a node DOWN")
    on = f" on {node_list(n.name for n in slow)}" if slow else ""
    return ok(f"completing{since}{on}", wait)


@WHY.rule("W9", "running")
def running(case: Case) -> Answer | None:
    job = case.job
    if job.state != "RUNNING":
        return None
    if job.held:
        why = "it runs on, but will be held when it is requeued"
        return warn("held for the next time", why, f"scontrol release {job.job_id}")
    if not job.batch:
        return ok("interactive", "it cannot be requeued")
    if not job.requeue:
        why = "if it loses too many nodes it is over"
        return warn("--no-requeue", why, f"the owner can: scontrol update JobId={job.job_id} Requeue=1")
    return ok("may be requeued")


# What a job's end says: its state, what it means, and what to do.
_ENDS: dict[str, tuple[str, str]] = {
    "BOOT_FAIL": ("its nodes did not boot", "submit it again; sinfo -R"),
    "CANCELLED": ("somebody cancelled it", "submit it again"),
    "DEADLINE": ("it could not have ended before its --deadline", "submit it with a later one"),
    "NODE_FAIL": ("a node died, and the job did not survive that", "sbatch --no-kill --requeue"),
    "OUT_OF_MEMORY": ("it used more memory than it had asked for", "ask for more: --mem"),
    "PREEMPTED": (
        "it was preempted, and the site cancels preempted jobs or it may not be requeued",
        "submit it again with --requeue; nvrx-doctor check shows PreemptMode",
    ),
    "TIMEOUT": (
        "its time limit was over",
        "sbatch --signal=B:USR2@120 lets it save first; ask for more --time",
    ),
}
_CODES: dict[int, str] = {
    1: "training failed, and nvrx-srun's restarts were used up",
    2: "nvrx-srun refused its options; see the job's output file",
    93: "it made no progress, and a restart would not change that; see nvrx-report and its output file",
    75: "it should be started again, elsewhere or later, and could not be requeued; see its output file",
}


@WHY.rule("W10", "the end")
def ended(case: Case) -> Answer | None:
    job = case.job
    if job.state == "COMPLETED":
        return ok("exit code 0")
    if job.state == "FAILED":
        return _failed(job)
    if job.state not in _ENDS:
        return None
    why, fix = _ENDS[job.state]
    return problem(job.state, why, fix)


def _failed(job: QueuedJob) -> Answer:
    if "BadConstraints" in job.reason:
        why = "no set of the partition's nodes fits what it asks for, its exclusions included"
        return problem("BadConstraints", why, "sbatch --test-only FILE tells without submitting")
    if job.exit_signal:
        why = f"its batch script was killed by signal {job.exit_signal}"
        return problem(f"signal {job.exit_signal}", why, f"nvrx-report {job.job_id}")
    if job.exit_code > 128:
        why = f"it was stopped by signal {job.exit_code - 128}"
        return problem(f"exit code {job.exit_code}", why, f"nvrx-report {job.job_id}")
    why = _CODES.get(job.exit_code, "its batch script failed")
    if job.exit_code != 75:
        fix = f"nvrx-report {job.job_id}"
    elif job.batch and job.requeue:
        fix = f"scontrol requeue {job.job_id}"
    else:
        fix = "submit it again, with --requeue: Slurm does not requeue this one"
    return problem(f"exit code {job.exit_code}", why, fix)


_JOB_ID = re.compile(r"\d+([_+]\d+)?")


def is_job_id(text: str) -> bool:
    """Tell whether ``text`` is a job id: ``41``, an array's ``41_2``, a heterogeneous job's ``41+1``."""
    return _JOB_ID.fullmatch(text) is not None
