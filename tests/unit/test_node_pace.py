"""How an agent gathers its ranks' times: one message, names once, and nobody waits for a rank for long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nvrx_slurm.agent import node_pace
from nvrx_slurm.agent.node_pace import NodePace
from nvrx_slurm.pace.exchange import Name, NodePeriod, Period, Scores, SectionTime
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.rank_channel import PaceNames, PacePeriod, pace_path


class Node:
    """An agent's part, with two ranks from number 4 on."""

    def __init__(self, tmp_path: Path) -> None:
        self.said: asyncio.Queue[msg.AgentMessage] = asyncio.Queue()
        self.cycle: Any = SimpleNamespace(
            cycle=0,
            ranks=[4, 5],
            alive={4, 5},
            page_paths={rank: tmp_path / f"cycle0-rank{rank}.page" for rank in (4, 5)},
        )
        self.pace = NodePace(self.said.put_nowait, self.context)

    async def context(self, local_ranks: Sequence[int]) -> dict[int, list[str]]:
        return {local_rank: [f"gpu {local_rank}"] for local_rank in local_ranks}

    def tell(self, rank: int, *sections: str, first: int = 0, ms: float = 1.0) -> None:
        cycle = self.cycle.cycle
        if sections:
            self.pace.take(
                self.cycle,
                PaceNames(rank=rank, cycle=cycle, first=first, names=[Name(name) for name in sections]),
            )
        self.pace.take(
            self.cycle,
            PacePeriod(rank=rank, cycle=cycle, period=Period(5, [SectionTime(0, ms, 5, 1.0)], [])),
        )

    async def heard(self) -> NodePeriod:
        message = await asyncio.wait_for(self.said.get(), 30)
        assert isinstance(message, msg.NodePace)
        return message.period


def test_one_message_has_all_ranks_and_names_are_told_once(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.tell(4, "load", "step")
        assert node.said.empty(), "the other rank is to come"
        node.tell(5, "step")
        first = await node.heard()
        assert (first.first, first.names) == (0, [Name("load"), Name("step")])
        assert {rank: each.sections[0].number for rank, each in first.ranks.items()} == {4: 0, 5: 1}
        assert first.context == {4: ["gpu 0"], 5: ["gpu 1"]}
        node.tell(4)
        node.tell(5)
        again = await node.heard()
        assert (again.first, again.names, set(again.ranks)) == (2, [], {4, 5})

    asyncio.run(test())


def test_a_rank_that_is_late_or_dead_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_pace, "_PATIENCE_S", 0.01)

    async def test() -> None:
        node = Node(tmp_path)
        node.tell(4, "step")
        assert set((await node.heard()).ranks) == {4}
        node.cycle.alive.discard(5)
        node.tell(4)
        assert set((await node.heard()).ranks) == {4}

    asyncio.run(test())


def test_two_periods_of_a_rank_are_two_messages(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.tell(4, "step", ms=1.0)
        node.tell(4, ms=2.0)
        assert (await node.heard()).ranks[4].sections[0].median_ms == 1.0
        node.tell(5, "step")
        assert set((await node.heard()).ranks) == {4, 5}

    asyncio.run(test())


def test_a_new_cycle_begins_with_new_processes_whose_names_have_new_numbers(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.tell(4, "load", "step")
        node.cycle.cycle = 1
        node.tell(4, "step")
        node.tell(5, "step")
        heard = await node.heard()
        assert heard.names == [Name("load"), Name("step")], "the node's numbers stay"
        assert {rank: each.sections[0].number for rank, each in heard.ranks.items()} == {4: 1, 5: 1}

    asyncio.run(test())


def test_times_without_names_are_left_out(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        node.tell(4)
        node.tell(5, "step", first=7)
        assert all(not each.sections for each in (await node.heard()).ranks.values())

    asyncio.run(test())


def test_scores_are_put_where_the_rank_looks(tmp_path: Path) -> None:
    async def test() -> None:
        node = Node(tmp_path)
        scores = Scores(1, [4], ["n1"], ["step"], [[1.0]], [[1.0]], [[9.0]], [1.0], [1.0])
        for _ in range(2):
            node.pace.give(node.cycle, msg.PaceScores(cycle=0, to=[4, 99], scores=scores))
        path = pace_path(node.cycle.page_paths[4])
        assert msgspec.msgpack.decode(path.read_bytes(), type=Scores) == scores
        assert path.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in tmp_path.iterdir()] == [path.name]

    asyncio.run(test())
