"""Which other jobs use this node now? What they do is no fault of the node's."""

from __future__ import annotations

import re

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError

# A step's title; `slurmstepd infinity`, which is always there with control groups of version 2, has none.
_STEP = re.compile(r"slurmstepd: \[(\d+)[.+]")
_PARENT = re.compile(r"^PPid:\t(\d{1,10})$", re.M)
_MOST_PARENTS = 64
_CGROUP = re.compile(r"/job_(\d+)(?:/|$)", re.M)


def other_jobs(node: Node) -> set[str]:
    """Return the ids of the jobs that have steps here, the node's own aside.

    Inside a job it is the job itself that asks, and the answer is none.
    """
    if node.stage is Stage.RESTART:
        return set()
    found = {_step_of(node, pid) for pid in node.tree.names("/proc") if pid.isdecimal()}
    return found - {"", node.job.job_id}


def _step_of(node: Node, pid: str) -> str:
    try:
        status = node.tree.text(f"/proc/{pid}/status")
        # Any process may call itself so, but the real one is root's.
        if not (status.startswith("Name:\tslurmstepd\n") and "\nUid:\t0\t" in status):
            return ""
        title = _STEP.match(node.tree.text(f"/proc/{pid}/cmdline"))
    except UnavailableError:
        return ""
    return title[1] if title else ""


def job_of(node: Node, pid: int) -> str:
    """Return the id of the job whose process this is; empty: of none.

    Its control group tells, or its parents where Slurm makes none.
    """
    try:
        if found := _CGROUP.search(node.tree.text(f"/proc/{pid}/cgroup")):
            return found[1]
        for _ in range(_MOST_PARENTS):
            if job := _step_of(node, str(pid)):
                return job
            parent = _PARENT.search(node.tree.text(f"/proc/{pid}/status"))
            pid = int(parent[1]) if parent else 0
    except UnavailableError:
        pass
    return ""
