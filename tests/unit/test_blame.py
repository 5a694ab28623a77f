"""Of several faults the one that can't be a consequence of the others."""

from __future__ import annotations

import itertools

import pytest
from cycle_driver import snapshot
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.coordinator.blame import describe, find_culprit, find_hung_rank
from nvrx_slurm.journal import FaultDetected, FaultKind


def exited(rank: int, code: int = 1) -> FaultDetected:
    return FaultDetected(kind=FaultKind.EXIT, node="n1", rank=rank, exit=code, detector="child")


def killed(rank: int, name: str = "SIGKILL") -> FaultDetected:
    return FaultDetected(kind=FaultKind.SIGNAL, node="n1", rank=rank, signal=name, detector="child")


def hung(rank: int) -> FaultDetected:
    return FaultDetected(kind=FaultKind.HANG, node="n1", rank=rank, detector="heartbeat", detail="late")


def lost(node: str) -> FaultDetected:
    return FaultDetected(kind=FaultKind.NODE_LOST, node=node, detector="stream")


def unstarted(node: str) -> FaultDetected:
    return FaultDetected(kind=FaultKind.START, node=node, detector="start", detail="no space")


def out_of_memory(rank: int) -> FaultDetected:
    return FaultDetected(kind=FaultKind.OOM, node="n1", rank=rank, signal="SIGKILL", detector="child")


CASCADES = [
    ([exited(3), exited(0), exited(1)], exited(3), "first-exit"),
    ([exited(0), exited(1), killed(3)], killed(3), "killed-by-signal"),
    ([exited(0), killed(3, "SIGSEGV")], killed(3, "SIGSEGV"), "killed-by-signal"),
    ([exited(0), killed(1, "SIGABRT")], exited(0), "first-exit"),
    ([killed(1, "SIGABRT"), exited(0)], killed(1, "SIGABRT"), "killed-by-signal"),
    ([killed(1, "SIGTERM"), killed(3)], killed(3), "killed-by-signal"),
    ([killed(2, "SIGPIPE"), exited(1)], killed(2, "SIGPIPE"), "killed-by-signal"),
    ([exited(0), exited(1), lost("n4")], lost("n4"), "node-lost"),
    ([killed(0), lost("n4"), lost("n2")], lost("n4"), "node-lost"),
    ([hung(5), exited(0), killed(1)], hung(5), "hang"),
    ([exited(0), unstarted("n2")], unstarted("n2"), "start-failed"),
    ([exited(0), out_of_memory(2)], out_of_memory(2), "out-of-memory"),
]


@pytest.mark.parametrize(("faults", "culprit", "rule"), CASCADES)
def test_the_cause_is_told_from_its_consequences(
    faults: list[FaultDetected], culprit: FaultDetected, rule: str
) -> None:
    blame = find_culprit(faults)
    assert (blame.fault, blame.rule) == (culprit, rule)


def test_without_a_fault_nobody_is_to_blame() -> None:
    with pytest.raises(ValueError, match="no fault"):
        find_culprit([])


faults = st.lists(
    st.one_of(
        st.builds(exited, st.integers(0, 7)),
        st.builds(killed, st.integers(0, 7), st.sampled_from(["SIGKILL", "SIGABRT", "SIGTERM"])),
        st.builds(hung, st.integers(0, 7)),
        st.builds(lost, st.sampled_from(["n1", "n2"])),
        st.builds(unstarted, st.just("n1")),
    ),
    min_size=1,
    max_size=6,
)


@given(faults)
def test_the_culprit_is_one_of_the_faults_and_later_equals_do_not_matter(faults: list[FaultDetected]) -> None:
    blame = find_culprit(faults)
    assert blame.fault in faults
    assert find_culprit([*faults, *faults]).fault is blame.fault
    assert find_culprit([*faults, exited(9)]).fault is blame.fault


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (exited(3, 7), "rank 3 on n1 exited with 7"),
        (killed(3), "rank 3 on n1 was killed by SIGKILL"),
        (hung(5), "rank 5 on n1 hung (late)"),
        (lost("n4"), "node n4 lost"),
        (unstarted("n2"), "n2 could not start (no space)"),
    ],
)
def test_a_fault_is_one_clause(fault: FaultDetected, text: str) -> None:
    assert describe(fault) == text


# --- who holds the others up -------------------------------------------------------------------------

SEEN = [
    ("stopped", [snapshot(0), snapshot(1, state="T"), snapshot(2, 9)], 1, "its process is stopped"),
    ("traced", [snapshot(0), snapshot(1, state="t")], 1, "its process is traced"),
    ("dead", [snapshot(0, 3), snapshot(1, state="Z")], 1, "its process is dead"),
    ("behind", [snapshot(0), snapshot(1), snapshot(2, 9)], 2, "it is behind the others, with 9 heartbeats"),
    (
        "most behind for longest",
        [snapshot(0), snapshot(1, 9, 5.0), snapshot(2, 9, 7.0)],
        2,
        "it is behind the others, with 9 heartbeats",
    ),
    ("in the kernel", [snapshot(0), snapshot(1, state="D")], 1, "its process is stuck in the kernel"),
    ("running", [snapshot(0), snapshot(1, state="R"), snapshot(2)], 1, "its process runs"),
    ("several run", [snapshot(0, age_s=7.0), snapshot(1, state="R"), snapshot(2, state="R")], 0, "oldest"),
    ("oldest", [snapshot(0), snapshot(1, age_s=6.5)], 1, "its last heartbeat is the oldest, 6.500 s ago"),
    ("alone", [snapshot(0, state="R")], 0, "its last heartbeat is the oldest"),
    ("nobody is monitored", [snapshot(0, monitored=False)], 7, "its deadline passed first"),
    ("nobody answers", [], 7, "its deadline passed first"),
    ("not monitored", [snapshot(0, 0, monitored=False, state="T"), snapshot(1)], 1, "oldest"),
]


@pytest.mark.parametrize(("snapshots", "rank", "why"), [seen[1:] for seen in SEEN], ids=[s[0] for s in SEEN])
def test_the_hung_rank_is_found(snapshots: list[object], rank: int, why: str) -> None:
    for order in itertools.permutations(snapshots):
        found, evidence = find_hung_rank(order, 7)  # type: ignore[arg-type]
        assert found == rank
        assert why in evidence
