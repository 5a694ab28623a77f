"""What a state can hold: saved and loaded by torch.distributed.checkpoint, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_checkpoint_storage import same

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


class Special(torch.Tensor):
    pass


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue()
    yield queue
    queue.close()


def save(queue: AsyncCallsQueue, state: dict[str, Any], path: Path) -> None:
    writer = FileSystemWriterAsync(path)
    plan = save_state_dict_async_plan(state, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    finish = [partial(save_state_dict_async_finalize, *plan)]
    queue.schedule_async_request(AsyncRequest(function, arguments, finish, preload_fn=preload))
    queue.maybe_finalize_async_calls(blocking=True)


def test_dense_tensors_of_every_kind_and_objects_come_back_to_the_last_bit(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    shared = torch.arange(1000.0)
    state = {
        "bfloat16": torch.randn(33, 7, dtype=torch.bfloat16),
        "complex": torch.randn(5, dtype=torch.complex64),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "float8": torch.randn(16).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
        "non-contiguous": torch.randn(6, 4).t()[::2],
        "shared": shared,
        "view": shared[10:20],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "objects": ("text", 3, 2.5, None, {"nested": (1, 2)}),
    }
    save(queue, state, tmp_path)
    loaded = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            # Its strides are those of the tensor that is loaded into.
            found, expected = (
                each.detach().resolve_conj().contiguous().clone() for each in (loaded[name], value)
            )
            assert same(found, expected), name
        else:
            assert loaded[name] == value


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.empty(4, device="meta"), "the leaf: a tensor on the meta device has no content"),
        (torch.eye(4).to_sparse(), "the leaf: .* can't load sparse tensors"),
        (torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.qint8), "can't load quantised tensors"),
        (torch.randn(4).as_subclass(Special), "loads no Special, unless it is one of .*add_safe_globals"),
        (lambda: None, "pickle"),
    ],
    ids=["meta", "sparse", "quantised", "subclass", "unpicklable"],
)
def test_what_could_not_be_loaded_is_an_error_at_the_next_finalize_and_training_goes_on(
    tmp_path: Path, queue: AsyncCallsQueue, leaf: Any, message: str
) -> None:
    with pytest.raises(BaseException, match=message) as raised:
        save(queue, {"the leaf": leaf, "other": torch.ones(3)}, tmp_path / "a")
    if not callable(leaf) or isinstance(leaf, torch.Tensor):
        assert raised.type is AsyncSaveError
    assert not (tmp_path / "a" / ".metadata").exists()
    save(queue, {"other": torch.ones(3)}, tmp_path / "a")
    loaded = {"other": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert loaded["other"].sum() == 3


def test_a_subclass_that_is_known_to_be_safe_is_saved(tmp_path: Path, queue: AsyncCallsQueue) -> None:
    state = {"special": torch.randn(4).as_subclass(Special)}
    with torch.serialization.safe_globals([Special]):
        save(queue, state, tmp_path)
        loaded = {"special": torch.zeros(4).as_subclass(Special)}
        dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["special"], state["special"])
