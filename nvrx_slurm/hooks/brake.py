"""How many nodes may be drained for one reason.

What fails on many nodes at once is not the nodes: a file server, a switch, a check that is wrong. Draining
them all would stop a cluster that works, or that one repair would bring back.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.health.reasons import Reason, parse_reason
from nvrx_slurm.slurm.administration import NodeRecord


def why_not(node: str, check: str, nodes: Sequence[NodeRecord], share: float) -> str:
    """Return why ``node`` must not be drained for a failure of ``check``, or not stay so; empty if it may.

    To be asked before, and again a second after it was drained: of many nodes that are drained in the same
    moment each sees the others then, and those that came last give way.

    Args:
        nodes: as Slurm has them now.
        share: of each of the node's partitions, one node at least.
    """
    mine = next((record for record in nodes if record.name == node), None)
    for partition in mine.partitions if mine else ():
        members = [record for record in nodes if partition in record.partitions]
        most = max(1, int(share * len(members)))
        before = [record for record in members if record.name != node and _is_before(record, mine, check)]
        if len(before) >= most:
            return (
                f"{len(before)} of the {len(members)} nodes of partition {partition} are drained for "
                f"{check} already, and {most} may be: more look like the check's fault, or a server's"
            )
    return ""


def _is_before(record: NodeRecord, mine: NodeRecord | None, check: str) -> bool:
    if not _drained_for(record, check):
        return False
    if mine is None or not _drained_for(mine, check):
        return True
    return (record.since or 0, record.name) < (mine.since or 0, mine.name)


def _drained_for(record: NodeRecord, check: str) -> bool:
    reason = our_reason(record)
    return reason is not None and reason.check == check


def our_reason(record: NodeRecord) -> Reason | None:
    """Return why we have drained a node; None: it is not drained, or somebody else has done it."""
    return parse_reason(record.reason) if record.drained else None
