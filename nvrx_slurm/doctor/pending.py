"""W2: what Slurm's reasons for a pending job mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nvrx_slurm.doctor.findings import Answer, ok, problem, unknown
from nvrx_slurm.doctor.words import clean, duration, node_list
from nvrx_slurm.slurm import HostlistError, Node, QueuedJob, unavailable_nodes

_SHOWN_STATES = 4
_OWN_REQUEUE_DELAY_S = 120


@dataclass(frozen=True)
class Pending:
    """A pending job, the nodes of its partition (None: unknown), and the time."""

    job: QueuedJob
    nodes: Sequence[Node] | None
    now: float


def explain_reason(pending: Pending) -> Answer | None:
    """Return what the reason means; None when another rule has more to say about it."""
    reason = pending.job.reason
    for beginning, explanation in _EXPLANATIONS:
        if reason.startswith(beginning):
            return explanation(pending)
    if pending.job.held:
        return None
    if not reason:
        return ok("none yet", "the scheduler has not looked at it yet: some seconds")
    return unknown(clean(reason), "", "squeue(1), JOB REASON CODES")


def _expected(pending: Pending) -> str:
    start = pending.job.start_time
    if start is None or start <= pending.now:
        return ""
    return f"; Slurm expects it to start in {duration(round(start - pending.now))}"


def _begin_time(pending: Pending) -> Answer:
    job = pending.job
    when = job.start_time or job.eligible_time
    left = None if when is None else when - pending.now
    said = "now" if left is None or left <= 0 else f"in {duration(round(left))}"
    if job.restarts == 0:
        return ok(f"may start {said}", "it was submitted to begin later (sbatch --begin)")
    why = (
        "it was requeued: Slurm makes such a job wait for 2 minutes"
        if left is None or left <= _OWN_REQUEUE_DELAY_S + 5
        else "it was requeued, with a start time of its own"
    )
    return ok(f"may start {said}", f"{why}. The owner can: scontrol update JobId={job.job_id} StartTime=now")


def _resources(pending: Pending) -> Answer:
    return ok("Resources", f"it is first in line, and its nodes are still in use{_expected(pending)}")


def _priority(pending: Pending) -> Answer:
    why = f"jobs with a higher priority come first{_expected(pending)}. Which: sprio, squeue -P"
    return ok("Priority", why)


def _dependency(pending: Pending) -> Answer:
    return ok("Dependency", f"it waits for other jobs: {clean(pending.job.dependency)}")


def _never(pending: Pending) -> Answer:
    job = pending.job
    why = f"what it waits for has ended otherwise: {clean(job.dependency)}"
    return problem(
        "DependencyNeverSatisfied", why, f"scontrol update JobId={job.job_id} Dependency=, or scancel"
    )


def _nodes_unavailable(pending: Pending) -> Answer:
    """Name the nodes that are missed, with the reasons that administrators and hooks have given."""
    job = pending.job
    try:
        named = set(unavailable_nodes(job.reason))
    except HostlistError:
        named = set()
    if pending.nodes is None:
        return unknown(clean(job.reason), "Slurm could not be asked about the nodes", "sinfo -R")
    broken = [node for node in pending.nodes if not node.usable and (not named or node.name in named)]
    if not broken:
        why = "nodes that it could use are reserved, or needed by jobs with a higher priority"
        return ok(clean(job.reason.partition(",")[0]), f"{why}: scontrol show reservation")
    states = "; ".join(
        f"{clean(node.name)} is {clean(node.state)}: {clean(node.reason)}" for node in broken[:_SHOWN_STATES]
    )
    more = f"; and {len(broken) - _SHOWN_STATES} more (sinfo -R)" if len(broken) > _SHOWN_STATES else ""
    return problem(
        f"not available: {node_list(node.name for node in broken)}",
        states + more,
        "administrators bring nodes back: scontrol update NodeName=… State=RESUME",
    )


def _bad_constraints(pending: Pending) -> Answer:
    job = pending.job
    why = (
        "no set of the partition's nodes fits what it asks for, its exclusions included: Slurm has set its "
        "priority to 0. As soon as the request fits, Slurm takes it up again by itself; release is refused"
    )
    fix = f"the owner can: scontrol update JobId={job.job_id} ExcNodeList= (or ReqNodeList=, NumNodes=…)"
    return problem("BadConstraints", why, fix)


def _partition_limit(pending: Pending) -> Answer:
    job = pending.job
    why = f"partition {clean(job.partition)} does not allow that many nodes, or that long: it never starts"
    fix = f"scontrol update JobId={job.job_id} NumNodes=… (or TimeLimit=…); scontrol show partition"
    return problem(job.reason, why, fix)


def _partition_state(pending: Pending) -> Answer:
    why = f"partition {clean(pending.job.partition)} takes no jobs at present"
    return problem(pending.job.reason, why, "ask the administrators; sinfo")


def _reservation(pending: Pending) -> Answer:
    return ok("Reservation", f"its reservation has not begun, or is full{_expected(pending)}")


def _array_limit(pending: Pending) -> Answer:
    why = "as many elements of its array run as it allows (the number after %)"
    return ok(
        "JobArrayTaskLimit",
        f"{why}: scontrol update JobId={pending.job.job_id.split('_')[0]} ArrayTaskThrottle=…",
    )


def _licenses(pending: Pending) -> Answer:
    return ok("Licenses", "all licenses that it needs are in use")


def _quota(pending: Pending) -> Answer:
    why = "a limit of the account, user or QOS is reached: it waits for jobs within it to end"
    return ok(clean(pending.job.reason), f"{why}{_expected(pending)}; sacctmgr show assoc, sacctmgr show qos")


def _invalid_account(pending: Pending) -> Answer:
    return problem(
        clean(pending.job.reason), "the accounting data base does not allow this", "ask the administrators"
    )


def _prolog(pending: Pending) -> Answer:
    return ok("Prolog", "prologs run on its nodes; the batch script begins after that")


def _cleaning(pending: Pending) -> Answer:
    return ok("Cleaning", "it was requeued, and its last run is still being cleaned up")


def _other_rule(pending: Pending) -> None:
    return None


_EXPLANATIONS: tuple[tuple[str, Callable[[Pending], Answer | None]], ...] = (
    ("BeginTime", _begin_time),
    ("Resources", _resources),
    ("Priority", _priority),
    ("DependencyNeverSatisfied", _never),
    ("Dependency", _dependency),
    ("ReqNodeNotAvail", _nodes_unavailable),
    ("Nodes required for job are DOWN", _nodes_unavailable),
    ("NodeDown", _nodes_unavailable),
    ("BadConstraints", _bad_constraints),
    ("PartitionNodeLimit", _partition_limit),
    ("PartitionTimeLimit", _partition_limit),
    ("PartitionDown", _partition_state),
    ("PartitionInactive", _partition_state),
    ("Reservation", _reservation),
    ("JobArrayTaskLimit", _array_limit),
    ("Licenses", _licenses),
    ("InvalidAccount", _invalid_account),
    ("InvalidQOS", _invalid_account),
    ("QOS", _quota),
    ("Assoc", _quota),
    ("MaxMemPerLimit", _quota),
    ("Prolog", _prolog),
    ("Cleaning", _cleaning),
    # Held: rule W1.
    ("JobHeld", _other_rule),
    ("launch fail", _other_rule),
    ("job requeued in held state", _other_rule),
)
