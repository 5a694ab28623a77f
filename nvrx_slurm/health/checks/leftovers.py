"""Processes that should be gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, ok, warn
from nvrx_slurm.health.stage import NODE_STAGES
from nvrx_slurm.health.unavailable import UnavailableError

_SIGNAL = "/proc/<pid>/stat"
_TICKS = 100
_KERNEL_PARENT = 2
_WORDS = {"Z": "zombies", "D": "processes stuck in the kernel"}
_MOST_NAMED = 3


class LeftoversSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    older_than_s: Annotated[float, msgspec.Meta(ge=0, description="younger processes do not count")] = 300.0
    zombies: Annotated[int, msgspec.Meta(ge=0, description="so many zombies are no finding")] = 10


@dataclass(frozen=True)
class Process:
    pid: int
    comm: str
    state: str
    started: float
    """Seconds since boot."""


@check("leftovers", stages=NODE_STAGES, needs=(Need.PROCFS,), settings=LeftoversSettings, lane="host")
def leftovers(node: Node, settings: LeftoversSettings) -> list[CheckResult]:
    """No zombies, and nobody stuck in the kernel.

    Counts processes in state Z and in state D that are older than a few minutes, kernel threads aside. A
    warn: they hold a job's resources, but a node with them is not broken for that.
    """
    now = node.clock.since_boot()
    found = [
        process
        for process in _processes(node)
        if process.state in _WORDS and now - process.started >= settings.older_than_s
    ]
    results = []
    for state, allowed in (("Z", settings.zombies), ("D", 0)):
        there = [process for process in found if process.state == state]
        if len(there) > allowed:
            named = ", ".join(f"{process.comm} ({process.pid})" for process in there[:_MOST_NAMED])
            remedy = (
                "end their parents" if state == "Z" else "look what they wait for: /proc/<pid>/stack; reboot"
            )
            results.append(warn(f"{len(there)} {_WORDS[state]}: {named}", _SIGNAL, remedy=remedy))
    return results or [ok("none", _SIGNAL)]


def _processes(node: Node) -> list[Process]:
    found = []
    for name in node.tree.names("/proc"):
        if not (name.isascii() and name.isdigit()):
            continue
        try:
            process = parse_stat(node.tree.text(f"/proc/{name}/stat"))
        except UnavailableError:
            continue
        if process is not None:
            found.append(process)
    return found


def parse_stat(text: str) -> Process | None:
    """Return the process of ``/proc/<pid>/stat`` (proc_pid_stat(5)); None for kernel threads and nonsense."""
    head, opening, rest = text.partition("(")
    # The name may hold anything, parentheses and white space too.
    comm, closing, tail = rest.rpartition(")")
    words = tail.split()
    if not opening or not closing or len(words) < 20:
        return None
    pid, parent, started = head.strip(), words[1], words[19]
    if not all(word.isascii() and word.isdigit() and len(word) < 21 for word in (pid, parent, started)):
        return None
    if int(parent) == _KERNEL_PARENT or int(pid) == _KERNEL_PARENT:
        return None
    return Process(int(pid), comm[:15], words[0], int(started) / _TICKS)
