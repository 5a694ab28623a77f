"""Files of torch.distributed.checkpoint: read to their places, and compared with their checksums."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from nvrx_slurm.checkpointing.async_ckpt import verified_read
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

LARGE = 700_001


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    writer = FileSystemWriterAsync(path, **options)
    plan = save_state_dict_async_plan(state, writer)
    write, _, arguments = writer.get_save_function_and_args()
    assert write is not None
    write(*arguments)
    save_state_dict_async_finalize(*plan)


def load(state: dict[str, Any], path: Path, planner: Any = None) -> None:
    reader = CachedMetadataFileSystemReader(path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


@pytest.fixture
def saved() -> dict[str, Any]:
    return {
        "large": torch.randn(LARGE),
        "larger": torch.randn(3, LARGE),
        "matrix": torch.arange(24.0).reshape(4, 6),
        "bfloat16": torch.randn(33, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(300_000)),
        "objects": ("text", 3, None),
    }


def empty_like(saved: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in saved.items()}


def test_everything_comes_back_to_the_last_bit(
    tmp_path: Path, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_read, "_AT_ONCE", 1 << 20)
    save(saved, tmp_path, thread_count=2)
    state = empty_like(saved)
    places = {name: value.data_ptr() for name, value in state.items() if isinstance(value, torch.Tensor)}
    load(state, tmp_path)
    assert state.pop("objects") == saved.pop("objects")
    for name, value in saved.items():
        assert torch.equal(state[name], value), name
        assert state[name].data_ptr() == places[name]


def test_tensors_like_those_in_the_file_are_read_straight_to_their_places(
    tmp_path: Path, saved: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saved, tmp_path)
    monkeypatch.setattr(verified_read, "new_storage", None)  # it can't be called
    names = ("large", "larger", "matrix", "bfloat16", "scalar", "parameter")
    state = empty_like({name: saved[name] for name in names})
    load(state, tmp_path)
    assert all(torch.equal(state[name], saved[name]) for name in names)


def test_into_other_types_views_and_parts(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    state = {
        "large": torch.zeros(LARGE, dtype=torch.float64),
        "matrix": torch.zeros(6, 4).t(),
        "bfloat16": torch.zeros(99, dtype=torch.bfloat16)[33:66],
    }
    load(state, tmp_path)
    assert torch.equal(state["large"], saved["large"].double())
    assert torch.equal(state["matrix"], saved["matrix"])
    assert torch.equal(state["bfloat16"], saved["bfloat16"])


class Parts(DefaultLoadPlanner):  # type: ignore[misc]
    """Wants two pieces of one stored matrix, as a rank does that has been sharded otherwise."""

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        (item,) = plan.items
        upper, lower = (
            dataclasses.replace(
                item,
                storage_offsets=torch.Size((row, 2)),
                dest_offsets=torch.Size((row, 1)),
                lengths=torch.Size((1, 3)),
            )
            for row in (1, 3)
        )
        return dataclasses.replace(plan, items=[upper, lower])


def test_parts_of_a_stored_tensor_go_to_parts_of_another(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    state = {"matrix": torch.zeros(4, 6)}
    load(state, tmp_path, Parts())
    expected = torch.zeros(4, 6)
    for row in (1, 3):
        expected[row, 1:4] = saved["matrix"][row, 2:5]
    assert torch.equal(state["matrix"], expected)


def test_a_load_counts_as_a_change_of_the_tensor(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    state = {"large": torch.zeros(LARGE)}
    before = state["large"]._version
    load(state, tmp_path)
    assert state["large"]._version > before


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    size = path.stat().st_size
    for position in [0, size - 1, size // 2, *random.Random(1).sample(range(size), 20)]:
        with open(path, "r+b") as file:
            file.seek(position)
            right = file.read(1)[0]
            file.seek(position)
            file.write(bytes([right ^ 1 << position % 8]))
            file.flush()
            with pytest.raises(CheckpointException, match=r"not what was written|damaged|no whole"):
                load(empty_like(saved), tmp_path)
            file.seek(position)
            file.write(bytes([right]))
    load(empty_like(saved), tmp_path)


def test_a_file_that_is_cut_is_refused(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    (path,) = tmp_path.glob("*.distcp")
    for length in (path.stat().st_size - 1, 5 << 20, 10, 0):
        with open(path, "r+b") as file:
            file.truncate(length)
        with pytest.raises(CheckpointException):
            load(empty_like(saved), tmp_path)


def test_a_state_of_another_shape_is_refused_by_name(tmp_path: Path, saved: dict[str, Any]) -> None:
    save(saved, tmp_path)
    with pytest.raises((CheckpointException, ValueError), match="large"):
        load({"large": torch.zeros(LARGE - 1)}, tmp_path)


def test_what_torch_has_written_is_read_by_torch(tmp_path: Path, saved: dict[str, Any]) -> None:
    dcp.save({"matrix": saved["matrix"]}, checkpoint_id=tmp_path, no_dist=True)
    state = {"matrix": torch.zeros(4, 6)}
    load(state, tmp_path)
    assert torch.equal(state["matrix"], saved["matrix"])
