"""What root and Slurm's operators do to nodes and to other users' jobs, through ``scontrol``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.slurm.client import Run, ScontrolClient, parse_fields
from nvrx_slurm.slurm.hostlist import expand_hostlist

ADMIN_TIMEOUT_S = 3.0
"""Of one command in a hook: a hook has half a minute for everything."""
_START_IN_S = 10
"""Later than the end of the job's completion, or Slurm would add two minutes (its credentials' lifetime)."""
_REASON = re.compile(r"\sReason=(.*?) \[([^\s@\]]*)@([^\s\]]*)\]")
_OUT = {"drain", "drained", "draining", "down", "fail", "failing"}


@dataclass(frozen=True)
class NodeRecord:
    """One node, and who has taken it out of service."""

    name: str
    state: str
    """Slurm's long state name in lower case, flags included: ``idle+drain``."""
    reason: str = ""
    """Some releases keep it when the node is back in service."""
    set_by: str = ""
    since: int | None = None
    """When the reason was set, Unix seconds."""
    partitions: tuple[str, ...] = ()

    @property
    def out_of_service(self) -> bool:
        """No job is started on it. A cloud node that is powered down is started for the next job."""
        return not _OUT.isdisjoint(self._words)

    @property
    def drained(self) -> bool:
        """It is drained, or will be when its jobs have ended."""
        return not {"drain", "drained", "draining"}.isdisjoint(self._words)

    @property
    def _words(self) -> list[str]:
        # Some releases mark a node that does not answer, is being powered up, … by a character at the end.
        return [word.rstrip("*~#!%$@^-") for word in self.state.split("+")]


@dataclass(frozen=True)
class ExcludingJob:
    """A job in the queue that leaves nodes out."""

    job_id: str
    user: str
    excluded: tuple[str, ...]
    """Slurm starts it on none of these."""


@dataclass(frozen=True)
class JobOnNode:
    """A job that Slurm still has on a node."""

    job_id: int
    completing: bool
    """Its processes are being ended, or its epilog runs."""


class NodeAdmin(Protocol):
    """What the hooks need of Slurm."""

    def node_records(self) -> list[NodeRecord]:
        """Return every node.

        Raises:
            SlurmUnavailableError
        """
        ...

    def drain(self, node: str, reason: str) -> None:
        """Let no further job start on ``node``.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def resume(self, node: str) -> None:
        """Return ``node`` to service.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def start_elsewhere(self, job_id: str) -> None:
        """Requeue a batch job whose prolog is running.

        Raises:
            SlurmRefusedError, SlurmUnavailableError
        """
        ...

    def jobs_of(self, uid: int, node: str) -> list[JobOnNode]:
        """Return the jobs that a user has on ``node``.

        Raises:
            SlurmUnavailableError
        """
        ...


class ScontrolAdmin(ScontrolClient):
    """:class:`NodeAdmin` over ``scontrol`` and ``squeue``.

    Args:
        environ, run, timeout_s: as of :class:`~nvrx_slurm.slurm.client.ScontrolClient`.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        run: Run | None = None,
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        super().__init__(environ, run, timeout_s=timeout_s)

    def node_records(self) -> list[NodeRecord]:
        return parse_node_records(self._scontrol("show", "nodes"))

    def drain(self, node: str, reason: str) -> None:
        self._order("update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    def resume(self, node: str) -> None:
        self._order("update", f"NodeName={node}", "State=RESUME")

    def start_elsewhere(self, job_id: str) -> None:
        """Requeue without a hold.

        slurmd's own requeue after a failed prolog leaves the job held, and counts towards MaxBatchRequeue;
        when it asks, the job is pending already, and Slurm refuses. A start time in the future, set while the
        job completes, is kept; without one it would wait for two minutes. Found on Slurm 22.05.
        """
        self.requeue(job_id)
        self.update_job(job_id, StartTime=f"now+{_START_IN_S}")

    def jobs_of(self, uid: int, node: str) -> list[JobOnNode]:
        told = self._output(["squeue", "-h", "-w", node, "-u", str(uid), "-o", "%A %T"])
        return [JobOnNode(int(job_id), state == "COMPLETING") for job_id, state in _pairs(told)]

    def excluding_jobs(self) -> list[ExcludingJob]:
        """Return the jobs in the queue that leave nodes out.

        Raises:
            SlurmUnavailableError
        """
        return parse_excluding_jobs(self._output(["squeue", "-h", "-o", "%A|%u|%x"]))


def parse_node_records(text: str) -> list[NodeRecord]:
    """Read ``scontrol -o show nodes`` with ``SLURM_TIME_FORMAT=%s``: one node a line."""
    lines = (line for line in text.splitlines() if line.startswith("NodeName="))
    return [_node_record(line) for line in lines]


def _node_record(line: str) -> NodeRecord:
    found = _REASON.search(line)
    reason, set_by, since = found.groups() if found else ("", "", "")
    # A reason may hold what looks like fields.
    fields = parse_fields(line[: found.start()] if found else line)
    return NodeRecord(
        name=fields["NodeName"],
        state=fields.get("State", "unknown").lower(),
        reason=reason,
        set_by=set_by,
        since=int(since) if since.isascii() and since.isdigit() else None,
        partitions=tuple(name for name in fields.get("Partitions", "").split(",") if name),
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    rows = (line.split() for line in text.splitlines())
    return [(row[0], row[1]) for row in rows if len(row) == 2 and row[0].isdecimal()]


def parse_excluding_jobs(text: str) -> list[ExcludingJob]:
    """Read ``squeue -h -o "%A|%u|%x"``; jobs that leave nothing out are not in it."""
    rows = (line.split("|", 2) for line in text.splitlines())
    return [
        ExcludingJob(row[0], row[1], tuple(expand_hostlist(row[2])))
        for row in rows
        if len(row) == 3 and row[2] not in ("", "(null)")
    ]
