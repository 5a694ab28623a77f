"""What may be drained, and what not: others' reasons, and too many nodes for one check."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.health.result import CheckResult, fail
from nvrx_slurm.hooks.brake import our_reason, why_not
from nvrx_slurm.hooks.drain import SETTLE_S, Drained, Outcome, drain
from nvrx_slurm.slurm import SlurmRefusedError, SlurmUnavailableError
from nvrx_slurm.testing.slurm import FakeNodeAdmin

TEN = tuple(f"n{n}" for n in range(10))
OURS = "nvrx:gpu-ecc:gpu-1:reset 5 2 errors"


def broken(check: str = "gpu-ecc") -> CheckResult:
    failure = fail("3 uncorrectable errors", "NVML", "gpu 3", remedy="reset it")
    return dataclasses.replace(failure, check=check)


def drained(admin: FakeNodeAdmin, node: str = "n0", check: str = "gpu-ecc", share: float = 0.1) -> Drained:
    return drain(admin, node, broken(check), share, now=900.0, wait=lambda seconds: None)


def test_a_node_that_fails_is_drained_with_the_reason() -> None:
    admin = FakeNodeAdmin(*TEN)
    assert drained(admin).outcome is Outcome.DRAINED
    record = admin.records["n0"]
    assert (record.state, record.reason) == (
        "idle+drain",
        "nvrx:gpu-ecc:gpu-3:repair 900 3 uncorrectable errors",
    )
    assert our_reason(record) is not None


@pytest.mark.parametrize("state", ["idle+drain", "allocated+drain", "down*", "down+drain", "fail"])
def test_a_reason_of_somebody_else_stays(state: str) -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.set("n0", state, "swapping the fan", set_by="alice")
    assert drained(admin).outcome is Outcome.FOREIGN
    assert admin.orders == []
    assert admin.records["n0"].reason == "swapping the fan"


def test_an_earlier_reason_of_ours_stays_too() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.set("n0", "allocated+drain", OURS)
    assert drained(admin).outcome is Outcome.DRAINED
    assert admin.orders == []


def test_a_reason_that_outlived_its_drain_is_replaced() -> None:
    """Slurm 25.11 keeps the text when a node is resumed."""
    admin = FakeNodeAdmin(*TEN)
    admin.set("n0", "idle", "swapping the fan")
    assert drained(admin).outcome is Outcome.DRAINED


def test_a_node_in_maintenance_is_drained_for_its_jobs_start_there() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.set("n0", "idle+maint")
    assert drained(admin).outcome is Outcome.DRAINED


def test_the_brake_counts_nodes_drained_for_the_same_check() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.set("n7", "idle+drain", OURS)
    braked = drained(admin)
    assert braked.outcome is Outcome.BRAKED
    assert "1 of the 10 nodes of partition batch are drained for gpu-ecc already, and 1 may be" in braked.told
    assert admin.orders == []
    assert drained(admin, check="edac").outcome is Outcome.DRAINED


def test_one_node_may_be_drained_in_the_smallest_partition() -> None:
    assert drained(FakeNodeAdmin("n0"), share=0.01).outcome is Outcome.DRAINED


def test_nodes_that_others_have_drained_do_not_count() -> None:
    admin = FakeNodeAdmin(*TEN)
    for node in TEN[1:]:
        admin.set(node, "idle+drain", "moving to another room")
    assert drained(admin).outcome is Outcome.DRAINED


def test_a_node_that_was_resumed_does_not_count() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.set("n7", "idle", OURS)
    assert drained(admin).outcome is Outcome.DRAINED


def test_of_nodes_that_fail_in_the_same_moment_the_later_ones_give_way() -> None:
    """None saw another at first: a file server takes all of them in the same second."""
    admin = FakeNodeAdmin(*TEN)
    admin.after_drain = lambda: admin.set("n7", "idle+drain", OURS, since=999)
    assert drained(admin).outcome is Outcome.BRAKED
    assert admin.orders == [("drain", "n0"), ("resume", "n0")]
    assert not admin.records["n0"].drained


def test_and_the_first_one_stays_drained() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.after_drain = lambda: admin.set("n7", "idle+drain", OURS, since=1001)
    assert drained(admin).outcome is Outcome.DRAINED


def test_a_node_that_somebody_took_over_meanwhile_is_not_resumed() -> None:
    admin = FakeNodeAdmin(*TEN)

    def meanwhile() -> None:
        admin.set("n7", "idle+drain", OURS, since=999)
        admin.set("n0", "idle+drain", "I look at it", set_by="alice", since=1001)

    admin.after_drain = meanwhile
    assert drained(admin).outcome is Outcome.DRAINED
    assert admin.records["n0"].reason == "I look at it"


def test_every_partition_of_the_node_has_its_own_brake() -> None:
    admin = FakeNodeAdmin(*TEN)
    for node in ("n0", "n7"):
        admin.records[node] = dataclasses.replace(admin.records[node], partitions=("batch", "big"))
    admin.set("n7", "idle+drain", OURS)
    assert drained(admin, share=0.3).outcome is Outcome.BRAKED


@pytest.mark.parametrize("error", [SlurmUnavailableError("no answer"), SlurmRefusedError("not you")])
def test_a_slurm_that_does_not_do_it_leaves_the_node_in_service(error: Exception) -> None:
    """Without its word there is no brake."""
    admin = FakeNodeAdmin(*TEN)
    if isinstance(error, SlurmUnavailableError):
        admin.unavailable = error
    else:
        admin.refusal = error  # type: ignore[assignment]
    assert drained(admin).outcome is Outcome.UNKNOWN
    assert not admin.records["n0"].drained


def test_a_node_that_slurm_does_not_know_is_not_drained() -> None:
    assert drained(FakeNodeAdmin("n1")).outcome is Outcome.UNKNOWN


def test_a_drain_that_could_not_be_looked_at_again_stands() -> None:
    admin = FakeNodeAdmin(*TEN)
    admin.after_drain = lambda: setattr(admin, "unavailable", SlurmUnavailableError("no answer"))
    assert drained(admin).outcome is Outcome.DRAINED


@given(st.permutations(TEN[:6]))
def test_of_nodes_that_were_drained_in_one_second_exactly_so_many_stay_as_may(order: list[str]) -> None:
    """None saw another before it was drained; when the second is over each looks again, in any order."""
    admin = FakeNodeAdmin(*TEN)
    for node in order:
        admin.set(node, "idle+drain", OURS, since=1000)
    for node in order:
        if why_not(node, "gpu-ecc", admin.node_records(), share=0.2):
            admin.resume(node)
    assert [name for name, record in admin.records.items() if record.drained] == ["n0", "n1"]


def test_the_brake_is_asked_again_when_the_second_is_over() -> None:
    waited: list[float] = []
    drain(FakeNodeAdmin(*TEN), "n0", broken(), 0.1, now=900.0, wait=waited.append)
    assert waited == [SETTLE_S]
    assert SETTLE_S > 1
