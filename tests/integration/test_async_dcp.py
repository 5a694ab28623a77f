"""Two real ranks save with torch.distributed.checkpoint, FSDP2 and faults included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError, Verification, manifest

WORLD = 2
SCENES = (
    "sharded_model_and_optimizer",
    "fsdp1",
    "fsdp1_local",
    "whole_parameters_are_freed_at_once",
    "several_files",
    "ranks_finish_at_different_calls",
    "ranks_finalize_different_saves",
    "one_rank_has_no_room",
    "one_rank_fails",
    "one_rank_cannot_pickle",
    "a_synchronous_save_fails_on_one_rank",
    "structure_changes_between_cached_saves",
    "plans_without_a_coordinator",
    "a_plan_of_its_own_that_fails_on_one_rank",
    "another_directory_is_named_at_the_load",
    "overwriting",
)
PATIENCE_S = 300.0
pytestmark = pytest.mark.timeout(PATIENCE_S + 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have played all scenes."""
    folder = tmp_path_factory.mktemp("dcp")
    script = Path(__file__).parent / "dcp_rank.py"
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), folder, *SCENES], env=environ)
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            rank.wait(PATIENCE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return folder


def saw(folder: Path, scene: str) -> list[dict[str, Any]]:
    """What each rank saw of a scene."""
    seen = [json.loads((folder / f"saw{rank}.json").read_text())[scene] for rank in range(WORLD)]
    for each in seen:
        assert "traceback" not in each, each["traceback"]
    return seen


def test_fsdp2_model_and_optimizer_are_saved_while_they_train_and_torch_loads_them(folder: Path) -> None:
    for each in saw(folder, "sharded_model_and_optimizer"):
        assert set(each.values()) == {True}, each


@pytest.mark.parametrize("scene", ["fsdp1", "fsdp1_local"])
def test_fsdp1_state_is_saved_and_torch_loads_it(folder: Path, scene: str) -> None:
    assert saw(folder, scene) == [{"loaded": True}] * 2


def test_parameters_that_fsdp_frees_right_after_the_call_are_saved_whole(folder: Path) -> None:
    for each in saw(folder, "whole_parameters_are_freed_at_once"):
        assert each == {"fsdp1": True, "fsdp2": True}


def test_each_thread_and_each_group_of_tensors_has_its_files_and_every_bit_is_checksummed(
    folder: Path,
) -> None:
    for each in saw(folder, "several_files"):
        assert each["equal"]
        assert {"__0_0.distcp", "__0_1.distcp", ".metadata"} <= set(each["files"])
        assert any(name.startswith("b__") for name in each["files"])
    files = list((folder / "files").glob("*.distcp"))
    assert {storage.verify_file(path) for path in files} == {Verification.INTACT}
    listed = manifest.read(folder / "files")
    assert listed is not None
    assert set(listed.files) == {path.name for path in files}


def test_a_save_counts_when_the_last_rank_has_written_at_whatever_call(folder: Path) -> None:
    assert saw(folder, "ranks_finish_at_different_calls") == [{"early": [], "late": 1}] * 2


def test_ranks_that_finalize_different_saves_are_told(folder: Path) -> None:  # C.2.7
    for rank, each in enumerate(saw(folder, "ranks_finalize_different_saves")):
        assert each == {
            "error": f"ranks finalize different saves: 0 and 1, here {1 - rank}",
            "finalized": [],
        }


def test_a_save_that_one_rank_has_no_room_for_is_none_on_any(folder: Path) -> None:
    for rank, each in enumerate(saw(folder, "one_rank_has_no_room")):
        assert each == {
            "indices": [0, 2],
            "finalized": [2],
            "committed": [False, True],
            "written": None if rank else True,
        }


def test_what_fails_on_one_rank_is_an_error_on_all_and_saves_work_again(folder: Path) -> None:
    first, second = saw(folder, "one_rank_fails")
    assert first["finalized"] == second["finalized"] == []
    assert first["error"].endswith("failed on rank 1: see the error there")
    assert second["error"].endswith("failed on this rank: ArithmeticError: broken")


def test_what_cannot_be_pickled_on_one_rank_is_an_error_on_all(folder: Path) -> None:
    first, second = saw(folder, "one_rank_cannot_pickle")
    assert "failed on rank 1" in first["error"]
    assert "pickle" in second["error"]


def test_a_synchronous_save_that_fails_on_one_rank_is_an_error_on_all_and_not_committed(folder: Path) -> None:
    first, second = saw(folder, "a_synchronous_save_fails_on_one_rank")
    for each in (first, second):
        assert "Worker failure: disk is full" in each["error"]
        assert each["committed"] is False


def test_a_cached_plan_is_used_again_until_the_structure_changes(folder: Path) -> None:
    for each in saw(folder, "structure_changes_between_cached_saves"):
        assert each == {"reused": [False, True, True, False], "equal": True}


def test_plans_are_known_from_the_save_before_or_the_checkpoint_that_was_loaded(folder: Path) -> None:
    for each in saw(folder, "plans_without_a_coordinator"):
        last, loaded, new = (True, False), (False, True), (False, False)
        assert list(map(tuple, each["how"])) == [new, last, last, loaded, last, new, new]
        assert each["gathered"] == [1, 0]
        assert each["loaded"] == [4.0, 6.0, 7.0, 8.0]


def test_a_plan_that_fails_on_one_rank_is_an_error_on_all(folder: Path) -> None:
    assert saw(folder, "a_plan_of_its_own_that_fails_on_one_rank") == [{"error": [1]}] * 2


def test_the_checkpoint_that_is_named_at_the_load_is_the_one_that_is_read(folder: Path) -> None:
    assert saw(folder, "another_directory_is_named_at_the_load") == [{"loaded": 2.0, "of": "named2"}] * 2


def test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_committed(folder: Path) -> None:
    for each in saw(folder, "overwriting"):
        assert each["seen"] == [1.0, 1.0, 2.0]
        assert each["files"] == WORLD
        assert each["all"] == WORLD + 2  # .metadata and its manifest


def test_a_flipped_bit_anywhere_in_a_data_file_is_found(folder: Path) -> None:
    path = next((folder / "fsdp2").glob("__1_*.distcp"))
    content = bytearray(path.read_bytes())
    for position in range(7, len(content), len(content) // 40):
        content[position] ^= 4
        path.write_bytes(content)
        with pytest.raises(CorruptCheckpointError):
            storage.verify_file(path)
        content[position] ^= 4
    path.write_bytes(content)
    assert storage.verify_file(path) is Verification.INTACT
