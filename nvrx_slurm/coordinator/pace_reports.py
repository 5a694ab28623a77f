"""The times that nodes tell of their ranks: gathered, judged beside the event loop, recorded, told back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine
from nvrx_slurm.coordinator.slow_ranks import Told, scores_event
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.pace.exchange import Scores, is_period, renumbered
from nvrx_slurm.pace.job import JobPace, Outcome, RankPeriod
from nvrx_slurm.pace.names import HeardNames
from nvrx_slurm.wire import messages as msg

_PATIENCE_S = 5.0
"""For the other nodes after the first has told its ranks' times; a rank that is gone must hold up nobody."""
_MOST_CELLS = 100_000
"""Of scores that are told back, ranks times sections: a message has 4 MiB at the most."""


class PaceReports:
    """One job's. Needs a running event loop.

    Args:
        machine: looked at only: which cycle it is, and who has ranks.
        feed: takes the machine's event.
        send: to a node's agent.
    """

    def __init__(
        self,
        machine: CycleMachine,
        feed: Callable[[steps.Event], None],
        record: Callable[[AnyEvent], None],
        send: Callable[[str, msg.CoordinatorMessage], None],
        tasks: Tasks,
    ) -> None:
        self._machine = machine
        self._feed = feed
        self._record = record
        self._send = send
        self._tasks = tasks
        self._names: dict[str, HeardNames] = {}
        self._waiting: dict[int, RankPeriod] = {}
        self._cycle: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pace = JobPace()
        self._told = Told()
        self._one_at_a_time = asyncio.Lock()

    def take(self, node: str, message: msg.NodePace) -> None:
        """Take what a node tells of its ranks in the running cycle."""
        period, machine = message.period, self._machine
        # Names are told once, even if the periods beside them are of no use any more.
        heard = self._names.setdefault(node, HeardNames())
        heard.take(period.first, period.names)
        if message.cycle != machine.cycle:
            return
        if self._cycle != message.cycle:
            self._cycle = message.cycle
            self._forget()
        ranks = {
            rank: RankPeriod(
                node,
                heard.names,
                renumbered(each, range(len(heard.names))),
                tuple(period.context.get(rank, ())),
            )
            for rank, each in period.ranks.items()
            if machine.has_rank(node, rank) and is_period(each)
        }
        if self._waiting.keys() & ranks.keys():
            # Others are late: two periods of a rank are two reports.
            self._judge_now()
        self._waiting.update(ranks)
        if len(self._waiting) >= machine.world_size:
            self._judge_now()
        elif self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._judge_now)

    def _judge_now(self) -> None:
        ranks, cycle = self._waiting, self._cycle
        self._forget()
        if ranks and cycle is not None:
            self._tasks.spawn_until_end(self._judge(cycle, ranks))

    def _forget(self) -> None:
        self._waiting = {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _judge(self, cycle: int, ranks: Mapping[int, RankPeriod]) -> None:
        async with self._one_at_a_time:
            outcome = await asyncio.get_running_loop().run_in_executor(None, self._pace.judge, ranks)
        if cycle != self._machine.cycle:
            return
        judgement = outcome.judgement
        rank_to_node = {rank: each.node for rank, each in ranks.items()}
        self._record(scores_event(judgement.scores, rank_to_node, self._machine.world_size))
        for event in self._told.news(judgement):
            self._record(event)
        self._tell_back(cycle, ranks, outcome)
        self._feed(steps.RanksJudged(cycle, tuple(judgement.verdicts)))

    def _tell_back(self, cycle: int, ranks: Mapping[int, RankPeriod], outcome: Outcome) -> None:
        first = ranks.get(0)
        if first is not None and first.period.gathers:
            scores = _bounded(outcome.scores)
            self._send(first.node, msg.PaceScores(cycle=cycle, to=[0], scores=scores))
        alone: dict[str, list[int]] = {}
        for rank, each in ranks.items():
            if not each.period.gathers:
                alone.setdefault(each.node, []).append(rank)
        for node, own in alone.items():
            self._send(node, msg.PaceScores(cycle=cycle, to=own, scores=_columns(outcome.scores, own)))


def _bounded(scores: Scores) -> Scores:
    """Return no more sections than a message can hold, the first ones."""
    most = max(1, _MOST_CELLS // max(1, len(scores.ranks)))
    return msgspec.structs.replace(
        scores,
        sections=scores.sections[:most],
        relative=scores.relative[:most],
        individual=scores.individual[:most],
        medians_ms=scores.medians_ms[:most],
    )


def _columns(scores: Scores, ranks: list[int]) -> Scores:
    """Return those of some ranks."""
    wanted = set(ranks)
    places = [place for place, rank in enumerate(scores.ranks) if rank in wanted]

    def of(values: list[float]) -> list[float]:
        return [values[place] for place in places]

    return msgspec.structs.replace(
        scores,
        ranks=[scores.ranks[place] for place in places],
        nodes=[scores.nodes[place] for place in places],
        relative=[of(values) for values in scores.relative],
        individual=[of(values) for values in scores.individual],
        medians_ms=[of(values) for values in scores.medians_ms],
        gpu_relative=of(scores.gpu_relative),
        gpu_individual=of(scores.gpu_individual),
    )
