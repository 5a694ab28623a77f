"""The soak's plan and its audit: what it would complain about."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from report_journals import Writer, three_faults

from nvrx_slurm.journal import FaultKind, JobEnded, Record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import soak  # noqa: E402
from bench.soak import audit, plan  # noqa: E402
from bench.soak.audit import Census  # noqa: E402
from bench.soak.plan import Kind  # noqa: E402

WORLD = 8
KINDS = tuple(Kind)


@given(st.integers(), st.integers(1, 200), st.sets(st.sampled_from(KINDS), min_size=1), st.integers(0, 3))
def test_a_plan_is_its_seed_alone_and_goes_forward(
    seed: int, faults: int, kinds: set[Kind], losses: int
) -> None:
    chosen = tuple(sorted(kinds))
    strikes = plan.draw(seed, faults, WORLD, chosen, losses)
    assert strikes == plan.draw(seed, faults, WORLD, chosen, losses)
    assert len(strikes) == faults or chosen == (Kind.NODE_LOST,)
    assert [s.kind for s in strikes].count(Kind.NODE_LOST) <= losses
    assert all(0 <= s.rank < WORLD for s in strikes)
    steps = [s.step for s in strikes]
    assert steps == sorted(steps)
    assert plan.steps_needed(strikes) > max(steps, default=0)


def test_kinds_come_about_equally_often_but_no_node_loses_its_agent_three_times() -> None:
    strikes = plan.draw(1, 100, WORLD, KINDS, losses=2)
    drawn = [strike.kind for strike in strikes]
    counts = [drawn.count(kind) for kind in Kind if kind is not Kind.NODE_LOST and not kind.costs_agent]
    assert drawn.count(Kind.NODE_LOST) == 2
    assert max(counts) - min(counts) <= 1
    victims = [strike.rank for strike in strikes if strike.kind.costs_agent]
    assert len(victims) == len(set(victims)) == WORLD


def test_every_kind_has_something_to_be_blamed_for() -> None:
    assert all(kind.blamed for kind in Kind)
    assert frozenset({FaultKind.NODE_LOST}) == Kind.NODE_LOST.blamed


# --- journal -----------------------------------------------------------------------------------------


def test_a_journal_in_order_gives_no_complaint() -> None:
    assert list(audit.journal_order(three_faults())) == []


def _swap(records: list[Record], one: int, other: int) -> list[Record]:
    swapped = list(records)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


def _without(records: list[Record], name: str) -> list[Record]:
    return [record for record in records if type(record.event).__name__ != name]


def _twice(records: list[Record], name: str) -> list[Record]:
    place = next(n for n, record in enumerate(records) if type(record.event).__name__ == name)
    return [*records[: place + 1], *records[place:]]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda r: _swap(r, 3, -3), "time goes back"),
        (lambda r: r[1:], "first event is not job_started"),
        (lambda r: _without(r, "JobEnded"), "job_ended is not the last event"),
        (lambda r: [*r, r[-1]], "not the only one"),
        (lambda r: _without(r, "CycleStarted"), "never started"),
        (lambda r: _twice(r, "Verdict"), "has 2 times Verdict"),
        (lambda r: _twice(r, "FirstStep"), "has 2 times FirstStep"),
        (lambda r: _without(r, "WorkersStopped"), "a verdict without"),
    ],
)
def test_a_journal_out_of_order_is_complained_about(
    damage: Callable[[list[Record]], list[Record]], complaint: str
) -> None:
    found = list(audit.journal_order(damage(list(three_faults()))))
    assert any(complaint in line for line in found), found


def test_an_empty_journal_is_complained_about() -> None:
    assert list(audit.journal_order([])) != []
    lonely = Writer()
    lonely.at(0, JobEnded(code=0, why=""))
    assert "the first event is not job_started" in list(audit.journal_order(lonely.records))


# --- losses ------------------------------------------------------------------------------------------

CURVE = {1: 4.0, 2: 3.5, 3: 3.25}


def test_steps_done_again_alike_are_fine() -> None:
    assert list(audit.losses(CURVE, [(1, 4.0), (2, 3.5), (2, 3.5), (3, 3.25)])) == []


@pytest.mark.parametrize(
    "seen",
    [
        [(1, 4.0), (2, 3.5)],
        [(1, 4.0), (2, 3.5), (3, 3.25000001)],
        [(1, 4.0), (2, 3.5), (2, 3.4), (3, 3.25)],
        [(1, 4.0), (2, 3.5), (3, 3.25), (4, 3.0)],
    ],
)
def test_any_other_curve_is_complained_about(seen: list[tuple[int, float]]) -> None:
    assert list(audit.losses(CURVE, seen)) != []


# --- growth ------------------------------------------------------------------------------------------


def _census(files: int = 20, mib: float = 50.0, ranks: int = WORLD, strays: tuple[str, ...] = ()) -> Census:
    return Census(ranks, strays, {"nvrx-srun": files}, {"nvrx-srun": mib})


def test_a_job_that_stays_as_it_is_gives_no_complaint() -> None:
    assert list(audit.growth([_census()] * 10, WORLD)) == []


@pytest.mark.parametrize(
    ("censuses", "complaint"),
    [
        ([_census(files=20 + 3 * n) for n in range(12)], "open files"),
        ([_census(mib=50.0 + 5 * n) for n in range(12)], "MiB resident"),
        ([_census(), _census(ranks=9)], "9 ranks instead of 8 after fault 2"),
        ([_census(strays=("sleep",))], "strays after fault 1: sleep"),
    ],
)
def test_what_grows_is_complained_about(censuses: list[Census], complaint: str) -> None:
    assert any(complaint in line for line in audit.growth(censuses, WORLD))


def test_an_unknown_kind_of_fault_is_refused() -> None:
    run = CliRunner().invoke(soak.main, ["--kinds", "rank_sigkill,flood"])
    assert run.exit_code == 2
    assert "there is no kind 'flood'" in run.output
    assert "rank_sigkill" in run.output
