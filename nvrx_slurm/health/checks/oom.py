"""Memory that ran out."""

from __future__ import annotations

import re

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.unavailable import UnavailableError

_LOG = "/dev/kmsg"
_KILLED = re.compile(r"^(Memory cgroup out|Out) of memory: Killed process (\d+) \(([^)]*)\)")


@check("oom", stages=EVERY_STAGE, needs=(Need.KERNEL_LOG, Need.PROCFS), lane="host")
def oom(node: Node, settings: Settings) -> list[CheckResult]:
    """No process was killed because memory had run out.

    Looks in the kernel log, since the baseline, or without one since the job began; where that can't be read,
    at oom_kill in memory.events of this process's own cgroup. A warn: it is the job's doing more
    often than the node's.
    """
    try:
        records = node.recent_kernel_records()
    except UnavailableError:
        return _own_cgroup(node)
    killed = [found for record in records if (found := _KILLED.match(record.text))]
    if not killed:
        return [ok("nothing in the kernel log", _LOG)]
    last = killed[-1]
    where = "in a cgroup" if last[1].startswith("Memory") else "on the whole node"
    evidence = f"{len(killed)} processes killed for memory, last: {last[3][:15]} ({last[2]}), {where}"
    return [warn(evidence, _LOG, remedy="give the job more memory, or find what used it")]


def _own_cgroup(node: Node) -> list[CheckResult]:
    lines = node.tree.text("/proc/self/cgroup").splitlines()
    unified = next((line[3:] for line in lines if line.startswith("0::")), None)
    if unified is None:
        return [skip("no kernel log to read, and no unified cgroup", "/proc/self/cgroup")]
    path = f"/sys/fs/cgroup{unified.rstrip('/')}/memory.events"
    words = [line.split() for line in node.tree.text(path).splitlines()]
    counts = {pair[0]: pair[1] for pair in words if len(pair) == 2}
    count = counts.get("oom_kill", "")
    if not (count.isascii() and count.isdigit() and len(count) < 20):
        return [skip("tells no oom_kill", path)]
    if int(count):
        return [warn(f"oom_kill {count}", path, remedy="give the job more memory, or find what used it")]
    return [ok("oom_kill 0", path)]
