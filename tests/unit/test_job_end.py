"""Which nodes a requeued job does without."""

from __future__ import annotations

import pytest

from nvrx_slurm.coordinator.job_end import nodes_to_exclude

NODES = ("n1", "n2", "n3")
HOST = "n1"


@pytest.mark.parametrize(
    ("excluded", "lost", "nodes", "without"),
    [
        ([], [], NODES, []),
        (["n2"], [], NODES, ["n2"]),
        ([], ["n2"], NODES, ["n2"]),
        (["n2"], ["n3"], NODES, ["n2", "n3"]),
        # One lost node is lost, also where it was the only other one.
        ([], ["n2"], ("n1", "n2"), ["n2"]),
        # What was excluded has been found to be bad, whoever is left.
        (["n1"], [], ("n1",), ["n1"]),
        (["n2", "n3"], [], NODES, ["n2", "n3"]),
    ],
)
def test_bad_nodes_are_left_out(
    excluded: list[str], lost: list[str], nodes: tuple[str, ...], without: list[str]
) -> None:
    said: list[str] = []
    assert nodes_to_exclude(excluded, lost, nodes, HOST, said.append) == without
    assert said == []


def test_a_host_that_has_lost_all_others_may_be_the_one_that_was_cut_off() -> None:
    said: list[str] = []
    assert nodes_to_exclude([], ["n2", "n3"], NODES, HOST, said.append) == []
    assert "this host may have been the cause" in said[0]
    assert nodes_to_exclude(["n2"], ["n3", "n4"], (*NODES, "n4"), HOST, said.append) == ["n2"]
