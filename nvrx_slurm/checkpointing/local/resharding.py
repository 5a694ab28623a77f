"""The state of a rank, put together from the parts of another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvrx_slurm.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    Path,
    TensorPlaceholder,
    leaves_by_path,
    map_leaves,
)
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.shards import ShardSpec, local_of, shard_of


@dataclass
class _Shard:
    """This rank's shard of a DTensor, while it is being filled."""

    spec: ShardSpec
    local: torch.Tensor
    filled: int = 0
    seen: set[tuple[Any, ...]] = field(default_factory=set)

    def take(self, spec: ShardSpec, source: torch.Tensor) -> None:
        """Copy what ``source`` has of this shard; other copies of what was taken already are passed over."""
        chunk = (spec.offset, tuple(source.shape))
        if chunk in self.seen:
            return
        self.seen.add(chunk)
        here, there = [], []
        ours, theirs = (self.spec.offset, self.local.shape), (spec.offset, source.shape)
        for begin, length, other, other_length in zip(*ours, *theirs, strict=True):
            low, high = max(begin, other), min(begin + length, other + other_length)
            if high <= low:
                return
            here.append(slice(low - begin, high - begin))
            there.append(slice(low - other, high - other))
        piece = source[tuple(there)]
        self.local[tuple(here)] = piece
        self.filled += piece.numel()


class Assembly:
    """Takes one part after the other. DTensors are sharded anew; all else must be the same in all parts."""

    def __init__(self, like: BasicTensorAwareStateDict) -> None:
        """
        Args:
            like: what is wanted: the same keys, and DTensors as they are sharded now. Left as it is.
        """
        self._like = dict(leaves_by_path(like.state_dict))
        self._tree = like.state_dict
        self._shards: dict[Path, _Shard] = {}
        self._values: dict[Path, Any] = {}
        for path, leaf in self._like.items():
            spec = shard_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if spec is not None:
                self._shards[path] = _Shard(spec, torch.empty_like(local_of(leaf), device="cpu"))

    def add(self, hollow: TensorAwareStateDict, tensors: Sequence[torch.Tensor]) -> None:
        """
        Raises:
            CheckpointingException: the part has other keys, another shape or type of a DTensor, or a value
                that is another one in a part before it; says which.
        """
        if not isinstance(hollow, BasicTensorAwareStateDict):
            raise CheckpointingException(
                f"A {type(hollow).__name__} was saved by another number of ranks: "
                "only a BasicTensorAwareStateDict can be sharded anew."
            )
        rest = iter(tensors)
        for path, leaf in leaves_by_path(hollow.state_dict):
            value = next(rest) if isinstance(leaf, TensorPlaceholder) else leaf
            spec = leaf.shard if isinstance(leaf, TensorPlaceholder) else None
            if path not in self._like:
                raise CheckpointingException(f"{_text(path)} was saved, and is not in what is to be loaded.")
            if spec is not None:
                self._add_shard(path, spec, value)
            elif not _same(self._values.setdefault(path, _kept(value)), value):
                raise CheckpointingException(
                    f"{_text(path)} is not the same on all ranks that saved it, and no DTensor: "
                    "another number of ranks can't load it."
                )

    def _add_shard(self, path: Path, spec: ShardSpec, source: torch.Tensor) -> None:
        shard = self._shards.get(path)
        if shard is None or shard.spec.shape != spec.shape or shard.local.dtype != source.dtype:
            raise CheckpointingException(
                f"{_text(path)} was saved as a DTensor of {spec.shape} {source.dtype}, and is to be loaded "
                "as something else."
            )
        shard.take(spec, source)

    def result(self) -> BasicTensorAwareStateDict:
        """
        Raises:
            CheckpointingException: something that is wanted was in no part; says what.
        """
        return BasicTensorAwareStateDict(map_leaves(self._tree, self._filled, ()))

    def _filled(self, like: Any, path: Path) -> Any:
        shard = self._shards.get(path)
        if shard is not None:
            if shard.filled != shard.local.numel():
                raise CheckpointingException(f"{_text(path)} was not saved, or not all of it.")
            return DTensor.from_local(
                shard.local.to(like.device_mesh.device_type),
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
        if path not in self._values:
            raise CheckpointingException(f"{_text(path)} was not saved.")
        value = self._values[path]
        return (
            value.to(like.device)
            if isinstance(like, torch.Tensor) and isinstance(value, torch.Tensor)
            else value
        )


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(one, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and torch.equal(one, other)
        )
    return bool(one == other)


def _text(path: Path) -> str:
    return ".".join(map(str, path))
