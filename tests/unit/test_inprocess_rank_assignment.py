"""Rank assignment: the numbers after faults, and that every rank comes to the same ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.inprocess import Compose, Mode, State
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    ActiveWorldSizeDivisibleBy,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    MaxActiveWorldSize,
    RankAssignment,
    RankAssignmentCtx,
    RankDiscarded,
    ShiftRanks,
    Tree,
    WholeNodes,
)
from nvrx_slurm.inprocess.rank_assignment.tree_plan import Plan

RESERVE, BACKFILL = LayerFlag.RESERVE, LayerFlag.BACKFILL
BOTH = RESERVE | BACKFILL
BOUND = timedelta(seconds=60)


class Store:
    """Shared by threads that stand for ranks."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()

    def set(self, key: str, value: str | bytes) -> None:
        with self.changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, BOUND.total_seconds())
            return self.values[key]

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            value = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(value).encode()
            self.changed.notify_all()
            return value

    def append(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = self.values.get(key, b"") + value.encode()
            self.changed.notify_all()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def barrier(self, group_name: str, rendezvous_count: int, timeout: timedelta) -> None:
        self.add(group_name, 1)
        with self.changed:
            assert self.changed.wait_for(
                lambda: int(self.values[group_name]) >= rendezvous_count, timeout.total_seconds()
            )


class Job:
    """Ranks of a job, each with its state and its rank assignment; they are threads while they assign."""

    def __init__(self, size: int, make: Callable[[int], RankAssignment]) -> None:
        self.states = {rank: State(rank, size) for rank in range(size)}
        self.assignments = {rank: make(rank) for rank in range(size)}

    def assign(self, dead: Sequence[int] = (), joined: frozenset[int] = frozenset()) -> None:
        """Give new numbers after ``dead`` ranks, in the numbering that they have, are gone."""
        store = Store()

        def one(initial: int) -> bool:
            ctx = RankAssignmentCtx(self.states[initial], store, set(dead), joined)
            try:
                self.assignments[initial](ctx)
            except RankDiscarded:
                return False
            return True

        alive = [initial for initial, state in self.states.items() if state.rank not in dead]
        with ThreadPoolExecutor(len(self.states)) as pool:
            stays = dict(zip(alive, pool.map(one, alive), strict=True))
        self.states = {initial: self.states[initial] for initial in alive if stays[initial]}

    def active(self, size: int) -> list[int | None]:
        """Return active ranks by initial rank."""
        return [self.states[n].active_rank if n in self.states else None for n in range(size)]


def renumbered(assignment: RankAssignment, size: int, dead: set[int]) -> dict[int, int]:
    found = {}
    for rank in set(range(size)) - dead:
        state = State(rank, size)
        assignment(RankAssignmentCtx(state, Store(), set(dead)))
        assert state.world_size == size - len(dead)
        found[rank] = state.rank
    return found


def test_shifted_ranks_keep_their_order() -> None:
    assert renumbered(ShiftRanks(), 8, {1, 4, 5}) == {0: 0, 2: 1, 3: 2, 6: 3, 7: 4}


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ({1, 2, 7}, {0: 0, 3: 3, 4: 4, 5: 1, 6: 2}),
        ({1, 4, 5}, {0: 0, 2: 2, 3: 3, 6: 1, 7: 4}),  # the peer leaves a gap here and a rank out of range
        ({7}, {rank: rank for rank in range(7)}),
    ],
)
def test_gaps_are_filled_from_the_end(dead: set[int], expected: dict[int, int]) -> None:
    assert renumbered(FillGaps(), 8, dead) == expected


@given(
    st.integers(1, 24).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), max_size=n - 1))
    )
)
def test_new_numbers_are_all_numbers_and_fill_gaps_moves_no_more_than_it_must(
    case: tuple[int, set[int]],
) -> None:
    size, dead = case
    for assignment in (ShiftRanks(), FillGaps()):
        found = renumbered(assignment, size, dead)
        assert sorted(found.values()) == list(range(size - len(dead)))
    moved = {old for old, new in found.items() if old != new}
    assert moved == {rank for rank in found if rank >= size - len(dead)}


def test_a_terminated_rank_finds_itself_discarded() -> None:
    for assignment in (ShiftRanks(), FillGaps(), Tree([Layer()])):
        with pytest.raises(RankDiscarded, match=r"rank 1 of 3"):
            assignment(RankAssignmentCtx(State(1, 3), Store(), {1}))


@pytest.mark.parametrize(
    ("assignment", "before", "size", "active"),
    [
        (ActivateAllRanks(), 2, 8, 8),
        (MaxActiveWorldSize(), None, 8, 8),
        (MaxActiveWorldSize(6), None, 8, 6),
        (MaxActiveWorldSize(6), 4, 8, 4),
        (ActiveWorldSizeDivisibleBy(), None, 7, 7),
        (ActiveWorldSizeDivisibleBy(4), None, 7, 4),
        (ActiveWorldSizeDivisibleBy(4), None, 3, 0),
        (Compose(ActiveWorldSizeDivisibleBy(4), MaxActiveWorldSize(6)), None, 8, 4),
        (Compose(ActiveWorldSizeDivisibleBy(3), MaxActiveWorldSize(6)), 5, 8, 3),
    ],
)
def test_ranks_beyond_the_active_world_size_are_spares(
    assignment: RankAssignment, before: int | None, size: int, active: int
) -> None:
    for rank in range(size):
        state = State(rank, size, active_world_size=before)
        assignment(RankAssignmentCtx(state, Store(), set()))
        assert state.active_world_size == active
        expected = (Mode.ACTIVE, rank) if rank < active else (Mode.INACTIVE, None)
        assert (state.mode, state.active_rank) == expected


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MaxActiveWorldSize(0), "max_active_world_size is 0"),
        (lambda: ActiveWorldSizeDivisibleBy(0), "divisor is 0"),
        (lambda: FilterCountGroupedByKey(3, bool), "key_or_fn is 3"),
        (lambda: FilterCountGroupedByKey("", bool, 60), r"timeout is 60 .*timedelta\(seconds=60\)"),
        (lambda: Layer(min_ranks=-1), "min_ranks is -1"),
        (lambda: Layer(flag="RESERVE"), "flag is 'RESERVE'"),
        (lambda: Tree([]), "layers is empty"),
        (lambda: Tree([Layer(), 4]), "layers is 4"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make: Callable[[], Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        make()


def test_groups_that_miss_the_condition_go_as_a_whole() -> None:
    def make(_: int) -> RankAssignment:
        return Compose(ActivateAllRanks(), ShiftRanks(), filters.pop())

    filters = [FilterCountGroupedByKey(lambda state: str(state.rank // 4), lambda count: count == 4)] * 12
    job = Job(12, make)
    job.assign(dead=[5])
    assert job.active(12) == [0, 1, 2, 3, None, None, None, None, 4, 5, 6, 7]
    job.assign()
    assert job.active(12) == [0, 1, 2, 3, None, None, None, None, 4, 5, 6, 7]


def test_a_node_that_lost_a_rank_goes_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    nodes = []
    for node in ("n0", "n1", "n2"):
        monkeypatch.setenv("SLURMD_NODENAME", node)
        one = WholeNodes()
        nodes += [one, one]
    for node in nodes:
        node._name = "shared"  # processes count their own: here they share one
    job = Job(6, lambda rank: Compose(ActivateAllRanks(), ShiftRanks(), nodes[rank]))
    job.assign()
    assert len(job.states) == 6
    job.assign(dead=[2])
    assert sorted(job.states) == [0, 1, 4, 5]


def grouped(size: int, **layer: Any) -> Layer:
    return Layer(key_or_fn=lambda state: str(state.initial_rank // size), **layer)


@pytest.mark.parametrize(
    ("ranks", "layers", "dead", "expected"),
    [
        (8, [Layer(flag=BACKFILL), grouped(4, flag=BACKFILL)], [[1]], "0-234561"),
        (8, [Layer(), grouped(4, flag=BACKFILL)], [[1]], "0-213456"),
        (8, [Layer(), grouped(4)], [[1]], "0-123456"),
        (8, [Layer(flag=BACKFILL), grouped(2, flag=BACKFILL)], [[2, 3]], "01--4523"),
        (8, [Layer(flag=RESERVE), grouped(4, max_ranks=3, flag=RESERVE)], [], "012-345-"),
        (8, [Layer(flag=RESERVE), grouped(4, max_ranks=3, flag=RESERVE)], [[1]], "0-21345-"),
        (8, [Layer(flag=RESERVE), grouped(4, max_ranks=3, flag=RESERVE)], [[1], [3]], "0-21-453"),
        (8, [Layer(flag=RESERVE), grouped(4, max_ranks=3, flag=RESERVE)], [[1], [3], [1]], "0--1-342"),
        (8, [Layer(), grouped(4, min_ranks=3)], [[0, 2]], "----0123"),
        (8, [Layer(min_ranks=7), grouped(4)], [[0, 5]], "--------"),
        (
            12,
            [Layer(min_ranks=2, max_ranks=None, flag=BOTH), grouped(4, min_ranks=2, max_ranks=3, flag=BOTH)],
            [[0, 1, 2]],
            "----345167 20".replace(" ", ""),
        ),
        (8, [Layer(flag=BACKFILL), grouped(4, flag=BACKFILL)], [[1, 7]], "0-23415-"),
        (2, [Layer(flag=BACKFILL)], [[0, 1]], "--"),
    ],
)
def test_the_tree_moves_ranks_as_its_layers_say(
    ranks: int, layers: list[Layer], dead: list[list[int]], expected: str
) -> None:
    job = Job(ranks, lambda _: Tree(layers))
    job.assign()
    for each in dead:
        job.assign(each)
    found = job.active(ranks)
    assert "".join("-" if rank is None else str(rank) for rank in found) == expected
    assert {state.world_size for state in job.states.values()} <= {len(job.states)}


def test_a_filter_of_the_tree_makes_spares_that_come_back() -> None:
    layers = [Layer(flag=RESERVE), grouped(4, flag=RESERVE)]
    job = Job(8, lambda _: Tree(layers, world_size_filter=lambda size: size // 3 * 3))
    job.assign()
    assert job.active(8) == [0, 1, 2, 3, 4, 5, None, None]
    job.assign([0])
    assert job.active(8) == [None, 1, 2, 3, 4, 5, None, 0]


def test_a_filter_that_asks_for_more_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size_filter returned 3 for 2"):
        Job(2, lambda _: Tree([Layer()], world_size_filter=lambda size: size + 1)).assign()


def test_roots_must_agree() -> None:
    with pytest.raises(RuntimeError, match=r"\['0', '1'\]"):
        Job(2, lambda rank: Tree([Layer(key_or_fn=str(rank))])).assign()


def test_an_order_other_than_the_launchers_is_told() -> None:
    with pytest.warns(UserWarning, match="order of ranks"):
        Job(4, lambda rank: Tree([Layer(), Layer(key_or_fn=str(rank % 2))])).assign()


def test_the_tree_is_built_anew_for_every_call_of_the_function() -> None:
    job = Job(4, lambda _: Tree([Layer(flag=RESERVE)]))
    job.assign()
    job.assign([1])
    job.states = {n: State(rank, 3, initial_rank=n, initial_world_size=4) for rank, n in enumerate((0, 2, 3))}
    job.assign()
    assert job.active(4) == [0, None, 1, 2]


def test_a_rank_that_joins_the_tree_takes_a_place_that_is_free() -> None:
    layers = [Layer(max_ranks=4, flag=BOTH)]
    job = Job(4, lambda _: Tree(layers))
    job.assign()
    job.assign([1])
    assert job.active(4) == [0, None, 2, 1]
    for state in job.states.values():
        state.world_size = 4
    job.states[1] = State(3, 4, initial_rank=1, initial_world_size=4)
    job.assignments[1] = Tree(layers)
    job.assign(joined=frozenset({3}))
    assert job.active(4) == [0, 3, 2, 1]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.lists(st.sampled_from([None, RESERVE, BACKFILL, BOTH]), min_size=2, max_size=2),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(0, 3),
    st.lists(st.sets(st.integers(0, 19), max_size=4), max_size=4),
)
def test_active_ranks_of_a_tree_have_no_gap_and_its_counts_stay_true(
    ranks: int,
    width: int,
    flags: list[LayerFlag | None],
    most: int | None,
    least: int,
    faults: list[set[int]],
) -> None:
    layers = [Layer(flag=flags[0]), Layer(flag=flags[1], max_ranks=most, min_ranks=least)]
    plan = Plan(layers, {rank: ("", str(rank // width)) for rank in range(ranks)})
    plan.activate()
    for dead in faults:
        plan.terminate(rank for rank in dead if rank < len(plan.leaves))
        numbers = sorted(leaf.active_rank for leaf in plan.leaves if leaf.active_rank is not None)
        assert numbers == list(range(plan.active_world_size)) == list(range(plan.root.active))
        assert all((leaf.mode is Mode.ACTIVE) == (leaf.active_rank is not None) for leaf in plan.leaves)


def test_a_thousand_dead_of_sixteen_thousand_take_little_time() -> None:
    ranks, width = 16_384, 8
    layers = [Layer(max_ranks=15_000, flag=BOTH), Layer(flag=BOTH), Layer(flag=BOTH)]
    keys = {rank: ("", str(rank // 512), str(rank // width)) for rank in range(ranks)}
    plan = Plan(layers, keys)
    plan.activate()
    began = time.process_time()
    plan.terminate(range(0, ranks, 16))
    took = time.process_time() - began
    assert plan.active_world_size == 15_000
    assert took < 0.5
    began = time.process_time()
    context = RankAssignmentCtx(State(ranks - 1, ranks), Store(), set(range(0, ranks, 16)))
    Compose(ActivateAllRanks(), FillGaps())(context)
    assert context.state.world_size == 15_360
    assert time.process_time() - began < 0.5
