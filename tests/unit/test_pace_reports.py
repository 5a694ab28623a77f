"""How the Coordinator gathers what nodes tell of their ranks: late ones, others' ranks, restarted agents."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator import pace_reports, steps
from nvrx_slurm.coordinator.pace_reports import PaceReports
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.pace.exchange import Name, NodePeriod, Period, SectionTime
from nvrx_slurm.wire import messages as msg

NODES = {"n1": (0, 1), "n2": (2, 3)}


class Coordinator:
    """Two nodes with two ranks each, in cycle 0."""

    def __init__(self) -> None:
        self.machine: Any = SimpleNamespace(
            cycle=0, world_size=4, has_rank=lambda node, rank: rank in NODES[node]
        )
        self.fed: asyncio.Queue[steps.RanksJudged] = asyncio.Queue()
        self.recorded: list[Any] = []
        self.sent: list[tuple[str, msg.PaceScores]] = []
        self.tasks = Tasks()
        self.reports = PaceReports(
            self.machine,
            self.fed.put_nowait,  # type: ignore[arg-type]
            self.recorded.append,
            lambda node, message: self.sent.append((node, message)),  # type: ignore[arg-type]
            self.tasks,
        )

    def tell(self, node: str, *, ms: float = 1.0, cycle: int = 0, ranks: Any = None, **names: Any) -> None:
        periods = {
            rank: Period(5, [SectionTime(0, ms, 5, None)], [])
            for rank in (NODES[node] if ranks is None else ranks)
        }
        names = names or {"first": 0, "names": [Name("step")]}
        period = NodePeriod(ranks=periods, context={}, **names)
        self.reports.take(node, msg.NodePace(cycle=cycle, period=period))

    async def judged(self) -> journal.RankScores:
        await asyncio.wait_for(self.fed.get(), 30)
        (scores,) = [event for event in self.recorded if isinstance(event, journal.RankScores)]
        self.recorded.clear()
        return scores


def test_it_judges_when_all_have_told_theirs_and_tells_rank_0() -> None:
    async def test() -> None:
        it = Coordinator()
        it.tell("n1")
        assert it.fed.empty()
        it.tell("n2", ms=2.0)
        assert (await it.judged()).compared == 4
        ((node, scores),) = it.sent
        assert (node, scores.to, scores.scores.relative) == ("n1", [0], [[1.0, 1.0, 0.5, 0.5]])
        # From now on numbers only; and an agent that was restarted begins anew.
        it.tell("n1", first=1, names=[])
        it.tell("n2")
        assert (await it.judged()).sections == ["step"]
        await it.tasks.finish(10)
        assert not it.tasks._useless_at_end, "tasks that have ended are not kept"

    asyncio.run(test())


def test_a_node_that_is_late_holds_up_nobody_and_two_periods_of_one_are_two_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        it = Coordinator()
        it.tell("n1")
        it.tell("n1", first=1, names=[])
        assert (await it.judged()).missing == 4, "two ranks alone can't be compared"
        monkeypatch.setattr(pace_reports, "_PATIENCE_S", 0.0)
        it.tell("n2")
        assert (await it.judged()).compared == 4, "with what the other has told since"
        it.tell("n2", first=1, names=[])
        assert (await it.judged()).missing == 4

    asyncio.run(test())


def test_what_is_of_another_cycle_or_of_another_node_is_left_out() -> None:
    async def test() -> None:
        it = Coordinator()
        it.tell("n1", ranks=[2, 3, 99])
        it.tell("n2", cycle=7)
        it.tell("n1", ranks=[0, 1, 2], first=1, names=[])
        # The names of a message that came too late are known all the same.
        it.tell("n2", first=1, names=[])
        scores = await it.judged()
        assert (scores.compared, scores.sections) == (4, ["step"])

    asyncio.run(test())


def test_a_new_cycle_begins_without_what_was_told_in_the_last() -> None:
    async def test() -> None:
        it = Coordinator()
        it.tell("n1", ms=9.0)
        it.machine.cycle = 1
        it.tell("n2", cycle=1)
        it.tell("n1", cycle=1)
        assert (await it.judged()).scores == [1.0] * 4
        assert it.fed.empty()

    asyncio.run(test())


def test_a_report_that_cannot_be_judged_is_the_only_one_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        it = Coordinator()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        with monkeypatch.context() as broken:
            broken.setattr(it.reports._pace, "judge", lambda ranks: 1 / 0)
            it.tell("n1")
            it.tell("n2")
            await it.tasks.finish(10)
        it.tell("n1", first=1, names=[])
        it.tell("n2", first=1, names=[])
        assert (await it.judged()).compared == 4
        await it.tasks.finish(10)

    asyncio.run(test())
