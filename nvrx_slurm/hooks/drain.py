"""Draining one node for a failure, within what is ours to do."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.health.reasons import reason_for
from nvrx_slurm.health.result import CheckResult
from nvrx_slurm.hooks.brake import our_reason, why_not
from nvrx_slurm.slurm.administration import NodeAdmin, NodeRecord
from nvrx_slurm.slurm.client import SlurmRefusedError, SlurmUnavailableError

SETTLE_S = 1.1
"""Slurm counts in seconds: after that, all nodes that were drained in the same one can be seen."""


class Outcome(enum.Enum):
    """What has become of the node."""

    DRAINED = "drained"
    """By us, now or before."""
    FOREIGN = "foreign"
    """Somebody else has taken it out of service: their reason stays."""
    BRAKED = "braked"
    """Too many are drained for this already: it stays in service."""
    UNKNOWN = "unknown"
    """Slurm could not be asked, or refused: it stays in service."""

    @property
    def out_of_service(self) -> bool:
        return self in (Outcome.DRAINED, Outcome.FOREIGN)


@dataclass(frozen=True)
class Drained:
    outcome: Outcome
    told: str
    """One sentence for the log."""


def drain(
    admin: NodeAdmin,
    node: str,
    failure: CheckResult,
    share: float,
    now: float,
    wait: Callable[[float], None] = time.sleep,
) -> Drained:
    """Drain ``node`` for ``failure``, unless it is out of service, or the brake says no.

    Args:
        share: see :func:`~nvrx_slurm.hooks.brake.why_not`.
        now: Unix seconds.
        wait: for so many seconds, before the brake is asked again.
    """
    try:
        return _drain(admin, node, failure, share, now, wait)
    except SlurmUnavailableError as error:
        # Without Slurm's word there is no brake: what stops one node here might be stopping all of them.
        return Drained(Outcome.UNKNOWN, f"not drained, Slurm could not be asked: {error}")
    except SlurmRefusedError as error:
        return Drained(Outcome.UNKNOWN, f"not drained, Slurm refuses: {error}")


def _drain(
    admin: NodeAdmin,
    node: str,
    failure: CheckResult,
    share: float,
    now: float,
    wait: Callable[[float], None],
) -> Drained:
    nodes = admin.node_records()
    there = _find(nodes, node)
    if there.out_of_service:
        whose = Outcome.DRAINED if our_reason(there) is not None else Outcome.FOREIGN
        return Drained(whose, f"is {there.state} already: {there.reason or 'without a reason'}")
    if why := why_not(node, failure.check, nodes, share):
        return Drained(Outcome.BRAKED, f"NOT drained: {why}")
    reason = str(reason_for(failure, now))
    admin.drain(node, reason)
    wait(SETTLE_S)
    if why := _second_thoughts(admin, node, reason, failure.check, share):
        admin.resume(node)
        return Drained(Outcome.BRAKED, f"NOT drained: {why}")
    return Drained(Outcome.DRAINED, f"drained: {reason}")


def _second_thoughts(admin: NodeAdmin, node: str, reason: str, check: str, share: float) -> str:
    """Return why the node must not stay drained; empty: it may, or somebody else has a reason now."""
    try:
        nodes = admin.node_records()
    except SlurmUnavailableError:
        return ""
    return why_not(node, check, nodes, share) if _find(nodes, node).reason == reason else ""


def _find(nodes: list[NodeRecord], node: str) -> NodeRecord:
    for record in nodes:
        if record.name == node:
            return record
    raise SlurmUnavailableError(f"it does not know node {node}")
