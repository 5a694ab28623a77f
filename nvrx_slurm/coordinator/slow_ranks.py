"""Ranks that are slow for good: what is recorded of them, and whether their nodes leave.

Pure. What a rank says about another is recorded and nothing else; a node leaves only by the times of all
ranks that the Coordinator has compared itself, when it was slow in every one of the last reports.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

import msgspec

from nvrx_slurm import journal
from nvrx_slurm.coordinator.faults import slow_clause
from nvrx_slurm.coordinator.limits import StragglerAction
from nvrx_slurm.journal.events import MOST_RANKS_LISTED
from nvrx_slurm.pace import Judgement, RankScore, SlowDown, StragglerVerdict

_COMMON_CAUSE = 4
"""Where a quarter of the nodes or more, and more than one, are slow, it is not the nodes."""
_MOST_TOLD = 16
"""Verdicts of one report."""


class _Kept(enum.Enum):
    """Why a node stays; each is told of it once, whatever the numbers beside it."""

    WORK = enum.auto()
    COMMON_CAUSE = enum.auto()
    NO_ROOM = enum.auto()


class SlowRanks:
    """Which nodes should leave because a rank of theirs is slow."""

    def __init__(self, action: StragglerAction) -> None:
        self._action = action
        self._leaving: dict[str, StragglerVerdict] = {}
        """By node: where most is lost."""
        self._slow: dict[int, str] = {}
        """The ranks that the last report names, and their nodes."""
        self._left: dict[int, str] = {}
        """The node that has left because of each rank: who is slow elsewhere, too, has more to do."""
        self._told: set[tuple[str, _Kept]] = set()

    def judged(
        self, verdicts: Sequence[StragglerVerdict], nodes: Collection[str]
    ) -> list[journal.StragglerKept]:
        """Take one report on the ranks of ``nodes``; return which nodes stay in spite of it, each once."""
        self._leaving = {}
        if self._action is not StragglerAction.EXCLUDE:
            return []
        present = [verdict for verdict in verdicts if verdict.node in nodes]
        self._slow = {verdict.rank: verdict.node for verdict in present}
        certain: dict[str, StragglerVerdict] = {}
        kept: list[journal.StragglerKept] = []
        for verdict in present:
            if verdict.reports < verdict.of_reports:
                continue
            if (before := self._left.get(verdict.rank, verdict.node)) != verdict.node:
                why = f"rank {verdict.rank} was slow on {before}, too, so the cause is its work, not the node"
                kept += self._tell_once([verdict.node], _Kept.WORK, why)
                continue
            certain.setdefault(verdict.node, verdict)
        slow = set(self._slow.values())
        if certain and len(slow) > 1 and len(slow) * _COMMON_CAUSE >= len(nodes):
            why = f"{len(slow)} of {len(nodes)} nodes are slow at once, so the cause is not the node"
            return kept + self._tell_once(certain, _Kept.COMMON_CAUSE, why)
        self._leaving = certain
        return kept

    @property
    def worst(self) -> StragglerVerdict | None:
        """Of the node that should leave first; None: none should."""
        return max(self._leaving.values(), key=lambda verdict: verdict.lost_ms, default=None)

    def stays(self, why: str) -> list[journal.StragglerKept]:
        """Return of which nodes to tell that they stay until the next restart."""
        return self._tell_once(self._leaving, _Kept.NO_ROOM, why)

    def leave(self, spares: int) -> dict[str, str]:
        """Return the nodes that leave now that all ranks have stopped, and why: as many as have a spare."""
        worst = sorted(self._leaving.values(), key=lambda verdict: -verdict.lost_ms)[: max(0, spares)]
        self._leaving = {}
        left = {verdict.node for verdict in worst}
        self._left |= {rank: node for rank, node in self._slow.items() if node in left}
        return {verdict.node: f"rank {verdict.rank} is slow: {slow_clause(verdict)}" for verdict in worst}

    def _tell_once(self, nodes: Collection[str], kind: _Kept, why: str) -> list[journal.StragglerKept]:
        new = [node for node in nodes if (node, kind) not in self._told]
        self._told.update((node, kind) for node in new)
        return [journal.StragglerKept(node=node, why=why) for node in new]


class Told:
    """Which verdicts and slow-downs are news: each is recorded when it comes, and when it is surer."""

    def __init__(self) -> None:
        self._stragglers: dict[tuple[str, int, str], int] = {}
        self._slow_downs: dict[str, int] = {}

    def news(self, judgement: Judgement) -> list[journal.StragglerReport | journal.JobSlowed]:
        """Take one report; return what of it is to be recorded, the worst first."""
        verdicts = {(verdict.node, verdict.rank, verdict.section): verdict for verdict in judgement.verdicts}
        new = [
            straggler_event(verdict, verdict.node, told_by=None)
            for key, verdict in verdicts.items()
            if verdict.reports > self._stragglers.get(key, 0)
        ]
        slower = [
            _slowed(slow_down)
            for slow_down in judgement.slow_downs
            if slow_down.reports > self._slow_downs.get(slow_down.section, 0)
        ]
        # Who has recovered and is slow again is news again.
        self._stragglers = {
            key: max(verdict.reports, self._stragglers.get(key, 0)) for key, verdict in verdicts.items()
        }
        self._slow_downs = {
            each.section: max(each.reports, self._slow_downs.get(each.section, 0))
            for each in judgement.slow_downs
        }
        return [*new[:_MOST_TOLD], *slower[:_MOST_TOLD]]


def _slowed(slow_down: SlowDown) -> journal.JobSlowed:
    return journal.JobSlowed(
        section=slow_down.section,
        score=round(slow_down.score, 4),
        ranks=slow_down.ranks,
        reports=slow_down.reports,
        of_reports=slow_down.of_reports,
    )


def straggler_event(verdict: StragglerVerdict, node: str, told_by: int | None) -> journal.StragglerReport:
    """Return the verdict as the journal has it; ``told_by``: the rank that says so, None: the Coordinator."""
    values = {name: getattr(verdict, name) for name in verdict.__struct_fields__}
    event = journal.StragglerReport(**values, told_by=told_by)
    return msgspec.structs.replace(
        event, node=node, score=round(verdict.score, 4), lost_ms=round(verdict.lost_ms, 3)
    )


def scores_event(
    scores: Mapping[int, RankScore], rank_to_node: Mapping[int, str], world_size: int
) -> journal.RankScores:
    """Return how the ranks stood, as much of it as the journal keeps."""
    worst = sorted(scores, key=lambda rank: (scores[rank].score, rank))[:MOST_RANKS_LISTED]
    sections = sorted({scores[rank].section for rank in worst})
    place = {section: index for index, section in enumerate(sections)}
    of_nodes: dict[str, list[float]] = {}
    for rank, score in scores.items():
        of_nodes.setdefault(rank_to_node[rank], []).append(score.score)
    means = {node: round(fmean(values), 3) for node, values in of_nodes.items()}
    return journal.RankScores(
        compared=len(scores),
        missing=max(0, world_size - len(scores)),
        median=round(median(score.score for score in scores.values()), 3) if scores else 1.0,
        sections=sections,
        ranks=worst,
        scores=[round(scores[rank].score, 3) for rank in worst],
        worst_in=[place[scores[rank].section] for rank in worst],
        nodes=dict(sorted(means.items(), key=lambda item: (item[1], item[0]))[:MOST_RANKS_LISTED]),
    )
