"""The arithmetic of the in-process benchmark: from what ranks wrote down to seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bench.inprocess import plans
from bench.inprocess.plans import Case, Marks, Plan


def rank(number: int, *marks: tuple[Any, ...]) -> Marks:
    lines = [{"mark": what, "t": t, **({"iteration": rest[0]} if rest else {})} for what, t, *rest in marks]
    return Marks(number, tuple(lines))


def test_a_recovery_ends_when_the_slowest_of_the_others_is_back() -> None:
    plan = Plan("exception", victim=1, faults=2)
    ranks = [
        rank(0, ("enter", 1.0, 0), ("enter", 2.5, 1), ("enter", 4.25, 2)),
        rank(1, ("enter", 1.0, 0), ("fault", 2.0, 0), ("enter", 9.0, 1), ("fault", 4.0, 1)),
        rank(2, ("enter", 1.0, 0), ("enter", 2.25, 1)),
    ]
    assert plans.recoveries(plan, ranks) == [0.5]
    assert not plans.victim_survived(plan, ranks)
    assert plans.victim_survived(Plan("exception", faults=1), ranks)


def test_the_time_out_of_a_hang_is_not_counted() -> None:
    ranks = [rank(0, ("enter", 4.5, 1)), rank(1, ("fault", 1.0, 0))]
    assert plans.recoveries(Plan("livelock", soft_s=3.0), ranks) == [0.5]


def test_begin_and_end_are_those_of_the_slowest_rank() -> None:
    ranks = [
        rank(n, ("call", 1.0 + n), ("enter", 5.0, 0), ("return", 8.0), ("end", 8.0 + n / 4))
        for n in range(plans.RANKS)
    ]
    assert plans.begin_and_end(ranks) == (1.0, 0.75)
    assert plans.begin_and_end(ranks[1:]) is None
    assert plans.begin_and_end([*ranks[1:], rank(0, ("call", 1.0))]) is None


def test_a_line_that_is_cut_short_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "rank3.jsonl").write_text('{"mark": "call", "t": 1.0}\n{"mark": "en')
    (found,) = plans.read_marks(tmp_path)
    assert (found.rank, found.times("call")) == (3, [1.0])


@pytest.mark.parametrize("case", list(Case))
def test_every_case_is_a_plan_that_its_ranks_can_read(case: Case) -> None:
    assert json.loads(case.plan.to_json())["fault"] == case.plan.fault
    assert case.plan.hard_s >= case.plan.soft_s
