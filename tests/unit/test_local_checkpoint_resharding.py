"""Shards filled from shards that were cut in another way, and what another number of ranks can't have."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, TensorPlaceholder
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.resharding import Assembly, _Shard
from nvrx_slurm.checkpointing.local.shards import ShardSpec


def spec(shape: tuple[int, ...], offset: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(shape, torch.empty(shape).stride(), offset, (0,), "cpu", (0,), None)


def cuts(length: int) -> st.SearchStrategy[list[int]]:
    """Where a dimension is cut; pieces may be empty."""
    inner = st.lists(st.integers(0, length), max_size=3)
    return inner.map(lambda found: [0, *sorted(found), length])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_of_a_tensor_fills_any_other_cut_of_it(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 7)))
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    rows, columns = (data.draw(cuts(length)) for length in shape)
    low, high = zip(
        *(sorted(data.draw(st.tuples(*[st.integers(0, length)] * 2))) for length in shape), strict=True
    )
    wanted = whole[low[0] : high[0], low[1] : high[1]]
    shard = _Shard(spec(shape, low), torch.empty_like(wanted))
    pieces = list(itertools.product(itertools.pairwise(rows), itertools.pairwise(columns)))
    for (r0, r1), (c0, c1) in pieces + pieces[:2]:  # some come twice: copies of a replicated shard
        shard.take(spec(shape, (r0, c0)), whole[r0:r1, c0:c1])
    assert torch.equal(shard.local, wanted)
    assert shard.filled == wanted.numel()


def part(**leaves: Any) -> tuple[BasicTensorAwareStateDict, list[torch.Tensor]]:
    state = BasicTensorAwareStateDict(leaves)
    return state, state.pop_tensors()


def test_what_is_no_shard_must_be_the_same_everywhere() -> None:
    assembly = Assembly(BasicTensorAwareStateDict({"lr": 0.0, "mean": torch.zeros(2)}))
    assembly.add(*part(lr=0.5, mean=torch.ones(2)))
    assembly.add(*part(lr=0.5, mean=torch.ones(2)))
    loaded = assembly.result().state_dict
    assert loaded["lr"] == 0.5
    assert torch.equal(loaded["mean"], torch.ones(2))
    with pytest.raises(CheckpointingException, match="mean is not the same on all ranks"):
        assembly.add(*part(lr=0.5, mean=torch.zeros(2)))
    with pytest.raises(CheckpointingException, match="lr is not the same on all ranks"):
        assembly.add(*part(lr=0.6, mean=torch.ones(2)))


def test_keys_that_lack_on_either_side_are_named() -> None:
    assembly = Assembly(BasicTensorAwareStateDict({"a": {"b": 1}}))
    with pytest.raises(CheckpointingException, match="other was saved, and is not in what is to be loaded"):
        assembly.add(*part(other=1))
    with pytest.raises(CheckpointingException, match=r"a\.b was not saved"):
        assembly.result()


def test_a_dtensor_is_not_loaded_as_something_else() -> None:
    assembly = Assembly(BasicTensorAwareStateDict({"w": torch.zeros(4)}))
    hollow, _ = part(w=torch.zeros(2))
    shard = spec((4,), (0,))
    hollow._tree = {"w": TensorPlaceholder(torch.device("cpu"), torch.Size([2]), torch.float32, shard)}
    with pytest.raises(CheckpointingException, match=r"w was saved as a DTensor of \(4,\)"):
        assembly.add(hollow, [torch.zeros(2)])
