"""Nodes whose own checks say that they are broken, and whether to believe it.

What fails on most nodes at once is not the nodes: a file server, a switch, a check that is wrong. Leaving
them all out would end the job, and the next one's nodes would say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nvrx_slurm import journal
from nvrx_slurm.wire.messages import HealthFinding, NodeHealth

LOOK_S = 1.0
"""How long the other nodes may take to look at themselves, too, when a cycle is stopped because one is
broken: what breaks all of them must not look like one node's fault."""
YOUNG_S = 5.0
"""A cycle that began so recently, and has not come to a step, is stopped for any failure of a check."""


@dataclass(frozen=True)
class Complaint:
    """The worst that a node's checks say."""

    check: str
    what: str
    """One clause."""
    node_lost: bool
    """No rank of the node can go on."""


def complaint_of(findings: Sequence[HealthFinding]) -> Complaint | None:
    """Return the worst failure; None if there is none. Warnings never count."""
    failures = [finding for finding in findings if finding.failed]
    if not failures:
        return None
    worst = next((finding for finding in failures if finding.node_lost), failures[0])
    scope = "" if worst.scope == "node" else f" {worst.scope}"
    more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
    return Complaint(worst.check, f"{worst.check}{scope}: {worst.evidence}{more}", worst.node_lost)


def health_event(node: str, health: NodeHealth) -> journal.HealthChecked:
    """Return a node's verdict as the journal has it."""
    failed = any(finding.failed for finding in health.findings)
    return journal.HealthChecked(
        node=node,
        status="fail" if failed else "warn" if health.findings else "ok",
        seconds=round(health.seconds, 6),
        findings=[
            journal.HealthFinding(
                check=finding.check,
                scope=finding.scope,
                failed=finding.failed,
                evidence=finding.evidence,
                remedy=finding.remedy,
            )
            for finding in health.findings
        ],
    )


class Unhealthy:
    """What every node has said last, where that is a complaint."""

    def __init__(self) -> None:
        self._complaints: dict[str, Complaint] = {}
        self._told: set[str] = set()

    def note(self, node: str, complaint: Complaint | None) -> None:
        """Take a node's word; None: it has nothing to complain about any more."""
        if complaint is None:
            self._complaints.pop(node, None)
        else:
            self._complaints[node] = complaint

    def complaint_of(self, node: str) -> Complaint | None:
        return self._complaints.get(node)

    def believed(self, nodes: Collection[str]) -> dict[str, str]:
        """Return which of ``nodes`` to leave out, and why: not those whose check fails on most of them."""
        found = {node: self._complaints[node] for node in nodes if node in self._complaints}
        common = self._common(nodes)
        return {node: c.what for node, c in found.items() if c.check not in common}

    def tell_once(self, nodes: Collection[str]) -> list[str]:
        """Return the checks that fail on most of ``nodes``, each in one call only."""
        new = sorted(self._common(nodes) - self._told)
        self._told.update(new)
        return new

    def _common(self, nodes: Collection[str]) -> set[str]:
        counts = Counter(self._complaints[node].check for node in nodes if node in self._complaints)
        return {check for check, count in counts.items() if count > 1 and 2 * count > len(nodes)}
