"""How fast each rank of a job was, report by report, as its journal tells it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import msgspec

from nvrx_slurm.journal import (
    CycleStarted,
    JobSlowed,
    NodeExcluded,
    RankScores,
    Record,
    StragglerKept,
    StragglerReport,
)

SCHEMA = "nvrx.stragglers.v1"
SLOW = 0.75
"""Below it a score is a slow rank's."""


@dataclass(frozen=True)
class Placement:
    """Which rank runs where, from one start of the ranks to the next."""

    nodes: tuple[str, ...] = ()
    ranks_per_node: int = 1

    def node_of(self, rank: int) -> str:
        """Return the node of a rank; ``?``: not known."""
        place = rank // self.ranks_per_node
        return self.nodes[place] if 0 <= place < len(self.nodes) else "?"


@dataclass(frozen=True)
class Report:
    """One comparison of all ranks."""

    at: float
    cycle: int
    compared: int
    missing: int
    median: float
    scores: dict[int, tuple[float, str]]
    """Of the ranks that the journal keeps, the worst ones: score, and the section where they are worst."""
    nodes: dict[str, float]
    placement: Placement

    @property
    def has_others(self) -> bool:
        """Ranks were compared of which the journal keeps no score: they are not among the worst."""
        return self.compared > len(self.scores)


@dataclass
class RankHistory:
    """One rank on one node."""

    rank: int
    node: str
    scores: dict[int, float] = field(default_factory=dict)
    """By report, where it was among the worst."""
    fine: int = 0
    """Reports in which others were the worst: there it counts as 1."""
    section: str = ""
    """Where it was worst when it was worst."""
    verdict: StragglerReport | None = None
    """The last that names it."""
    named: int = 0
    """Verdicts."""

    @property
    def worst(self) -> float:
        return min(self.scores.values(), default=1.0)

    @property
    def mean(self) -> float:
        reports = len(self.scores) + self.fine
        return (sum(self.scores.values()) + self.fine) / reports if reports else 1.0


@dataclass(frozen=True)
class Stragglers:
    """What a journal tells of slow ranks."""

    job: str
    reports: tuple[Report, ...]
    ranks: tuple[RankHistory, ...]
    """The worst first."""
    slowed: tuple[tuple[float, JobSlowed], ...]
    kept: tuple[tuple[float, StragglerKept], ...]
    excluded: tuple[tuple[float, str, str], ...]
    """When, which node, and why: those that left for a slow rank."""

    def trend(self, own: RankHistory) -> float:
        """Return the mean score in the last third of a rank's reports, less that in the first."""
        values = [
            own.scores.get(number, 1.0)
            for number, report in enumerate(self.reports)
            if number in own.scores or (report.has_others and report.placement.node_of(own.rank) == own.node)
        ]
        third = len(values) // 3
        return fmean(values[-third:]) - fmean(values[:third]) if third else 0.0

    @property
    def nodes(self) -> dict[str, float]:
        """The mean score of each node's ranks, the worst first; where it is not among the worst, 1."""
        listed: defaultdict[str, list[float]] = defaultdict(list)
        fine: Counter[str] = Counter()
        for report in self.reports:
            for node, score in report.nodes.items():
                listed[node].append(score)
            if report.has_others:
                fine.update(node for node in report.placement.nodes if node not in report.nodes)
        means = {
            node: (sum(scores) + fine[node]) / (len(scores) + fine[node]) for node, scores in listed.items()
        }
        return dict(sorted(means.items(), key=lambda item: (item[1], item[0])))


def build_stragglers(records: Iterable[Record]) -> Stragglers:
    """Return what ``records`` tell, in their order."""
    job, placement = "", Placement()
    reports: list[Report] = []
    ranks: dict[tuple[int, str], RankHistory] = {}
    slowed, kept, excluded = [], [], []

    def history(rank: int, node: str) -> RankHistory:
        return ranks.setdefault((rank, node), RankHistory(rank, node))

    for record in records:
        job = record.job or job
        match record.event:
            case CycleStarted(nodes=nodes, world_size=size):
                placement = Placement(tuple(nodes), max(1, size // max(1, len(nodes))))
            case RankScores() as event:
                report = _report(record, event, placement)
                for rank, (score, section) in report.scores.items():
                    own = history(rank, placement.node_of(rank))
                    if score <= own.worst:
                        own.section = section
                    own.scores[len(reports)] = score
                reports.append(report)
            case StragglerReport() as event:
                own = history(event.rank, event.node)
                own.verdict, own.named = event, own.named + 1
            case JobSlowed() as event:
                slowed.append((record.ts, event))
            case StragglerKept() as event:
                kept.append((record.ts, event))
            case NodeExcluded() as event if " is slow: " in event.reason:
                excluded.append((record.ts, event.node, event.reason))
            case _:
                pass
    _count_fine(ranks.values(), reports)
    order = sorted(ranks.values(), key=lambda own: (own.verdict is None, own.mean, own.rank))
    return Stragglers(job, tuple(reports), tuple(order), tuple(slowed), tuple(kept), tuple(excluded))


def _count_fine(ranks: Iterable[RankHistory], reports: Sequence[Report]) -> None:
    with_others = {number for number, report in enumerate(reports) if report.has_others}
    in_placement = Counter(reports[number].placement for number in with_others)
    for own in ranks:
        there = sum(count for each, count in in_placement.items() if each.node_of(own.rank) == own.node)
        own.fine = there - len(with_others & own.scores.keys())


def _report(record: Record, event: RankScores, placement: Placement) -> Report:
    scores = {
        rank: (score, event.sections[place] if 0 <= place < len(event.sections) else "")
        for rank, score, place in zip(event.ranks, event.scores, event.worst_in, strict=False)
        if rank >= 0 and 0 <= score <= 1
    }
    nodes = {node: score for node, score in event.nodes.items() if 0 <= score <= 1}
    median = min(max(event.median, 0.0), 1.0)
    return Report(record.ts, record.cycle, event.compared, event.missing, median, scores, nodes, placement)


def document(found: Stragglers, top: int) -> dict[str, Any]:
    """Return the JSON document; ``top``: ranks in it, the worst first."""
    return {
        "schema": SCHEMA,
        "job": found.job,
        "reports": [
            {
                "at": round(report.at, 3),
                "cycle": report.cycle,
                "compared": report.compared,
                "missing": report.missing,
                "median": report.median,
            }
            for report in found.reports
        ],
        "ranks": [_rank_document(own, found.trend(own)) for own in found.ranks[:top]],
        "more_ranks": max(0, len(found.ranks) - top),
        "nodes": [{"node": node, "mean": round(mean, 3)} for node, mean in found.nodes.items()],
        "all_slower": [{"at": round(at, 3), **_fields(event)} for at, event in found.slowed],
        "kept": [{"at": round(at, 3), "node": event.node, "why": event.why} for at, event in found.kept],
        "excluded": [{"at": round(at, 3), "node": node, "why": why} for at, node, why in found.excluded],
    }


def _rank_document(own: RankHistory, trend: float) -> dict[str, Any]:
    return {
        "rank": own.rank,
        "node": own.node,
        "mean": round(own.mean, 3),
        "worst": round(own.worst, 3),
        "trend": round(trend, 3),
        "section": own.section,
        "scores": {str(report): score for report, score in own.scores.items()},
        "named": own.named,
        "verdict": None if own.verdict is None else _fields(own.verdict),
    }


def _fields(event: msgspec.Struct) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(event)
    found.pop("event", None)
    return found


def encode(found: Stragglers, top: int) -> bytes:
    """Return the document as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document(found, top)), indent=2) + b"\n"


def buckets(reports: int, columns: int) -> Sequence[range]:
    """Return which reports each of at most ``columns`` columns stands for."""
    count = min(reports, columns)
    return [range(i * reports // count, (i + 1) * reports // count) for i in range(count)]
