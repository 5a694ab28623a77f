"""Defects of NVIDIA's checkpoints, by their number in our notes: none is ours.

Most are met by tests of what ours promises; ``MET_BY`` says which. The others are here.
"""

from __future__ import annotations

import ast
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed.checkpoint as dcp

import nvrx_slurm.checkpointing
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from tests.unit.test_async_checkpoint import MANY, SIZE, held_copy

TESTS = Path(__file__).parents[1]

MET_BY = {
    1: [
        "unit/test_async_checkpoint.py::test_strict_what_changes_after_the_call_is_not_in_the_checkpoint",
        "unit/test_async_checkpoint.py::test_overlapped_an_optimizer_step_waits_until_its_parameters_are_copied",
        "unit/test_async_checkpoint.py::test_memory_is_allocated_once_and_the_users_tensors_are_left_alone",
        "integration/test_async_dcp.py::"
        "test_fsdp2_model_and_optimizer_are_saved_while_they_train_and_torch_loads_them",
    ],
    2: [
        "unit/test_async_checkpoint.py::test_a_call_that_goes_wrong",
        "unit/test_async_checkpoint.py::test_a_worker_that_dies_while_it_is_idle_is_replaced",
        "unit/test_async_checkpoint.py::test_close_after_the_workers_death_does_not_hang",
        "unit/test_checkpoint_peer_defects.py::test_what_preload_raises_is_an_error_of_the_save",
    ],
    3: [
        "unit/test_async_checkpoint.py::test_an_aborted_save_is_forgotten_with_its_finalizers",
        "unit/test_checkpoint_peer_defects.py::test_what_an_aborted_save_wrote_is_not_taken_for_the_next",
    ],
    4: [
        "unit/test_async_checkpoint.py::"
        "test_killed_after_a_save_was_copied_the_worker_still_writes_it_and_ends",
        "unit/test_async_checkpoint.py::test_killed_during_the_copy_nothing_is_left_and_the_worker_ends",
    ],
    5: ["integration/test_async_dcp.py::test_a_cached_plan_is_used_again_until_the_structure_changes"],
    6: ["unit/test_async_checkpoint.py::test_the_files_of_one_save_are_written_at_the_same_time"],
    7: [
        "unit/test_async_checkpoint.py::test_saves_are_finalized_in_order_with_their_own_indices",
        "integration/test_async_dcp.py::test_ranks_that_finalize_different_saves_are_told",
    ],
    8: ["unit/test_async_checkpoint.py::test_a_worker_for_one_save_tells_as_well_what_went_wrong"],
    9: [
        "unit/test_async_checkpoint.py::test_a_worker_for_one_save_tells_as_well_what_went_wrong",
        "unit/test_checkpoint_peer_defects.py::test_close_with_abort_aborts",
    ],
    10: [
        "integration/local_checkpoint_rank.py::a_torn_or_empty_file_is_no_part",
        "integration/local_checkpoint_rank.py::a_damaged_copy_is_passed_over_and_replaced",
        "integration/local_checkpoint_rank.py::two_ranks_load_what_four_have_saved",
        "unit/test_local_checkpoint_plans.py::"
        "test_a_checkpoint_of_another_number_of_ranks_is_not_taken_for_one_of_this_job",
    ],
    11: ["integration/local_checkpoint_rank.py::a_leftover_of_a_killed_writer_stops_nobody"],
    12: ["unit/test_device_copies.py::test_a_local_save_copies_from_a_device_before_it_goes_on"],
    13: [
        "unit/test_checkpoint_storage.py::test_file_and_directory_are_synced_in_this_order",
        "unit/test_checkpoint_peer_defects.py::test_each_file_is_whole_when_it_is_synced_and_so_is_its_name",
    ],
    14: [
        "integration/test_async_dcp.py::test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_committed"
    ],
    15: [
        "unit/test_checkpoint_peer_defects.py::test_cached_metadata_is_that_of_the_checkpoint_that_is_there"
    ],
    16: [
        "integration/local_checkpoint_rank.py::permuted_ranks_get_their_parts",
        "integration/local_checkpoint_rank.py::ranks_that_have_moved_get_their_parts",
    ],
    17: ["integration/local_checkpoint_rank.py::a_lost_node_gets_its_parts_back_and_keeps_them"],
    18: ["unit/test_checkpoint_peer_defects.py::test_to_wait_for_a_save_is_to_sleep_until_it_is_done"],
    19: [
        "unit/test_checkpoint_peer_defects.py::test_a_trainer_has_one_more_process_and_no_file_in_shared_memory"
    ],
    20: ["unit/test_checkpoint_peer_defects.py::test_who_wants_no_fsync_gets_none"],
    21: ["unit/test_checkpoint_peer_defects.py::test_nothing_needs_psutil"],
    22: ["unit/test_checkpoint_peer_defects.py::test_tensors_are_let_go_when_they_are_saved"],
    23: ["unit/test_async_checkpoint.py::test_a_worker_that_the_kernel_holds_is_given_up"],
    24: [
        "unit/test_checkpoint_metadata.py::test_nothing_is_executed",
        "unit/test_local_checkpoint_parts.py::test_no_code_is_run_that_a_part_names",
    ],
    25: ["unit/test_local_checkpoint_plans.py::test_names_are_those_of_the_specification"],
    26: [
        "unit/test_checkpoint_peer_defects.py::test_a_trainer_has_one_more_process_and_no_file_in_shared_memory"
    ],
    27: [
        "unit/test_checkpoint_peer_defects.py::test_a_trainer_has_one_more_process_and_no_file_in_shared_memory"
    ],
    28: ["unit/test_checkpoint_peer_defects.py::test_why_the_worker_of_a_directory_has_died_is_told"],
}


@pytest.mark.parametrize("number", range(1, 29))
def test_each_defect_has_tests_of_ours(number: int) -> None:
    for each in MET_BY[number]:
        file, name = each.split("::")
        tree = ast.parse((TESTS / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, each


def raise_in_preload() -> NoReturn:
    raise ArithmeticError("preload broke")


def plan(path: Path, state: dict[str, Any], **how: Any) -> AsyncRequest:
    writer = FileSystemWriterAsync(path, **how)
    planned = save_state_dict_async_plan(state, writer)
    save, preload, arguments = writer.get_save_function_and_args()
    return AsyncRequest(
        save, arguments, [partial(save_state_dict_async_finalize, *planned)], preload_fn=preload
    )


def loaded(path: Path, **how: Any) -> float:
    state = {"w": torch.zeros(SIZE)}
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(path, **how), no_dist=True)
    return float(state["w"].unique().item())


def test_what_preload_raises_is_an_error_of_the_save() -> None:  # C.2.2
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(print, [1, None], [], preload_fn=raise_in_preload))
    with pytest.raises(AsyncSaveError, match="ArithmeticError: preload broke"):
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def test_what_an_aborted_save_wrote_is_not_taken_for_the_next(tmp_path: Path) -> None:  # C.2.3
    queue = AsyncCallsQueue()
    queue.schedule_async_request(plan(tmp_path / "a", {"w": torch.ones(SIZE), "more": torch.ones(SIZE)}))
    assert queue._pending[0].ticket.wait(60)  # written, so its results are there
    queue.close(abort=True)
    queue.schedule_async_request(plan(tmp_path / "b", {"w": torch.full((SIZE,), 2.0)}))
    queue.schedule_async_request(plan(tmp_path / "a", {"w": torch.full((SIZE,), 3.0)}))
    queue.close()
    assert (loaded(tmp_path / "b"), loaded(tmp_path / "a")) == (2.0, 3.0)


def test_close_with_abort_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # C.2.9
    held = threading.Lock()
    monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", held_copy(held))
    checkpoint = TorchAsyncCheckpoint()
    with held:
        checkpoint.async_save([torch.zeros(SIZE) for _ in range(MANY)], tmp_path / "a.pt")
        checkpoint.close(abort=True)
    assert list(tmp_path.iterdir()) == []


def test_each_file_is_whole_when_it_is_synced_and_so_is_its_name(  # C.2.13
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    renamed: list[str] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.is_dir():
            synced[path.name] = len(renamed)
        else:
            synced[path.name.removeprefix(".").partition(".nvrx-tmp-")[0]] = os.fstat(fd).st_size
        fsync(fd)

    def noted_rename(source: Path, target: Path) -> None:
        renamed.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    plan(tmp_path / "a", {"w": torch.ones(SIZE), "object": [1, 2]}, thread_count=2).execute_sync()
    files = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert {name: synced.pop(name) for name in files} == files
    assert renamed[-1] == ".metadata"
    assert synced["a"] == len(renamed)
    assert set(files) <= set(renamed)


@pytest.mark.parametrize("cached", [True, False])
def test_cached_metadata_is_that_of_the_checkpoint_that_is_there(  # C.2.15
    tmp_path: Path, cached: bool
) -> None:
    for value in (1.0, 2.0):
        plan(tmp_path / "a", {"w": torch.full((SIZE,), value), str(value): torch.ones(2)}).execute_sync()
        assert loaded(tmp_path / "a", cache_metadata=cached) == value
        metadata = CachedMetadataFileSystemReader(tmp_path / "a", cached).read_metadata()
        assert metadata.state_dict_metadata.keys() == {"w", str(value)}
    first = CachedMetadataFileSystemReader(tmp_path / "a", cached).read_metadata()
    again = CachedMetadataFileSystemReader(tmp_path / "a", cached).read_metadata()
    assert (first is again) is cached
    CachedMetadataFileSystemReader.clear_metadata_cache(tmp_path / "a")
    assert CachedMetadataFileSystemReader(tmp_path / "a").read_metadata() is not first


def test_to_wait_for_a_save_is_to_sleep_until_it_is_done(  # C.2.18
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sleep(_seconds: float) -> NoReturn:
        raise AssertionError("a fixed time was waited for")

    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"a": torch.ones(SIZE)}, tmp_path / "a.pt")
    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", no_sleep)
        checkpoint.finalize_async_save(blocking=True)
    assert (tmp_path / "a.pt").exists()
    checkpoint.close()


TRAINER = """
import os, signal, sys, torch
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
forks, kept = [], []
os.register_at_fork(before=lambda: forks.append(1))
for persistent in (True, False):
    checkpoint = TorchAsyncCheckpoint(persistent)
    kept.append(checkpoint)
    for n in range(2):
        checkpoint.async_save([torch.ones(1 << 20)], f"{sys.argv[1]}/{persistent}.pt")
    checkpoint.finalize_async_save(blocking=True)
    if not persistent:
        checkpoint.close()
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
maps = "".join(open(f"/proc/{each}/maps").read() for each in ["self", *children])
print(len(children), len(forks), "/dev/shm/" in maps, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_has_one_more_process_and_no_file_in_shared_memory(tmp_path: Path) -> None:
    """No manager process (C.2.19), no fork of the trainer (26), nothing that outlives a SIGKILL (27)."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, tmp_path], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["1", "0", "False"]


@pytest.mark.parametrize("sync", [True, False])
def test_who_wants_no_fsync_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool) -> None:
    """C.2.20; the commit is synced all the same."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    request = plan(tmp_path / "a", {"w": torch.full((SIZE,), 5.0)}, sync_files=sync)
    request.execute_sync()
    assert any(".distcp" in name for name in synced) is sync
    assert any(".metadata" in name for name in synced)
    assert loaded(tmp_path / "a") == 5.0
    images = request.async_fn.images()  # type: ignore[union-attr]
    (image,) = [image for path, image in images if Path(path).suffix == ".distcp"]
    assert image.sync is sync  # as the worker is told


def test_nothing_needs_psutil() -> None:  # C.2.21
    for path in Path(nvrx_slurm.checkpointing.__path__[0]).rglob("*.py"):
        assert "psutil" not in path.read_text()


def test_tensors_are_let_go_when_they_are_saved(tmp_path: Path) -> None:  # C.2.22
    checkpoint = TorchAsyncCheckpoint()
    queue = checkpoint._get_async_calls_queue()
    tensors = {"a": torch.ones(SIZE), "small": torch.ones(3)}
    gone = [weakref.ref(tensor) for tensor in tensors.values()]
    checkpoint.async_save(tensors, tmp_path / "a.pt")
    queue.schedule_async_request(plan(tmp_path / "dcp", dict(tensors)))
    queue.schedule_async_request(AsyncRequest(pickle.dumps, (dict(tensors),), []))
    queue.maybe_finalize_async_calls(blocking=True)
    del tensors
    deadline = time.monotonic() + 20  # the copier's thread may be about to let go
    while any(each() is not None for each in gone) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [each() for each in gone] == [None, None]
    checkpoint.close()


@pytest.mark.parametrize("persistent", [True, False])
def test_why_the_worker_of_a_directory_has_died_is_told(  # C.2.28
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    held = threading.Lock()
    monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", held_copy(held))
    queue = AsyncCallsQueue(persistent)
    with held:
        queue.schedule_async_request(plan(tmp_path / "a", {"w": torch.ones(8 * SIZE)}))
        caller: Any = queue._caller
        worker = caller._current if persistent else caller._workers[-1]
        os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(AsyncSaveError, match="was killed by SIGKILL before the checkpoint was written"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert not (tmp_path / "a/.metadata").exists()
    queue.close()
