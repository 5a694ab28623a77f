"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.Enum):
    """How one thing stands."""

    OK = "ok"
    WARN = "warn"
    """Something degrades, or could not be read although it should be there. Never drains, never excludes."""
    FAIL = "fail"
    """A positive reading says that jobs fail, hang or go wrong here."""
    SKIP = "skip"
    """There is nothing to check here, or no way to; the evidence says which."""


class Action(enum.Enum):
    """What has to be done to the node or its part before it is of use again."""

    NONE = "none"
    MONITOR = "monitor"
    """Nothing yet; look again."""
    REPAIR = "repair"
    """Something that an administrator can put right on the running node."""
    RESET = "reset"
    """Reset the GPU."""
    REBOOT = "reboot"
    ISOLATE = "isolate"
    """Take the node out and have the part replaced."""


NODE = "node"
"""Scope of what concerns the node as a whole."""


@dataclass(frozen=True)
class CheckResult:
    """One finding: what was read, where, and what to do about it."""

    status: Status
    evidence: str
    """What was read, in one short clause."""
    signal: str = ""
    """Exactly where: a path, an NVML call, a command."""
    scope: str = NODE
    """``node``, or one part of it: ``gpu 3``, ``nic mlx5_0/1``, ``path /scratch``."""
    remedy: str = ""
    """What to do."""
    action: Action = Action.NONE
    node_lost: bool = False
    """No rank of this node can go on: not worth waiting for the job to find out by itself."""
    check: str = ""
    """Name of the check; the runner fills it in."""


def ok(evidence: str, signal: str = "", scope: str = NODE) -> CheckResult:
    return CheckResult(Status.OK, evidence, signal, scope)


def skip(evidence: str, signal: str = "", scope: str = NODE) -> CheckResult:
    return CheckResult(Status.SKIP, evidence, signal, scope)


def warn(evidence: str, signal: str, scope: str = NODE, remedy: str = "") -> CheckResult:
    return CheckResult(Status.WARN, evidence, signal, scope, remedy, Action.MONITOR)


def fail(
    evidence: str,
    signal: str,
    scope: str = NODE,
    *,
    remedy: str,
    action: Action = Action.REPAIR,
    node_lost: bool = False,
) -> CheckResult:
    return CheckResult(Status.FAIL, evidence, signal, scope, remedy, action, node_lost)
