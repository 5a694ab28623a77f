"""Plug-ins at work: four ranks with one after the other, through the whole of in-process restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("inprocess_parts_ranks.py")

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ranks]:
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=250,
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "error"},
    )
    answer: dict[str, Ranks] = json.loads(done.stdout)
    return answer


def last(ranks: Ranks) -> list[list[str] | None]:
    """Return RANK and WORLD_SIZE of the last call of each rank's function; None: killed."""
    return [None if "killed" in rank else (rank["entered"] or [[]])[-1] for rank in ranks]


def test_a_spare_of_the_tree_takes_the_number_of_a_killed_rank(found: dict[str, Ranks]) -> None:
    ranks = found["tree"]
    assert last(ranks) == [["0", "3"], None, ["2", "3"], ["1", "3"]]
    assert len(ranks[3]["entered"]) == 1
    assert [rank.get("returned") for rank in ranks] == ["0", None, "2", "1"]


def test_only_a_multiple_of_ranks_is_active(found: dict[str, Ranks]) -> None:
    ranks = found["divisible"]
    # Rank 3 fills the gap of rank 0; rank 2 is one too many.
    assert last(ranks) == [None, ["1", "2"], ["2", "4"], ["0", "2"]]
    assert [rank.get("returned") for rank in ranks] == [None, "1", None, "0"]
    assert "raised" not in ranks[2]


def test_a_group_that_lost_a_rank_leaves(found: dict[str, Ranks]) -> None:
    ranks = found["groups"]
    assert [rank.get("returned") for rank in ranks] == ["0", "1", None, None]
    assert ranks[2]["raised"] == "RankDiscarded"
    assert last(ranks)[:2] == [["0", "2"], ["1", "2"]]


def test_a_node_that_lost_a_rank_leaves(found: dict[str, Ranks]) -> None:
    ranks = found["node"]
    assert ranks[1]["raised"] == "RankDiscarded"
    assert last(ranks)[2:] == [["0", "2"], ["1", "2"]]


def test_a_warm_spare_is_activated(found: dict[str, Ranks]) -> None:
    ranks = found["spares"]
    assert last(ranks) == [["0", "2"], None, ["1", "2"], []]
    assert [rank.get("returned") for rank in ranks] == ["0", None, "1", None]


def test_a_finalize_that_hangs_ends_its_rank_alone(found: dict[str, Ranks]) -> None:
    ranks = found["finalize"]
    assert (ranks[1]["raised"], ranks[1]["why"]) == (
        "TimeoutError",
        "finalize function never took longer than 0.2 s",
    )
    assert [rank.get("returned") for rank in ranks] == ["0", None, "1", "2"]


def test_a_rank_that_fails_too_often_leaves(found: dict[str, Ranks]) -> None:
    ranks = found["faults"]
    assert ranks[2]["raised"] == "HealthCheckError"
    assert "max_rank_faults is 1" in ranks[2]["why"]
    assert [rank.get("returned") for rank in ranks] == ["0", "1", None, "2"]


def test_a_launcher_around_it_reads_what_happens(found: dict[str, Ranks]) -> None:
    begin = ["state=initialize", "state=handling stage=starting", "state=handling stage=completed"]
    assert found["nested"][0]["said"] == [*begin, "state=finalized"]
    assert [rank["said"] for rank in found["nested"][1:]] == [[]] * 3


def test_the_limit_of_iterations_ends_every_rank(found: dict[str, Ranks]) -> None:
    ranks = found["aborted"]
    assert [rank["raised"] for rank in ranks] == ["RestartAbort"] * 4
    # Some may not have come to their second call when the fault of the others ended it.
    assert max(len(rank["entered"]) for rank in ranks) == 2
    # An abort that was under way may say its part after that.
    assert "state=aborted" in ranks[0]["said"]
