"""Who is in charge: whatever the schedule, no fence has two holders, and a cut-off node never acts."""

from __future__ import annotations

import functools
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.coordinator.lease import LAPSE_S, RENEW_S, Fence, Lease, LeaseError, LeaseFile
from nvrx_slurm.coordinator.lease_keeper import CONFIRM_S, LeaseKeeper
from nvrx_slurm.coordinator.lease_watch import (
    BLIND_S,
    STAGGER_S,
    Claim,
    Decision,
    Join,
    LeaseWatch,
    Leave,
    Seen,
    Wait,
)

F0 = Fence("7", 0, 0)
F1 = Fence("7", 0, 1)


def lease(fence: Fence = F0, counter: int = 1, **fields: object) -> Lease:
    values = {"host": "n1", "address": "10.0.0.1:5"}
    return Lease(fence=str(fence), counter=counter, **{**values, **fields})  # type: ignore[arg-type]


def seen(fence: Fence = F0, counter: int = 1, claimed: int = 0, **fields: object) -> Seen:
    return Seen(lease(fence, counter, **fields), claimed)


# --- fences ------------------------------------------------------------------------------------------


def test_a_later_start_of_the_job_is_newer_than_any_attempt_of_an_earlier_one() -> None:
    assert Fence("7", 1, 0).is_newer_than(Fence("7", 0, 9))
    assert F1.is_newer_than(F0)
    assert not F0.is_newer_than(F0)
    assert not Fence("8", 1, 0).is_newer_than(F0)


@pytest.mark.parametrize("text", ["", "7.0", "7.0.0.0", "7.-1.0", "7.0.x", " 7.0.0", "7.0.0\n", "٣.0.0"])
def test_what_is_no_fence_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no fence"):
        Fence.parse(text)


@given(st.integers(0, 10**12), st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_fence_survives_its_text(job: int, restart: int, attempt: int) -> None:
    fence = Fence(str(job), restart, attempt)
    assert Fence.parse(str(fence)) == fence


# --- files -------------------------------------------------------------------------------------------


def test_a_lease_is_read_back_and_its_owners_alone(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path)
    assert file.read() is None
    file.write(lease(counter=3))
    assert file.read() == lease(counter=3)
    assert stat.S_IMODE((tmp_path / "lease.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["lease.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"fence":"7.0.0"}', '{"fence":"x","counter":1,"host":"n1"}']
)
def test_a_torn_or_foreign_lease_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "lease.json").write_text(text)
    with pytest.raises(LeaseError, match="no lease"):
        LeaseFile(tmp_path).read()


def test_a_run_directory_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="not there"):
        LeaseFile(tmp_path / "gone").read()


def test_a_fence_is_claimed_once(tmp_path: Path) -> None:
    assert LeaseFile(tmp_path).claim(F1, "n2")
    assert not LeaseFile(tmp_path).claim(F1, "n3")
    assert not LeaseFile(tmp_path).claim(F1, "n2")
    assert LeaseFile(tmp_path).claim(F1.next_attempt(), "n3")
    assert LeaseFile(tmp_path).highest_claim(F0) == 2
    assert LeaseFile(tmp_path).highest_claim(Fence("7", 1, 0)) == 0
    assert (tmp_path / "claims" / "7.0.1").read_text() == "n2\n"
    assert sorted(os.listdir(tmp_path / "claims")) == ["7.0.1", "7.0.2"]


def test_the_newest_fence_is_that_of_lease_or_claim(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path)
    assert file.newest(F0) == F0
    file.write(lease(Fence("8", 4, 4)))
    assert file.newest(F0) == F0
    file.claim(F1, "n2")
    assert file.newest(F0) == F1
    file.write(lease(Fence("7", 1, 0)))
    assert file.newest(F0) == Fence("7", 1, 0)


# --- the holder --------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_holder_looks_before_it_acts_only_after_a_standstill(tmp_path: Path) -> None:
    clock, file = Clock(), LeaseFile(tmp_path)
    keeper = LeaseKeeper(file, F0, "n1", clock)
    keeper.begin("10.0.0.1:5")
    file.claim(F1, "n2")
    clock.now = CONFIRM_S - 0.1
    assert keeper.holds()
    clock.now = CONFIRM_S
    assert not keeper.holds()
    assert keeper.successor == F1
    clock.now += 0.1
    assert not keeper.holds(), "it stays so"


def test_a_holder_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path)
    keeper = LeaseKeeper(file, F0, "n1")
    keeper.begin()
    file.write(lease(F1, host="n2"))
    keeper.finish(0)
    assert file.read() == lease(F1, host="n2")


def test_a_holder_whose_run_directory_cannot_be_read_goes_on(tmp_path: Path) -> None:
    keeper = LeaseKeeper(LeaseFile(tmp_path / "gone"), F0, "n1")
    assert keeper.confirm()


def test_the_end_of_the_job_stands_in_the_lease(tmp_path: Path) -> None:
    keeper = LeaseKeeper(LeaseFile(tmp_path), F0, "n1")
    keeper.begin()
    keeper.finish(3)
    found = LeaseFile(tmp_path).read()
    assert found is not None
    assert found.ended == 3


# --- one node that watches ---------------------------------------------------------------------------


def watch(*looks: tuple[float, Seen | None], place: int = 0, fence: Fence = F0) -> Decision:
    machine = LeaseWatch(fence, lambda _: place)
    for now, look in looks[:-1]:
        assert machine.look(now, look) == Wait()
    return machine.look(*looks[-1])


def test_a_lease_that_is_not_renewed_is_claimed_with_the_next_attempt() -> None:
    assert watch((5, seen()), (5 + LAPSE_S - 0.1, seen())) == Wait()
    assert watch((5, seen()), (5 + LAPSE_S, seen())) == Claim(F1, "n1", LAPSE_S)


def test_a_node_further_down_steps_in_later() -> None:
    late = LAPSE_S + 2 * STAGGER_S
    assert watch((0, seen()), (late - 0.1, seen()), place=2) == Wait()
    assert watch((0, seen()), (late, seen()), place=2) == Claim(F1, "n1", late)


def test_a_lease_that_moves_makes_the_node_leave() -> None:
    decision = watch((0, seen()), (10, seen(counter=2)), (20, seen(counter=3)))
    assert isinstance(decision, Leave)
    assert "this node was cut off" in decision.why


def test_one_renewal_seen_late_only_delays() -> None:
    assert watch((0, seen()), (2, seen(counter=2)), (31, seen(counter=2))) == Wait()
    assert isinstance(watch((0, seen()), (2, seen(counter=2)), (32, seen(counter=2))), Claim)


def test_a_run_directory_that_cannot_be_read_never_leads_to_a_claim() -> None:
    assert watch((0, seen()), (29, None), (31, seen())) == Wait()
    assert watch((0, seen()), (29, None), (31, seen()), (31 + LAPSE_S, seen())) == Claim(F1, "n1", LAPSE_S)
    assert isinstance(watch((0, seen()), (29, None), (29 + BLIND_S, None)), Leave)


def test_a_claimant_that_does_nothing_more_is_passed_over() -> None:
    claimed = seen(claimed=1)
    decision = watch((0, seen()), (29, claimed), (58, claimed), (29 + LAPSE_S, claimed))
    assert decision == Claim(Fence("7", 0, 2), "n1", LAPSE_S)


def test_a_new_coordinator_is_joined_once_it_listens() -> None:
    starting = seen(F1, 1, 1, host="n2", address="")
    ready = seen(F1, 2, 1, host="n2", address="10.0.0.2:6")
    assert watch((0, seen()), (1, starting)) == Wait()
    assert watch((0, seen()), (1, starting), (2, ready)) == Join(ready.lease)


def test_a_new_coordinator_that_dies_before_it_listens_is_replaced_too() -> None:
    starting = seen(F1, 1, 1, host="n2", address="")
    assert watch((0, starting), (LAPSE_S, starting)) == Claim(Fence("7", 0, 2), "n2", LAPSE_S)


def test_an_old_lease_that_comes_back_is_no_sign_of_life() -> None:
    assert isinstance(watch((0, seen(F0, 9)), (BLIND_S, seen(F0, 10)), fence=F1), Leave)


def test_a_job_that_has_ended_or_was_started_again_is_left_alone() -> None:
    assert watch((0, seen(ended=1))) == Leave("the job has ended with 1")
    assert watch((0, seen(Fence("7", 1, 0)))) == Leave("7.1.0 is in charge now")
    assert watch((0, seen(Fence("8", 0, 0)))) == Leave("8.0.0 is in charge now")


# --- all of them, on any schedule --------------------------------------------------------------------


def _same(place: int, _lost: str) -> int:
    return place


@dataclass
class World:
    """A run directory, Coordinators that renew or do not, nodes that look now and then."""

    watching: int
    now: float = 0.0
    lease: Lease = field(default_factory=lease)
    claims: dict[Fence, str] = field(default_factory=dict)
    holders: dict[Fence, str] = field(default_factory=lambda: {F0: "n1"})
    renewed_at: float = 0.0

    def __post_init__(self) -> None:
        self.nodes: dict[str, LeaseWatch | None] = {
            f"n{place + 2}": LeaseWatch(F0, functools.partial(_same, place)) for place in range(self.watching)
        }

    def renew(self, fence: Fence) -> None:
        """As LeaseKeeper does: only who sees nothing newer writes."""
        newest = max([Fence.parse(self.lease.fence), *self.claims])
        if fence in self.holders and newest <= fence:
            counter = self.lease.counter + 1
            self.lease = lease(fence, counter, host=self.holders[fence], address="a:1")
            self.renewed_at = self.now

    def look(self, node: str, readable: bool) -> None:
        machine = self.nodes[node]
        if machine is None:
            return
        claimed = max((fence.attempt for fence in self.claims), default=0)
        decision = machine.look(self.now, Seen(self.lease, claimed) if readable else None)
        match decision:
            case Claim(fence=fence):
                assert readable
                assert self.now - self.renewed_at >= LAPSE_S, "the lease moved"
                if fence not in self.claims:
                    self.claims[fence] = node
                    assert fence not in self.holders, "two Coordinators with one fence"
                    self.holders[fence] = node
                    self.nodes[node] = None
            case Join() | Leave():
                self.nodes[node] = None
            case Wait():
                pass


steps = st.lists(
    st.tuples(
        st.floats(0, 40),
        st.one_of(
            st.tuples(st.just("renew"), st.integers(0, 3)),
            st.tuples(st.just("look"), st.integers(0, 2)),
            st.tuples(st.just("blind"), st.integers(0, 2)),
        ),
    ),
    max_size=80,
)


@given(steps)
@settings(max_examples=500, deadline=None)
def test_no_schedule_makes_two_coordinators_of_one_fence(
    schedule: list[tuple[float, tuple[str, int]]],
) -> None:
    world = World(watching=3)
    for pause, (what, which) in schedule:
        world.now += pause
        if what == "renew":
            world.renew(Fence("7", 0, which))
        else:
            world.look(f"n{which + 2}", readable=what == "look")
    fences = [*world.holders]
    assert fences == sorted(fences), "each newer than the ones before"


@given(st.lists(st.tuples(st.floats(0, RENEW_S), st.booleans(), st.integers(0, 2)), max_size=80))
@settings(max_examples=300, deadline=None)
def test_nobody_acts_while_the_coordinator_renews(schedule: list[tuple[float, bool, int]]) -> None:
    world = World(watching=3)
    for pause, readable, which in schedule:
        world.now += pause
        world.renew(F0)
        world.look(f"n{which + 2}", readable)
    assert world.claims == {}
    assert world.holders == {F0: "n1"}


@given(st.lists(st.sampled_from(["n2", "n3", "n4"]), min_size=1, max_size=6))
def test_whoever_is_left_takes_over_in_the_end(dead: list[str]) -> None:
    """Nodes die the moment they have claimed; the next one steps in, until none is left."""
    world = World(watching=3)
    for node in dead:
        world.nodes[node] = None
    left = [node for node, machine in world.nodes.items() if machine is not None]
    while world.now < 200:
        world.now += 1.0
        for node in left:
            world.look(node, readable=True)
    assert sorted(world.claims.values()) == left
