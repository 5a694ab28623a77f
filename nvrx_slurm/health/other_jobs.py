"""Does another job use this node now? What it does there is no fault of the node's."""

from __future__ import annotations

import re

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError


def another_job_runs(node: Node) -> bool:
    """Tell whether a step of another job than the node's own runs here: a slurmstepd, which is root's.

    Inside a job it is the job itself that asks, and the answer is no.
    """
    if node.stage is Stage.RESTART:
        return False
    mine = re.compile(rf"slurmstepd: \[{node.job.job_id or 'none'}\.")
    return any(_is_step(node, pid, mine) for pid in node.tree.names("/proc") if pid.isdecimal())


def _is_step(node: Node, pid: str, mine: re.Pattern[str]) -> bool:
    try:
        status = node.tree.text(f"/proc/{pid}/status")
        step = status.startswith("Name:\tslurmstepd\n") and "\nUid:\t0\t" in status
        return step and not mine.match(node.tree.text(f"/proc/{pid}/cmdline"))
    except UnavailableError:
        return False
