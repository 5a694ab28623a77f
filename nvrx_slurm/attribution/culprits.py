"""Which rank, GPU or node is held to be the cause, how sure that is, and whether to exclude a node for it.

A node is excluded only where its name comes from who knows it: its own kernel, Slurm, or the launcher's
table. A name that a program printed is a suspicion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.attribution.evidence import CycleEvidence
from nvrx_slurm.attribution.flight_recorder import CulpritClass, FlightReport, Place, RankCulprit
from nvrx_slurm.attribution.logs.finding import Finding, SourceKind
from nvrx_slurm.attribution.logs.prefix import Claim
from nvrx_slurm.attribution.logs.rules import Exclude
from nvrx_slurm.attribution.primary import Choice, Tier

SUSPICION = 0.3
_NAMED_NODE = re.compile(
    r"(?:node failure on|failure on node|\bon node|\bnodes?:|\bnodes? failed:?) "
    r"{0,2}([A-Za-z][\w-]{0,62}[\w])",
    re.IGNORECASE,
)
_PCI = re.compile(r"\(PCI:([0-9a-fA-F:.]{4,20})\)|\bGPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]{4,12})")
_DEVICE = re.compile(r"\b[Dd]evice:? (\d{1,3})\b")
_BY_TIER = {
    Tier.KERNEL: 0.95,
    Tier.ROOT: 0.85,
    Tier.UNVERIFIED: SUSPICION,
    Tier.SYMPTOM: 0.5,
    Tier.AFTERMATH: 0.4,
    Tier.CANCELLED_STEP: SUSPICION,
    Tier.WRAPPER: 0.2,
    Tier.NOTHING: 0.0,
}
_SLURM_TEXT = 0.7
_EXCLUDING_CLASSES = (CulpritClass.DEVICE_LAG, CulpritClass.HOST_LAG)


class Kind:
    """What a culprit is."""

    NODE = "node"
    GPU = "gpu"
    RANK = "rank"


@dataclass(frozen=True)
class Culprit:
    """One node, GPU or rank held to be the cause."""

    kind: str
    id: str
    confidence: float
    reasons: tuple[str, ...]
    node: str | None = None
    rank: int | None = None
    exclude: Exclude = Exclude.NO
    """What the evidence allows; NO where the node's name is not certain."""
    by_traces: bool = False
    """Flight Recorder traces show it."""
    forgeable: bool = False
    """What implicates it is a text that a program of the job can print."""


def confidence(choice: Choice, missing: int) -> float:
    """Return how sure the primary cause is, between 0 and 1."""
    if choice.primary is None:
        return 0.0
    sure = _BY_TIER[choice.tier]
    if choice.primary.claim is Claim.SLURM and not choice.primary.trusted:
        sure = min(sure, _SLURM_TEXT)
    return round(max(0.05, sure - 0.05 * min(missing, 4)), 2)


def find_culprits(choice: Choice, flight: FlightReport | None, evidence: CycleEvidence) -> list[Culprit]:
    """Return the culprits, the surest first."""
    found: list[Culprit] = []
    if choice.primary is not None:
        found.extend(_of_finding(choice, evidence))
    waits = choice.primary is None or choice.tier in (
        Tier.SYMPTOM,
        Tier.WRAPPER,
        Tier.NOTHING,
        Tier.AFTERMATH,
    )
    if flight is not None and flight.moving and waits:
        # The launcher's word is left: that a rank gave no sign of life, which a slow one does not either.
        found = [replace(c, confidence=min(c.confidence, SUSPICION), exclude=Exclude.NO) for c in found]
    elif flight is not None and waits:
        found = [*_of_flight(flight), *[c for c in found if c.exclude is not Exclude.NO]]
    return sorted(found, key=lambda culprit: -culprit.confidence)


def _of_finding(choice: Choice, evidence: CycleEvidence) -> list[Culprit]:
    finding = choice.primary
    assert finding is not None
    family = finding.family
    sure = _BY_TIER[choice.tier]
    if family.id == "slurm.node_fail" and evidence.lost_nodes:
        return [
            _node(node, sure, "Slurm or the launcher lost it", family.exclude) for node in evidence.lost_nodes
        ]
    place = _place(finding, evidence.places)
    node, exclude = place.node if place else None, family.exclude
    if finding.node_is_certain and finding.node:
        node = finding.node
    elif finding.source.kind is SourceKind.OUTPUT or place is None:
        exclude = Exclude.NO
    named = _NAMED_NODE.search(finding.excerpt) or _named_beside(choice)
    if node is None and named and family.id != "slurm.node_fail_notice":
        node = named.group(1)
        exclude = family.exclude if finding.trusted else Exclude.NO
        sure = sure if finding.trusted else SUSPICION
    if choice.tier is Tier.SYMPTOM and not finding.trusted:
        return []  # whoever reports a time-out only waited
    return _named_parts(finding, node, sure, exclude)


def _named_beside(choice: Choice) -> re.Match[str] | None:
    """Return the node that another trusted line of the same event names: Slurm tells it in several."""
    first = choice.primary
    if first is None or not first.trusted:
        return None
    same = (found for found, _ in choice.secondary if found.trusted and found.family.id == first.family.id)
    return next((named for found in same if (named := _NAMED_NODE.search(found.excerpt))), None)


def _named_parts(finding: Finding, node: str | None, sure: float, exclude: Exclude) -> list[Culprit]:
    reason = f"{finding.family.id} at {finding.source.path.name}:{finding.line}"
    pci, device = _PCI.search(finding.excerpt), _DEVICE.search(finding.excerpt)
    gpu = (pci.group(1) or pci.group(2)) if pci else device.group(1) if device else None
    if finding.rank is not None:
        kind, name, rank = Kind.RANK, str(finding.rank), finding.rank
    elif gpu is not None and finding.family.scope.value == "gpu":
        kind, name, rank = Kind.GPU, gpu, None
    elif node:
        kind, name, rank = Kind.NODE, node, None
    else:
        return []
    forgeable = not finding.trusted
    return [Culprit(kind, name, sure, (reason,), node, rank, exclude, forgeable=forgeable)]


def _node(node: str, sure: float, reason: str, exclude: Exclude) -> Culprit:
    return Culprit(Kind.NODE, node, sure, (reason,), node, None, exclude)


def _place(finding: Finding, places: Mapping[int, Place]) -> Place | None:
    return places.get(finding.rank) if finding.rank is not None else None


def _of_flight(flight: FlightReport) -> list[Culprit]:
    return [
        Culprit(
            Kind.RANK,
            str(found.rank),
            found.confidence,
            _reasons(found),
            found.node,
            found.rank,
            Exclude.REPEAT if found.kind in _EXCLUDING_CLASSES and not found.is_suspicion else Exclude.NO,
            by_traces=not found.is_suspicion,
        )
        for found in flight.culprits
    ]


def _reasons(found: RankCulprit) -> tuple[str, ...]:
    reasons = tuple(
        f"{found.kind.value}: {e.op or 'operation'} {e.sequence} of "
        f"{e.description or e.group or 'the default group'}"
        for e in found.evidence[:2]
    )
    return reasons or (found.kind.value,)


def excluded_nodes(
    culprits: Sequence[Culprit], implicated: Mapping[str, int], implications: int
) -> tuple[str, ...]:
    """Return the nodes to keep out of the next try.

    Args:
        implicated: how often each node was a suspect of earlier attempts.
        implications: how often a node must be one, this attempt included, where once is not enough.
    """
    nodes = []
    for culprit in culprits:
        if culprit.node is None or culprit.node in nodes:
            continue
        times = implicated.get(culprit.node, 0) + 1
        if culprit.exclude is Exclude.YES or (culprit.exclude is Exclude.REPEAT and times >= implications):
            nodes.append(culprit.node)
    return tuple(nodes)
