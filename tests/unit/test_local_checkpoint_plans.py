"""Cliques, completeness and plans against a model that lists every copy, for every loss that is promised."""

from __future__ import annotations

import gc
import itertools
import logging
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.checkpointing import utils
from nvrx_slurm.checkpointing.local.basic_state_dict import dict_list_map_inplace, nested_values
from nvrx_slurm.checkpointing.local.completeness import (
    find_latest,
    ids_of,
    ranks_text,
    saves_by_completeness,
)
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, NoReplicasAvailableError
from nvrx_slurm.checkpointing.local.ids import (
    CkptID,
    HeldPart,
    checked_iteration,
    parse_part_name,
    part_name,
)
from nvrx_slurm.checkpointing.local.replication.cliques import clique_of, own_clique, parse_group_sequence
from nvrx_slurm.checkpointing.local.replication.group_utils import batched
from nvrx_slurm.checkpointing.local.replication.plan import ExchangePlan, ExchangePlanEntry, plan_fetches
from nvrx_slurm.checkpointing.local.replication.torch_device_utils import get_default_device_from_type
from nvrx_slurm.checkpointing.local.replication.utils import zip_strict

Shape = tuple[int, int, int]
"""World size, jump, factor."""
SHAPES: list[Shape] = [
    (world, jump, factor)
    for world in (4, 8, 16)
    for jump in range(1, world + 1)
    for factor in range(1, world + 1)
    if world % (jump * factor) == 0
]


def copies_of_each_rank(world: int, jump: int, factor: int) -> dict[int, set[int]]:
    """The model: who holds the part of a rank, as defined: count on from each residue, cut into runs."""
    copies = {}
    for residue in range(jump):
        sequence = list(range(residue, world, jump))
        for start in range(0, len(sequence), factor):
            run = sequence[start : start + factor]
            copies.update({rank: set(run) for rank in run})
    return copies


def held(iteration: int, owner: int, world: int, save_id: str = "a") -> HeldPart:
    return HeldPart(CkptID(iteration, owner, ""), world, save_id)


def holdings_after_loss(shape: Shape, lost_nodes: set[int], iteration: int = 7) -> dict[int, set[HeldPart]]:
    """What ranks find after nodes were replaced; a node has ``jump`` ranks."""
    world, jump, factor = shape
    holdings: dict[int, set[HeldPart]] = {rank: set() for rank in range(world)}
    for owner, holders in copies_of_each_rank(world, jump, factor).items():
        for holder in holders:
            if holder // jump not in lost_nodes:
                holdings[holder].add(held(iteration, owner, world))
    return holdings


def loss_patterns(nodes: int) -> Iterator[set[int]]:
    """All, or where these are too many all up to three nodes and what is complementary to them."""
    sizes = range(nodes + 1) if nodes <= 8 else (0, 1, 2, 3, nodes - 1, nodes)
    for size in sizes:
        yield from map(set, itertools.combinations(range(nodes), size))


@pytest.mark.parametrize(
    ("world", "jump", "factor", "cliques"),
    [
        (8, 1, 2, "0-1 2-3 4-5 6-7"),
        (8, 2, 2, "0-2 1-3 4-6 5-7"),
        (8, 4, 2, "0-4 1-5 2-6 3-7"),
        (12, 2, 3, "0-2-4 1-3-5 6-8-10 7-9-11"),
        (16, 4, 4, "0-4-8-12 1-5-9-13 2-6-10-14 3-7-11-15"),
    ],
)
def test_cliques_are_those_of_the_worked_examples(world: int, jump: int, factor: int, cliques: str) -> None:
    found = parse_group_sequence(replication_jump=jump, replication_factor=factor, world_size=world)
    assert found == [[int(rank) for rank in clique.split("-")] for clique in cliques.split()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_clique_is_that_of_the_definition_and_never_has_two_ranks_of_a_node(shape: Shape) -> None:
    world, jump, factor = shape
    model = copies_of_each_rank(*shape)
    for rank in range(world):
        clique = clique_of(rank, jump, factor)
        assert set(clique) == model[rank]
        assert len({member // jump for member in clique}) == factor
    cliques = parse_group_sequence(jump, factor, world)
    assert sorted(itertools.chain(*cliques)) == list(range(world))
    assert len(cliques) == world // factor


@pytest.mark.parametrize(
    ("jump", "factor", "world", "why"),
    [
        (
            3,
            2,
            8,
            r"world_size=8 is no multiple of replication_jump=3 [*] replication_factor=2 = 6: .* that fits",
        ),
        (0, 2, 8, "replication_jump=0: a number from 1 is accepted"),
        (1, 0, 8, "replication_factor=0"),
        (1, 1, 0, "world_size=0"),
    ],
)
def test_cliques_that_do_not_divide_the_job_are_refused(jump: int, factor: int, world: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_group_sequence(jump, factor, world)


def test_irregular_cliques_are_accepted_if_the_rank_is_in_one() -> None:
    cliques = [[2, 6, 7], [3, 1], [5], [0, 4]]
    assert own_clique(cliques, 6) == [2, 6, 7]
    assert own_clique(cliques, 5) == [5]
    with pytest.raises(ValueError, match="rank 8 is in 0 cliques"):
        own_clique(cliques, 8)
    with pytest.raises(ValueError, match="rank 1 is in 2 cliques"):
        own_clique([[0, 1], [1, 2]], 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_loss_that_leaves_a_copy_of_each_part_survives_and_every_other_is_named(shape: Shape) -> None:
    world, jump, factor = shape
    model = copies_of_each_rank(*shape)
    for lost in loss_patterns(world // jump):
        holdings = holdings_after_loss(shape, lost)
        gone = {rank for rank, holders in model.items() if all(holder // jump in lost for holder in holders)}
        if len(lost) < factor:
            assert not gone, "the formulas promise this one"
        wanted = {rank: [CkptID(7, rank, "")] for rank in range(world)}
        save = find_latest(holdings, world)
        if gone:
            assert save is None
            _, partial = saves_by_completeness(holdings)
            assert [set(each.missing) for each in partial] == ([gone] if len(gone) < world else [])
            ids = {rank: {part.id for part in parts} for rank, parts in holdings.items()}
            with pytest.raises(NoReplicasAvailableError) as error:
                plan_fetches(ids, wanted)
            assert all(f"(7, {rank}, '')" in str(error.value) for rank in gone)
            assert f"part of {ranks_text(gone)}." in str(error.value)
        else:
            assert save is not None
            assert save.iteration == 7
            check_plan(plan_fetches(ids_of(save, holdings), wanted), holdings, wanted)


def check_plan(
    entries: list[ExchangePlanEntry],
    holdings: dict[int, set[HeldPart]],
    wanted: dict[int, list[CkptID]],
) -> None:
    """Everybody gets what it wants once, from one who has it, itself if it can, and the load is spread."""
    assert [(entry.receiver, entry.id_) for entry in entries] == [
        (rank, id_) for rank in sorted(wanted) for id_ in wanted[rank]
    ]
    sends: dict[int, int] = {}
    for entry in entries:
        holders = {rank for rank, parts in holdings.items() if entry.id_ in {part.id for part in parts}}
        assert entry.sender in holders
        if entry.receiver in holders:
            assert entry.sender == entry.receiver
        else:
            assert sends.get(entry.sender, 0) == min(sends.get(rank, 0) for rank in holders)
            sends[entry.sender] = sends.get(entry.sender, 0) + 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_newest_whole_iteration_is_found_whatever_is_left_of_which(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    world, jump, _ = shape
    nodes = world // jump
    lost_of = {
        iteration: data.draw(st.sets(st.integers(0, nodes - 1)), label=f"lost of {iteration}")
        for iteration in (3, 5, 9)
    }
    holdings: dict[int, set[HeldPart]] = {rank: set() for rank in range(world)}
    for iteration, lost in lost_of.items():
        for rank, parts in holdings_after_loss(shape, lost, iteration).items():
            holdings[rank] |= parts
    model = copies_of_each_rank(*shape)
    whole = [
        iteration
        for iteration, lost in lost_of.items()
        if all(any(holder // jump not in lost for holder in holders) for holders in model.values())
    ]
    found = find_latest(holdings, world)
    assert (found.iteration if found else -1) == max(whole, default=-1)


def test_ranks_that_have_changed_places_get_their_parts_back() -> None:
    moved = {0: 3, 1: 2, 2: 0, 3: 1}  # by owner, whose directory it is in now
    holdings = {holder: {held(7, owner, 4)} for owner, holder in moved.items()}
    save = find_latest(holdings, 4)
    assert save is not None
    entries = plan_fetches(ids_of(save, holdings), {rank: [CkptID(7, rank, "")] for rank in range(4)})
    assert {entry.receiver: entry.sender for entry in entries} == moved


def test_a_checkpoint_of_another_number_of_ranks_is_not_taken_for_one_of_this_job() -> None:
    holdings = {rank: {held(7, owner, 4) for owner in range(4)} for rank in range(2)}
    assert find_latest(holdings, 2) is None
    found = find_latest(holdings, None)
    assert found is not None
    assert found.world_size == 4


def test_parts_of_two_saves_of_one_iteration_are_not_mixed() -> None:
    torn = {0: {held(7, 0, 2, "new")}, 1: {held(7, 1, 2, "old")}}
    assert find_latest(torn, 2) is None
    healed = {0: {held(7, 0, 2, "new"), held(7, 0, 2, "old")}, 1: {held(7, 1, 2, "old")}}
    found = find_latest(healed, 2)
    assert found is not None
    assert found.save_id == "old"


def test_nothing_held_is_no_checkpoint() -> None:
    assert find_latest({0: [], 1: []}, 2) is None


class Group:
    ranks = (0, 2, 5)
    my_global_rank = 2


def test_an_exchange_plan_lists_each_transfer_once_and_what_a_rank_must_have() -> None:
    plan = ExchangePlan(Group())
    a, b = CkptID(1, 0, ""), CkptID(1, 2, "")
    plan.plan(sender=2, receiver=0, id_=a)
    plan.plan(sender=2, receiver=5, id_=a)
    plan.plan(sender=5, receiver=2, id_=b)
    assert plan.entries == (
        ExchangePlanEntry(2, 0, a),
        ExchangePlanEntry(2, 5, a),
        ExchangePlanEntry(5, 2, b),
    )
    assert plan.required_ids() == [a]
    assert plan.required_ids(5) == [b]
    assert plan.required_ids(0) == []
    with pytest.raises(ValueError, match=r"rank 2 gets .* from two ranks"):
        plan.plan(sender=0, receiver=2, id_=b)
    with pytest.raises(ValueError, match="rank 1 is not in the group of ranks 0, 2, 5"):
        plan.plan(sender=1, receiver=2, id_=a)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("iter_0000010_3_local.pt", (10, 3)),
        ("iter_10000000_12_local.pt", (10_000_000, 12)),
        ("iter_0000010_3_local.dirty.pt", None),
        ("iter_0000010_3_local.ptsome_suffix", None),
        ("iter_0000010_3_localsome suffix with spaces.pt", None),
        ("iter_*_3_local.pt", None),
    ],
)
def test_only_the_full_name_is_that_of_a_part(name: str, parsed: tuple[int, int] | None) -> None:
    assert parse_part_name(name) == parsed


def test_names_are_those_of_the_specification() -> None:
    assert part_name(10, 3) == "iter_0000010_3_local.pt"
    assert part_name(10_000_000, 3) == "iter_10000000_3_local.pt"
    assert part_name("*", "*") == "iter_*_*_local.pt"
    assert CkptID(10, 3, "") == (10, 3, "")


@pytest.mark.parametrize("iteration", [-1, True, 1.5, "3"])
def test_an_iteration_that_is_none_is_refused(iteration: int) -> None:
    with pytest.raises(CheckpointingException, match="an integer from 0 is accepted"):
        checked_iteration(iteration)


def test_ranks_are_named_in_runs() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2]) == "ranks 0-2, 5"


def test_helpers_under_the_peers_names() -> None:
    assert list(batched("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)]
    with pytest.raises(ValueError, match="a number from 1"):
        list(batched("abc", 0))
    assert list(zip_strict("ab", "cd")) == [("a", "c"), ("b", "d")]
    with pytest.raises(ValueError, match="shorter"):
        list(zip_strict("ab", "c"))
    tree = {"a": [1, {"b": 2}], "c": (3,)}
    assert list(nested_values(tree)) == [1, 2, 3]
    assert dict_list_map_inplace(lambda leaf: leaf if isinstance(leaf, tuple) else -leaf, tree) is tree
    assert tree == {"a": [-1, {"b": -2}], "c": (3,)}
    assert get_default_device_from_type("cpu").type == "cpu"
    with pytest.raises(ValueError, match="cpu and cuda are accepted"):
        get_default_device_from_type("mps")


def test_timing_and_comparing_under_the_peers_names(caplog: pytest.LogCaptureFixture) -> None:
    @utils.debug_time("inner", threshold=0.0)
    def work() -> None:
        utils.debug_msg("works")

    with caplog.at_level(logging.DEBUG), utils.debug_time("outer", logging.getLogger("mine")):
        work()
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert said[0] == ("mine", "DEBUG", "outer.inner works")
    assert said[1][:2] == ("mine", "WARNING")
    assert re.fullmatch(r"outer\.inner took \d+\.\d{4}s", said[1][2])
    assert re.fullmatch(r"outer took \d+\.\d{4}s", said[2][2])
    one, other = {"a": [torch.ones(2)], "b": 1, "c": 1}, {"a": [torch.zeros(2)], "b": 1, "d": 1}
    assert utils.diff(one, other) == ([("c",)], [("d",)], [(("a", 0), torch.Tensor, torch.Tensor)])
    assert utils.diff(one, utils.preload_tensors(one)) == ([], [], [])
    assert not utils.wrap_for_async(gc.isenabled)()
    assert gc.isenabled()
