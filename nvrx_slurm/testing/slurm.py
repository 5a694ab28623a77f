"""A Slurm that is a few Python objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

    def release(self, job_id: str) -> None:
        self._order("release", job_id, {}, state="PENDING")

    def _order(self, order: str, job_id: str, fields: dict[str, str], **changes: object) -> None:
        job = self.job(job_id)
        self.orders.append((order, job_id, fields))
        if order in self.refuses:
            raise SlurmRefusedError(self.refuses[order])
        self.jobs[job_id] = dataclasses.replace(job, **changes)  # type: ignore[arg-type]
