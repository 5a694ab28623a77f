"""Which node gets which place: survivors, spares, topology, NVLink segments, replacement groups."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.coordinator.placement import Candidates, PlacementError, Rules, Topology, choose
from nvrx_slurm.wire.messages import NodeLocation


def at(switches: str = "", *, domain: str = "", group: str = "", node: str = "") -> NodeLocation:
    """A node below ``switches``, from the root down: ``s0.s1``."""
    if not switches:
        return NodeLocation(domain=domain, group=group)
    return NodeLocation(
        topology_addr=f"{switches}.{node}",
        topology_pattern=".".join("switch" for _ in switches.split(".")) + ".node",
        domain=domain,
        group=group,
    )


def below(**nodes: str) -> dict[str, NodeLocation]:
    return {node: at(switches, node=node) for node, switches in nodes.items()}


def in_domains(text: str) -> dict[str, NodeLocation]:
    """``a1 a2 b1``: the letter is the domain, and no letter none."""
    return {node: at(domain=node[0] if node[0].isalpha() else "") for node in text.split()}


def place(
    active: int,
    before: str,
    line: str,
    locations: Mapping[str, NodeLocation] | None = None,
    last: str | None = None,
    **rules: int,
) -> str:
    locations = locations or {}
    candidates = Candidates(tuple(line.split()), locations, Topology.of(locations), last)
    return " ".join(choose(before.split(), candidates, Rules(active, **rules)))


# --- survivors and spares ----------------------------------------------------------------------------


def test_the_first_of_the_line_train_and_the_rest_are_spares() -> None:
    assert place(2, "", "n1 n2 n3") == "n1 n2"


def test_survivors_keep_their_places_and_the_first_spare_fills_the_gap() -> None:
    assert place(3, "n1 n2 n3", "n1 n3 n4 n5") == "n1 n4 n3"


def test_the_last_choice_waits_until_no_other_is_left() -> None:
    assert place(2, "", "b n1 n2", last="b") == "n1 n2"
    assert place(2, "n1 n2", "b n2 n3", last="b") == "n3 n2"
    assert place(2, "n3 n2", "b n2", last="b") == "b n2"
    assert place(2, "b n2", "b n1 n2", last="b") == "b n2", "once it trains it is a survivor as any other"


def test_too_few_nodes_are_counted() -> None:
    with pytest.raises(PlacementError, match="needs 3, 1 is left and there is no spare"):
        place(3, "n1 n2 n3", "n2")


# --- topology ----------------------------------------------------------------------------------------

ISLANDS = below(n1="s0.s1", n2="s0.s2", n3="s0.s1", n4="s0.s2", n5="s0.s2", n6="s0.s1")


def test_nodes_of_one_switch_are_neighbours_in_the_first_cycle() -> None:
    assert place(4, "", "n1 n2 n3 n4", ISLANDS) == "n1 n3 n2 n4"
    assert place(4, "", "n2 n1 n4 n3", ISLANDS) == "n2 n4 n1 n3", "switches as they come in the list of hosts"


def test_levels_above_the_own_switch_count_too() -> None:
    tree = below(n1="a.a1", n2="b.b1", n3="a.a2", n4="b.b1", n5="a.a1")
    assert place(5, "", "n1 n2 n3 n4 n5", tree) == "n1 n5 n3 n2 n4"


def test_a_gap_is_filled_by_the_nearest_spare() -> None:
    assert place(2, "n1 n2", "n1 n3 n4", ISLANDS) == "n1 n4"
    assert place(2, "n1 n2", "n1 n6 n3", ISLANDS) == "n1 n6", "without a near one, by the first in line"


def test_two_gaps_do_not_take_each_others_nearest() -> None:
    assert place(2, "n1 n2", "n4 n3", ISLANDS) == "n3 n4"


def test_the_last_choice_is_not_taken_for_being_near() -> None:
    assert place(2, "n1 n2", "n1 n3 n4", ISLANDS, last="n4") == "n1 n3"


def test_survivors_do_not_move_for_the_sake_of_topology() -> None:
    assert place(4, "n2 n1 n4 n3", "n1 n2 n3 n4", ISLANDS) == "n2 n1 n4 n3"


@pytest.mark.parametrize(
    ("odd", "trouble"),
    [
        (NodeLocation(), "n9 has the address '' as ''"),
        (
            NodeLocation(topology_addr="s0.n9", topology_pattern="switch"),
            "n9 has the address 's0.n9' as 'switch'",
        ),
        (NodeLocation(topology_addr="s0.n8", topology_pattern="switch.node"), "'s0.n8'"),
        (NodeLocation(topology_addr="n9", topology_pattern="switch.node"), "'n9' as 'switch.node'"),
        (NodeLocation(topology_addr="s.n9", topology_pattern=".node"), "as '.node'"),
        (NodeLocation(topology_addr="s0.n9", topology_pattern="switch.node"), "different numbers of levels"),
    ],
)
def test_one_address_that_cannot_be_used_makes_all_useless(odd: NodeLocation, trouble: str) -> None:
    locations = {**ISLANDS, "n9": odd}
    assert trouble in Topology.of(locations).trouble
    assert place(4, "", "n1 n2 n3 n4", locations) == "n1 n2 n3 n4"


@pytest.mark.parametrize(
    "locations",
    [
        {},
        {"n1": NodeLocation(), "n2": NodeLocation()},
        {n: NodeLocation(topology_addr=n, topology_pattern="node") for n in ("n1", "n2")},
    ],
)
def test_a_cluster_without_topology_is_no_trouble(locations: dict[str, NodeLocation]) -> None:
    assert Topology.of(locations) == Topology()


def test_a_nodes_name_may_hold_dots_and_a_level_may_be_empty() -> None:
    locations = {
        "a.site": NodeLocation(topology_addr="s0.s1.a.site", topology_pattern="switch.switch.node"),
        "b.site": NodeLocation(topology_addr="s0..b.site", topology_pattern="switch.switch.node"),
    }
    assert Topology.of(locations).paths == {"a.site": ("s0", "s1"), "b.site": ("s0", "")}


# --- segments ----------------------------------------------------------------------------------------


def test_a_segment_is_within_one_domain() -> None:
    nodes = "a1 b1 a2 b2 a3"
    assert place(4, "", nodes, in_domains(nodes), segment=2) == "a1 a2 b1 b2"


def test_a_lost_node_is_replaced_from_its_segments_domain() -> None:
    nodes = "a1 a2 b1 b2 b3 a3"
    line = "a1 a2 b1 b3 a3"
    assert place(4, "a1 a2 b1 b2", line, in_domains(nodes), segment=2) == "a1 a2 b1 b3"


def test_a_segment_whose_domain_has_no_spare_moves_as_a_whole() -> None:
    nodes = "a1 a2 b1 b2 c1 c2"
    assert place(4, "a1 a2 b1 b2", "a2 b1 b2 c1 c2", in_domains(nodes), segment=2) == "c1 c2 b1 b2"


def test_of_two_broken_segments_the_one_that_lacks_less_is_filled_from_the_other() -> None:
    nodes = "a1 a2 a3 a4 a5 a6 b1 b2 b3"
    locations = in_domains(nodes)
    assert place(6, "a1 a2 a3 a4 a5 a6", "a1 a5 a6 b1 b2 b3", locations, segment=3) == "b1 b2 b3 a1 a5 a6"


def test_the_last_choice_may_keep_a_segment_where_it_is() -> None:
    nodes = "a1 a2 a3 b1 b2"
    assert place(2, "a1 a2", "a1 b1 b2 a3", in_domains(nodes), "a3", segment=2) == "a1 a3"


def test_the_first_cycle_avoids_the_last_choice_if_there_is_another_domain() -> None:
    nodes = "a1 a2 b1 b2"
    assert place(2, "", nodes, in_domains(nodes), "a1", segment=2) == "b1 b2"


def test_domains_and_counts_are_named_when_segments_cannot_be_formed() -> None:
    nodes = "a1 a2 a3 b1 1"
    with pytest.raises(PlacementError) as error:
        place(4, "", nodes, in_domains(nodes), segment=2)
    assert str(error.value) == (
        "too few whole segments: training needs 2 of 2 nodes in one NVLink domain each; "
        "a has 3, b has 1, no domain has 1"
    )


def test_w23_nodes_without_a_domain_are_not_of_one_domain() -> None:
    with pytest.raises(PlacementError, match="no domain has 2"):
        place(2, "", "1 2", in_domains("1 2"), segment=2)


def test_a_survivor_that_has_changed_its_domain_leaves_its_segment() -> None:
    locations = {**in_domains("a1 a2 a3 a4"), "a3": at(domain="b")}
    assert place(3, "a1 a2 a3", "a1 a2 a3 a4", locations, segment=3) == "a1 a2 a4"


# --- replacement groups ------------------------------------------------------------------------------


def in_groups(text: str) -> dict[str, NodeLocation]:
    return {node: at(group=node[0] if node[0].isalpha() else "") for node in text.split()}


def test_one_lost_node_takes_its_whole_replacement_group_out() -> None:
    nodes = "a1 a2 b1 b2 c1 c2"
    assert place(4, "a1 a2 b1 b2", "a1 b1 b2 c1 c2", in_groups(nodes), group_size=2) == "c1 c2 b1 b2"


def test_an_incomplete_group_stands_by_and_a_node_without_a_group_stands_for_itself() -> None:
    nodes = "a1 b1 b2 1"
    assert place(3, "", nodes, in_groups(nodes), group_size=2) == "b1 b2 1"


def test_incomplete_groups_are_named_when_nodes_lack() -> None:
    nodes = "a1 a2 b1 b2"
    with pytest.raises(PlacementError) as error:
        place(4, "a1 a2 b1 b2", "a1 b1 b2", in_groups(nodes), group_size=2)
    assert str(error.value) == (
        "too few nodes: training needs 4, 2 are left; "
        "replacement groups with fewer than 2 nodes left: a (of 2)"
    )


# --- whatever the nodes are --------------------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Rules, dict[str, NodeLocation], str | None, random.Random]:
    segment = draw(st.sampled_from([1, 1, 2, 3]))
    rules = Rules(
        segment * draw(st.integers(1, 4)), segment=segment, group_size=draw(st.sampled_from([1, 1, 2, 3]))
    )
    names = [f"n{number}" for number in range(draw(st.integers(1, 20)))]
    flat = draw(st.booleans())
    locations = {
        name: at(
            "" if flat else f"{draw(st.sampled_from('xy'))}.{draw(st.sampled_from('pqr'))}",
            node=name,
            domain=draw(st.sampled_from(["A", "B", "C", ""])),
            group=draw(st.sampled_from(["", "g", "h", "i"])),
        )
        for name in names
    }
    last = draw(st.none() | st.sampled_from(names))
    return rules, locations, last, random.Random(draw(st.integers(0, 2**32)))


def who_may(rules: Rules, locations: Mapping[str, NodeLocation], usable: Sequence[str]) -> set[str]:
    """Nodes whose replacement group is complete."""
    size = rules.group_size
    groups = Counter(locations[node].group for node in usable)
    return {
        node
        for node in usable
        if size == 1 or not locations[node].group or groups[locations[node].group] >= size
    }


def rooms(rules: Rules, locations: Mapping[str, NodeLocation], able: set[str]) -> Counter[str]:
    """How many segments each domain has room for."""
    domains = Counter(domain_of(rules, locations, node) for node in able)
    del domains[""]
    return Counter({domain: count // rules.segment for domain, count in domains.items()})


def domain_of(rules: Rules, locations: Mapping[str, NodeLocation], node: str) -> str:
    return node if rules.segment == 1 else locations[node].domain


def segments(rules: Rules, nodes: Sequence[str]) -> list[Sequence[str]]:
    return [nodes[start : start + rules.segment] for start in range(0, len(nodes), rules.segment)]


@given(clusters())
@settings(max_examples=600, deadline=None)
def test_no_cluster_breaks_a_rule(
    cluster: tuple[Rules, dict[str, NodeLocation], str | None, random.Random],
) -> None:
    rules, locations, last, rng = cluster
    before: tuple[str, ...] = ()
    for _ in range(4):
        usable = tuple(node for node in locations if rng.random() < 0.85)
        able = who_may(rules, locations, usable)
        room = rooms(rules, locations, able)
        shuffled = dict(rng.sample(list(locations.items()), len(locations)))
        joined_otherwise = Candidates(usable, shuffled, Topology.of(shuffled), last)
        if room.total() < rules.active_nodes // rules.segment:
            with pytest.raises(PlacementError):
                choose(before, joined_otherwise, rules)
            continue
        chosen = choose(before, Candidates(usable, locations, Topology.of(locations), last), rules)
        assert chosen == choose(before, joined_otherwise, rules), "whoever joined first"
        assert len(chosen) == len(set(chosen)) == rules.active_nodes, "no node twice"
        assert set(chosen) <= able
        for segment in segments(rules, chosen):
            domains = {domain_of(rules, locations, node) for node in segment}
            assert len(domains) == 1, "segments are whole"
            assert "" not in domains
        if before:
            stays_are_fair(rules, locations, before, chosen, able, room)
        before = chosen


def stays_are_fair(
    rules: Rules,
    locations: Mapping[str, NodeLocation],
    before: Sequence[str],
    chosen: Sequence[str],
    able: set[str],
    room: Counter[str],
) -> None:
    homes: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for former, segment in zip(segments(rules, before), segments(rules, chosen), strict=True):
        home = domain_of(rules, locations, former[0])
        homes[home] += 1
        if domain_of(rules, locations, segment[0]) != home:
            moved[home] += 1
            assert not set(former) <= able, "who lacks nobody stays"
        else:
            kept = [(old, new) for old, new in zip(former, segment, strict=True) if old in able]
            assert all(old == new for old, new in kept), "survivors keep their places"
    for home, count in homes.items():
        assert moved[home] <= max(0, count - room[home]), "a segment moves only if its domain has no room"


def fleet(count: int) -> dict[str, NodeLocation]:
    return {
        f"n{i}": at(f"core.row{i // 512}.rack{i // 16}", node=f"n{i}", domain=f"rack{i // 16}")
        for i in range(count)
    }


@pytest.mark.parametrize("segment", [1, 16])
def test_8192_nodes_are_placed_within_a_fraction_of_a_second(segment: int) -> None:
    locations = fleet(8192 + 128)
    rules = Rules(8192, segment=segment)
    topology = Topology.of(locations)
    began = time.process_time()
    first = choose((), Candidates(tuple(locations), locations, topology), rules)
    lost = set(random.Random(1).sample(first, 4))
    left = tuple(node for node in locations if node not in lost)
    second = choose(first, Candidates(left, locations, topology), rules)
    assert time.process_time() - began < 3.0
    moved = sum(1 for one, other in zip(first, second, strict=True) if one != other)
    assert moved == 4 * segment
