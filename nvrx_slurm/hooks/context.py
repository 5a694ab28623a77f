"""What slurmd tells a hook, checked once more: a hook is root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nvrx_slurm.health.node import JobContext
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.slurm.accusation import parse_accusation

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_JOB = re.compile(r"[0-9]{1,10}")


class ContextError(ValueError):
    """This is no environment of a hook; the message says what is missing."""


@dataclass(frozen=True)
class HookContext:
    """For whom, and where, a hook runs."""

    node: str
    """As Slurm calls it."""
    job: JobContext
    accusation: str = ""
    """Why the job holds this node to be bad: the user's words. Empty: it does not."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], notes: str, stage: Stage) -> HookContext:
        """Read the environment, and ``notes``: the job's Comment and Extra, with a NUL between them.

        They count after a job only: before it, there is nothing that it could have seen.

        Raises:
            ContextError: a name that is needed is missing, or is none.
        """
        node, job_id = environ.get("SLURMD_NODENAME", ""), environ.get("SLURM_JOB_ID", "")
        if not _NODE.fullmatch(node):
            raise ContextError(f"SLURMD_NODENAME={node[:80]!r} is no node's name: slurmd sets it")
        if stage is not Stage.PERIODIC and not _JOB.fullmatch(job_id):
            raise ContextError(f"SLURM_JOB_ID={job_id[:80]!r} is no job's id: slurmd sets it")
        accusations = [parse_accusation(note) for note in notes.split("\0") if stage is Stage.EPILOG]
        against = [
            said.bad[node]
            for said in accusations
            if node in said.bad and said.run in _runs(environ.get("SLURM_JOB_RESTART_COUNT", ""), said.run)
        ]
        job = replace(JobContext.from_environ(environ), accused=bool(against))
        return cls(node, job, against[0] if against else "")


def _runs(count: str, default: int) -> tuple[int, ...]:
    """Return the runs of a job that an epilog may be of; those before have had their own epilog.

    Where the job is being requeued, Slurm has counted the next run already.
    """
    if not _JOB.fullmatch(count):
        return (default,)
    return (int(count), int(count) - 1)
