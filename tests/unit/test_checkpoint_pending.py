"""Saves that were written and not committed: which of them count, and in what order."""

from __future__ import annotations

import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from nvrx_slurm.checkpointing.async_ckpt import filesystem_async, save_names
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.roll_forward import finish_written_save
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.inspection import find, remove
from nvrx_slurm.checkpointing.storage import manifest, pending
from nvrx_slurm.checkpointing.storage.durable import locked
from nvrx_slurm.checkpointing.storage.folders import LocalFolder


@pytest.fixture(autouse=True)
def loads_are_those_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_names, "is_own", lambda _save: False)


is_own = save_names.is_own


def plan(folder: Path, value: float) -> tuple[Any, ...]:
    return save_state_dict_async_plan({"a": torch.full((9,), value), "n": 5}, FileSystemWriterAsync(folder))


def write(planned: tuple[Any, ...]) -> None:
    save, _, arguments = planned[0].get_save_function_and_args()
    save(*arguments)


def written(folder: Path, value: float) -> tuple[Any, ...]:
    planned = plan(folder, value)
    write(planned)
    return planned


def commit(folder: Path, value: float) -> None:
    save_state_dict_async_finalize(*written(folder, value))


def loaded(folder: Path) -> float:
    state = {"a": torch.zeros(9), "n": 0}
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(folder), no_dist=True)
    assert state["n"] == 5
    return float(state["a"].unique().item())


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition(".")[2] or path.name for path in folder.iterdir())


def test_what_was_written_counts_at_the_next_load(tmp_path: Path) -> None:
    written(tmp_path, 1)
    assert [each.why for each in find(tmp_path)] == ["all is written: whoever loads it commits it"]
    assert loaded(tmp_path) == 1
    written(tmp_path, 2)
    assert loaded(tmp_path) == 2
    assert len(list(tmp_path.iterdir())) == 3  # data, manifest, .metadata


def test_the_newest_that_was_written_counts(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    written(tmp_path, 2)
    written(tmp_path, 3)
    plan(tmp_path, 4)
    assert loaded(tmp_path) == 3
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_an_older_one_never_takes_the_place_of_a_newer_one(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    older = written(tmp_path, 2)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    commit(tmp_path, 3)
    for path, content in kept.items():  # as if a slow file system had not shown them being removed
        if path.name.startswith("nvrx-plan") or path.suffix == ".distcp":
            path.write_bytes(content)
    assert loaded(tmp_path) == 3
    save_state_dict_async_finalize(*older)  # by a trainer that is late: no error, no effect
    assert loaded(tmp_path) == 3


def test_its_own_trainer_finds_it_committed_and_goes_on(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    first = written(tmp_path, 2)
    assert finish_written_save(tmp_path) is not None
    save_state_dict_async_finalize(*first)
    assert loaded(tmp_path) == 2
    commit(tmp_path, 3)
    assert loaded(tmp_path) == 3


def test_ranks_of_the_job_leave_a_save_to_their_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    commit(tmp_path, 1)
    planned = written(tmp_path, 2)
    assert loaded(tmp_path) == 1
    save_state_dict_async_finalize(*planned)
    assert loaded(tmp_path) == 2


def test_a_destroyed_group_is_no_job_any_more(tmp_path: Path) -> None:
    save_names._sessions.pop(save_names._Alone, None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save = plan(tmp_path, 1)[0]._save
        assert is_own(save)
    finally:
        dist.destroy_process_group()
    assert not is_own(save)


@pytest.mark.parametrize("lost", ["piece", "plan", "all but the names", "note"])
def test_what_is_not_whole_never_counts(tmp_path: Path, lost: str) -> None:
    commit(tmp_path, 1)
    before = set(tmp_path.glob("*.distcp"))
    written(tmp_path, 2)
    (data,) = set(tmp_path.glob("*.distcp")) - before
    (planned,) = tmp_path.glob("nvrx-plan-*")
    if lost == "piece":
        data.unlink()
    elif lost == "plan":
        planned.write_bytes(planned.read_bytes()[:-5])
    elif lost == "note":
        data.write_bytes(data.read_bytes().replace(b"NVRXNOTE", b"NVRXNOTA"))
    else:
        data.write_bytes(b"")
    assert loaded(tmp_path) == 1
    commit(tmp_path, 3)
    assert loaded(tmp_path) == 3


def test_it_is_not_committed_in_place_of_what_another_program_has_saved(tmp_path: Path) -> None:
    written(tmp_path, 1)
    dcp.save({"a": torch.full((9,), 7.0), "n": 5}, checkpoint_id=tmp_path, no_dist=True)
    assert loaded(tmp_path) == 7


def test_ranks_that_find_different_checkpoints_load_none(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    readers = [CachedMetadataFileSystemReader(tmp_path) for _ in range(2)]
    plans = []
    for reader in readers:
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(dcp.planner.LoadPlan([])))
        commit(tmp_path, 2)
    with pytest.raises(storage_error(), match="different checkpoints"):
        readers[0].prepare_global_plan(plans)
    assert readers[0].prepare_global_plan([dataclasses.replace(plans[0])] * 2)


def storage_error() -> type[Exception]:
    from nvrx_slurm.checkpointing.storage import CorruptCheckpointError

    return CorruptCheckpointError


def test_two_jobs_that_save_to_one_directory_at_a_time_leave_one_whole_save(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    mine, other = plan(tmp_path, 2), plan(tmp_path, 3)
    write(mine)
    write(other)
    errors = []

    def finish(planned: tuple[Any, ...]) -> None:
        try:
            save_state_dict_async_finalize(*planned)
        except CheckpointException as error:
            errors.append(error)

    threads = [threading.Thread(target=finish, args=[each]) for each in (mine, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded(tmp_path) == 3  # which was planned later
    assert len(list(tmp_path.glob("*.distcp"))) == 1
    assert not errors


def test_one_process_commits_at_a_time_and_a_killed_one_keeps_nobody_out(tmp_path: Path) -> None:
    inside: list[int] = []

    def enter() -> None:
        with locked(tmp_path):
            inside.append(1)
            assert len(inside) == 1
            inside.pop()

    (tmp_path / ".commit.nvrx-tmp-lock").touch()  # left by a killed one
    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_is_a_link_of_somebody_else_is_not_followed(tmp_path: Path) -> None:
    commit(tmp_path / "a", 1)
    written(tmp_path / "a", 2)
    (planned,) = (tmp_path / "a").glob("nvrx-plan-*")
    planned.rename(tmp_path / "elsewhere")
    planned.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        pending.plans(LocalFolder(tmp_path / "a"))
    assert loaded(tmp_path / "a") == 1


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_save_planned_before_the_one_before_was_committed_leaves_its_files(
    tmp_path: Path, is_committed: bool
) -> None:
    first, second = plan(tmp_path, 1), plan(tmp_path, 2)
    write(first)
    if is_committed:
        save_state_dict_async_finalize(*first)
    planned = set(tmp_path.glob("nvrx-plan-*"))
    write(second)
    for path in set(tmp_path.glob("nvrx-plan-*")) - planned:
        path.unlink()  # as if its ranks had been killed just before
    assert loaded(tmp_path) == 1


def test_a_save_of_a_restarted_job_leaves_the_files_of_one_that_waits_for_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1)
    monkeypatch.setattr(filesystem_async, "_saved_to", [])
    monkeypatch.setattr(filesystem_async, "_sequences", {})
    save_names._sessions.pop(save_names._Alone, None)
    planned = set(tmp_path.glob("nvrx-plan-*"))
    written(tmp_path, 2)
    for path in set(tmp_path.glob("nvrx-plan-*")) - planned:
        path.unlink()
    assert loaded(tmp_path) == 1


def test_a_coordinator_counts_on_from_what_another_has_saved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(filesystem_async, "_sequences", {})
        for value in (2, 3, 4):
            save_names._sessions.pop(save_names._Alone, None)
            commit(tmp_path, value)
    save_names._sessions.pop(save_names._Alone, None)
    commit(tmp_path, 5)
    assert loaded(tmp_path) == 5


@pytest.mark.parametrize("what", ["plan", "note"])
def test_one_whose_plan_or_note_is_damaged_does_not_take_the_place_of_a_good_one(
    tmp_path: Path, what: str
) -> None:
    commit(tmp_path, 1)
    before = set(tmp_path.glob("*.distcp"))
    written(tmp_path, 2)
    (data,) = set(tmp_path.glob("*.distcp")) - before
    (planned,) = tmp_path.glob("nvrx-plan-*")
    path = planned if what == "plan" else data
    content = path.read_bytes()
    end = len(content) if what == "plan" else content.rindex(b"NVRXNOTE") + 8
    begin = 0 if what == "plan" else content.rindex(b"save", 0, end)
    for at in range(begin, end, 37):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert finish_written_save(tmp_path) is None
    assert loaded(tmp_path) == 1
    path.write_bytes(content)
    assert loaded(tmp_path) == 2


def test_a_note_that_names_other_files_is_not_committed(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    before = set(tmp_path.glob("*.distcp"))
    written(tmp_path, 2)
    (data,) = set(tmp_path.glob("*.distcp")) - before
    elsewhere = data.with_name(f"__1_0.{data.name.partition('.')[2]}")
    data.rename(elsewhere)
    assert finish_written_save(tmp_path) is None
    assert loaded(tmp_path) == 1


def test_any_changed_byte_of_a_manifest_is_found(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    (path,) = tmp_path.glob("nvrx-manifest-*")
    content = path.read_bytes()
    end = content.index(b',"checksum"')
    for at in range(end):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(storage_error()):
            manifest.read(tmp_path)
    path.write_bytes(content[:end] + b"}")  # as it was written before there was a checksum
    assert manifest.read(tmp_path) is not None


def test_a_directory_in_which_a_newer_save_waits_for_its_commit_is_not_removed(tmp_path: Path) -> None:
    commit(tmp_path / "a", 1)
    commit(tmp_path / "b", 2)
    written(tmp_path / "a", 3)
    older = find(tmp_path)[0]
    assert older.name == "a"
    assert not remove(older)
    assert loaded(tmp_path / "a") == 3


def test_what_another_user_has_written_is_left_to_that_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tmp_path, 1)
    written(tmp_path, 2)
    another = os.geteuid() + 1
    with monkeypatch.context() as as_another:
        as_another.setattr(os, "geteuid", lambda: another)
        assert loaded(tmp_path) == 1
    assert loaded(tmp_path) == 2
