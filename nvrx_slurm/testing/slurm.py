"""A Slurm that is a few Python objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from nvrx_slurm.slurm import (
    Job,
    Node,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
    UnknownJobError,
    expand_hostlist,
)
from nvrx_slurm.slurm.administration import JobOnNode, NodeRecord


def running_job(job_id: str, nodes: Sequence[str], **fields: object) -> Job:
    """Return a batch job that runs on ``nodes``; ``fields`` replaces what is to be different."""
    job = Job(
        job_id=job_id,
        state="RUNNING",
        nodes=tuple(nodes),
        batch_host=nodes[0] if nodes else None,
        work_dir=Path("/home/user"),
        batch=True,
        requeue=True,
        restarts=0,
        partition="batch",
        num_nodes=len(nodes),
        required_nodes=(),
        excluded_nodes=(),
    )
    return dataclasses.replace(job, **fields)  # type: ignore[arg-type]


class FakeSlurmClient:
    """A :class:`~nvrx_slurm.slurm.SlurmClient` over values that a test sets and looks at.

    Orders are noted in :attr:`orders` as ``(order, job_id, fields)`` and carried out on :attr:`jobs`, unless
    :attr:`refuses` names them. While :attr:`unavailable` is set every question raises it.
    """

    def __init__(self, *jobs: Job, nodes: Sequence[Node] = ()) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        named = dict.fromkeys(name for job in jobs for name in job.nodes)
        self.nodes = list(nodes) or [Node(name, "allocated", "none") for name in named]
        self.addresses: dict[str, str] = {}
        """Where a node's address differs from its name."""
        self.comments: dict[str, str] = {}
        """By job id."""
        self.settings = SlurmConfig(kill_wait_s=30, slurmd_timeout_s=300)
        self.orders: list[tuple[str, str, dict[str, str]]] = []
        self.refuses: dict[str, str] = {}
        """Orders that are refused, and what Slurm says then: ``requeuehold``, ``update``, ``release``."""
        self.unavailable: SlurmUnavailableError | None = None

    def _answer(self) -> None:
        if self.unavailable is not None:
            raise self.unavailable

    def job(self, job_id: str) -> Job:
        self._answer()
        if job_id not in self.jobs:
            raise UnknownJobError(f"Slurm does not know job {job_id}")
        return self.jobs[job_id]

    def node_address(self, node: str) -> str:
        self._answer()
        return self.addresses.get(node, node)

    def node(self, node: str) -> Node:
        self._answer()
        return next((held for held in self.nodes if held.name == node), Node(node, "unknown", ""))

    def partition_nodes(self, partition: str) -> list[Node]:
        self._answer()
        return list(self.nodes)

    def comment(self, job_id: str) -> str:
        self.job(job_id)
        return self.comments.get(job_id, "")

    def config(self) -> SlurmConfig:
        self._answer()
        return self.settings

    def requeue(self, job_id: str) -> None:
        self._order("requeue", job_id, {}, state="PENDING")

    def requeue_hold(self, job_id: str) -> None:
        self._order("requeuehold", job_id, {}, state="REQUEUE_HOLD")

    def update_job(self, job_id: str, **fields: str) -> None:
        changes: dict[str, object] = {}
        if "ExcNodeList" in fields:
            changes["excluded_nodes"] = tuple(expand_hostlist(fields["ExcNodeList"]))
        self._order("update", job_id, fields, **changes)
        if "Comment" in fields:
            self.comments[job_id] = fields["Comment"]

    def release(self, job_id: str) -> None:
        self._order("release", job_id, {}, state="PENDING")

    def _order(self, order: str, job_id: str, fields: dict[str, str], **changes: object) -> None:
        job = self.job(job_id)
        self.orders.append((order, job_id, fields))
        if order in self.refuses:
            raise SlurmRefusedError(self.refuses[order])
        self.jobs[job_id] = dataclasses.replace(job, **changes)  # type: ignore[arg-type]


class FakeNodeAdmin:
    """A :class:`~nvrx_slurm.slurm.administration.NodeAdmin` over values that a test sets and looks at.

    Args:
        nodes: all of partition ``batch``, and idle.
    """

    def __init__(self, *nodes: str, clock: Callable[[], float] = lambda: 1000.0) -> None:
        self.records = {name: NodeRecord(name, "idle", partitions=("batch",)) for name in nodes}
        self.orders: list[tuple[str, str]] = []
        """``drain``, ``resume`` and ``start_elsewhere``, each with its node or job."""
        self.jobs: dict[tuple[int, str], list[JobOnNode]] = {}
        """By user and node."""
        self.refusal: SlurmRefusedError | None = None
        """Of every order."""
        self.unavailable: SlurmUnavailableError | None = None
        """Of every question and order."""
        self.after_drain: Callable[[], None] = lambda: None
        """What others do just after this one has drained its node."""
        self._clock = clock

    def set(self, name: str, state: str, reason: str = "", set_by: str = "root", since: int = 0) -> None:
        self.records[name] = dataclasses.replace(
            self.records[name], state=state, reason=reason, set_by=set_by, since=since
        )

    def node_records(self) -> list[NodeRecord]:
        if self.unavailable is not None:
            raise self.unavailable
        return list(self.records.values())

    def drain(self, node: str, reason: str) -> None:
        self._order("drain", node)
        self.set(node, "idle+drain", reason, since=int(self._clock()))
        self.after_drain()

    def resume(self, node: str) -> None:
        self._order("resume", node)
        # As 25.11 does: the reason stays.
        self.set(node, "idle", self.records[node].reason)

    def start_elsewhere(self, job_id: str) -> None:
        self._order("start_elsewhere", job_id)

    def jobs_of(self, uid: int, node: str) -> list[JobOnNode]:
        if self.unavailable is not None:
            raise self.unavailable
        return self.jobs.get((uid, node), [])

    def _order(self, order: str, of: str) -> None:
        if self.unavailable is not None:
            raise self.unavailable
        if self.refusal is not None:
            raise self.refusal
        self.orders.append((order, of))
