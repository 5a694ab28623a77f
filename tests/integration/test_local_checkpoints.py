"""Local checkpoints between real ranks: saved, lost in every way, fetched from copies, never loaded torn.

Four gloo ranks, two to a pretended node, go through all scenarios in one launch; each test looks at what they
have reported of one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

RANK = Path(__file__).with_name("local_checkpoint_rank.py")
SAVER = Path(__file__).with_name("local_checkpoint_saver.py")
WORLD = 4
PATIENCE_S = 240

SCENARIOS = [
    "a_save_is_found_and_loaded_by_another_manager",
    "the_last_save_replaces_those_before",
    "the_same_state_gives_the_same_file",
    "a_lost_node_gets_its_parts_back_and_keeps_them",
    "ranks_that_have_moved_get_their_parts",
    "permuted_ranks_get_their_parts",
    "a_loss_of_all_copies_is_named",
    "a_damaged_copy_is_passed_over_and_replaced",
    "damage_everywhere_is_named_on_all_ranks",
    "a_torn_or_empty_file_is_no_part",
    "a_leftover_of_a_killed_writer_stops_nobody",
    "a_failing_or_silent_write_is_an_error_on_all_ranks_and_leaves_nothing",
    "what_can_not_be_saved_on_one_rank_is_an_error_on_all",
    "a_background_save_is_the_state_at_the_call",
    "a_background_write_that_fails_is_an_error_on_all_ranks",
    "shards_of_fsdp2_come_back_as_shards",
    "a_ladder_takes_the_layer_with_the_newest_whole_checkpoint",
    "too_little_room_is_said_before_anything_is_written",
    "a_rank_that_can_not_look_is_an_error_on_all",
    "irregular_cliques_hold_exactly_their_members_parts",
    "replicas_are_equal_to_what_was_given",
    "a_group_carries_tensors_objects_and_states",
    "an_iteration_that_can_not_be_is_refused",
    "four_ranks_save_for_two",
    "a_rank_that_stays_away_is_named_in_time",
]
AFTERWARDS = ["two_ranks_load_what_four_have_saved"]


@dataclass
class Ranks:
    """Rank processes that meet on a store of this process."""

    processes: list[subprocess.Popen[str]]
    store: dist.TCPStore

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def start(program: Path, directory: Path, *arguments: str, world: int = WORLD) -> Ranks:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launchers = ("NVRX_", "TORCHELASTIC_", "SLURM_", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    processes = []
    for rank in range(world):
        environ = clean | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world // 2),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, program, directory, *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return Ranks(processes, store)


Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank returned, by scenario."""
    directory = tmp_path_factory.mktemp("ranks")
    return launch(directory, SCENARIOS, WORLD) | launch(directory, AFTERWARDS, 2)


def launch(directory: Path, scenarios: list[str], world: int) -> Results:
    ranks = start(RANK, directory, *scenarios, world=world)
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks.processes]
    finally:
        ranks.stop()
    reported: Results = {}
    for rank, output in enumerate(outputs):
        lines = (directory / f"r{rank}").read_text().splitlines() if (directory / f"r{rank}").exists() else []
        for line in map(json.loads, lines):
            value = (
                AssertionError(f"rank {rank}: {line['error']}\n{output}") if line["error"] else line["value"]
            )
            reported.setdefault(line["name"], []).append(value)
    for name in scenarios:
        got = reported.setdefault(name, [])
        got += [AssertionError(f"a rank did not get as far:\n{outputs}")] * (world - len(got))
    return reported


def of(results: Results, scenario: str) -> list[Any]:
    for value in results[scenario]:
        if isinstance(value, AssertionError):
            raise value
    return results[scenario]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_all_ranks(results: Results, scenario: str) -> None:
    assert len(of(results, scenario)) == WORLD


def test_retention_is_by_iteration_and_a_clique_keeps_the_parts_of_its_members(results: Results) -> None:
    files, *others = of(results, "the_last_save_replaces_those_before")
    assert all(each == files for each in others)
    cliques = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    one = [f"node{r // 2}/{r}/iter_0000002_{o}_local.pt" for r in range(4) for o in cliques[r]]
    two = [
        f"node{r // 2}/{r}/iter_000000{i}_{o}_local.pt" for r in range(4) for i in (2, 3) for o in cliques[r]
    ]
    assert files == one + two


def test_an_irregular_clique_keeps_the_parts_of_its_members(results: Results) -> None:
    files = of(results, "irregular_cliques_hold_exactly_their_members_parts")[0]
    cliques = {0: (0, 2, 3), 1: (1,), 2: (0, 2, 3), 3: (0, 2, 3)}
    assert files == [f"node{r // 2}/{r}/iter_0000001_{o}_local.pt" for r in range(4) for o in cliques[r]]


def test_a_loss_names_the_missing_parts_on_all_ranks(results: Results) -> None:
    for message in of(results, "a_loss_of_all_copies_is_named"):
        assert message == "No local checkpoint can be loaded: iteration 3 lacks the parts of rank 1."
    for message in of(results, "damage_everywhere_is_named_on_all_ranks"):
        assert "id=(3, 2, '')" in message
        assert "part of rank 2" in message


def test_errors_of_one_rank_are_told_by_all(results: Results) -> None:
    for failed, silent in of(
        results, "a_failing_or_silent_write_is_an_error_on_all_ranks_and_leaves_nothing"
    ):
        expected = "Failure during saving local checkpoint from iteration 6 (last valid iteration is -1)"
        assert failed == f"{expected}: rank 1: OSError: [Errno 28] No space left on device"
        assert silent == expected
    for sparse, foreign in of(results, "what_can_not_be_saved_on_one_rank_is_an_error_on_all"):
        assert "rank 2: CheckpointingException: The tensor bad is torch.sparse_coo: make it dense" in sparse
        assert "rank 2: CheckpointingException: The state without its tensors can't be read back" in foreign
    for unseen in of(results, "a_rank_that_can_not_look_is_an_error_on_all"):
        assert "rank 1: CheckpointingException" in unseen
        assert "no directory of uid" in unseen
    for lack in of(results, "too_little_room_is_said_before_anything_is_written"):
        assert "has 10000 bytes free, the save needs" in lack


def test_a_background_save_replaces_those_before(results: Results) -> None:
    files = of(results, "a_background_save_is_the_state_at_the_call")[0]
    cliques = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    assert files == [f"node{r // 2}/{r}/iter_0000003_{o}_local.pt" for r in range(4) for o in cliques[r]]


def test_a_background_write_that_fails_is_told_by_all(results: Results) -> None:
    for message in of(results, "a_background_write_that_fails_is_an_error_on_all_ranks"):
        expected = "Failure during saving local checkpoint from iteration 2 (last valid iteration is 1)"
        assert f"{expected}: rank 2: FileNotFoundError: [Errno 2] No such file or directory" in message


def test_a_ladder_says_which_layer_it_took_and_why(results: Results) -> None:
    for told in of(results, "a_ladder_takes_the_layer_with_the_newest_whole_checkpoint"):
        assert told == [
            [6, "local", "the newest that is whole; shared has step 4"],
            [4, "shared", "the newest that is whole; local has none"],
        ]


def test_another_number_of_ranks_loads_what_can_be_sharded_anew_and_says_what_can_not(
    results: Results,
) -> None:
    for whole, refused, other in of(results, "two_ranks_load_what_four_have_saved"):
        assert "find_latest" in whole
        assert "own is not the same on all ranks that saved it, and no DTensor" in refused
        assert "own was saved, and is not in what is to be loaded" in other


def test_leftovers_are_removed(results: Results) -> None:
    files = of(results, "a_leftover_of_a_killed_writer_stops_nobody")[0]
    assert len(files) == 8
    assert not [name for name in files if "tmp" in name]


def test_the_others_miss_a_rank_within_the_time_out_and_name_it(results: Results) -> None:
    *others, absent = of(results, "a_rank_that_stays_away_is_named_in_time")
    assert absent == {}
    for each in others:
        assert "rank 3 did not take part within 2 s" in each["error"]
        assert each["after_s"] < 20


@pytest.mark.timeout(600)
def test_whoever_is_killed_while_saving_the_newest_save_that_ended_is_loaded(tmp_path: Path) -> None:
    chance = random.Random(5)
    ended = -1
    for wipe in (None, 0, None):
        ranks = start(SAVER, tmp_path)
        try:
            victim = ranks.processes[chance.randrange(WORLD)]
            loaded = said(victim, "loaded")
            # All ranks had ended it, so it must be there; the one that was being saved may be.
            assert ended <= loaded <= ended + 1, loaded
            ended = loaded
            for _ in range(chance.randrange(2, 6)):
                ended = said(victim, "saved")
            said(victim, "began")
            time.sleep(chance.random() * 0.05)  # somewhere in a save
            victim.kill()
            # On a busy machine it has come further than was heard.
            assert victim.stdout is not None
            ended = max(
                [ended, *(int(line.split()[1]) for line in victim.stdout if line.startswith("saved "))]
            )
            outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in ranks.processes]
        finally:
            ranks.stop()
        for process, output in zip(ranks.processes, outputs, strict=True):
            assert process.returncode != 0
            if process is not victim:
                assert "ExchangeError" in output, output
        if wipe is not None:
            shutil.rmtree(tmp_path / f"node{wipe}")


def said(process: subprocess.Popen[str], what: str) -> int:
    """The number after ``what`` in a line of the process's output, the next one with that word."""
    assert process.stdout is not None
    before = []
    for line in process.stdout:
        before.append(line)
        if line.startswith(f"{what} "):
            return int(line.split()[1])
    raise AssertionError(f"never said {what}: {before}")
