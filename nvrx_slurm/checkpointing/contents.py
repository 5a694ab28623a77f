"""What is in a checkpoint: names, types and shapes of its tensors. Needs torch; loads no tensor."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvrx_slurm.checkpointing.local.part_format import read_hollow
from nvrx_slurm.checkpointing.local_parts import is_part
from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.checksums import opened
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.folders import folder_at
from nvrx_slurm.checkpointing.storage.manifest import METADATA
from nvrx_slurm.checkpointing.storage.objects import open_object
from nvrx_slurm.checkpointing.storage.torch_internals import require

_FakeTensorMode = require("torch._subclasses.fake_tensor", "FakeTensorMode")


@dataclass(frozen=True)
class Entry:
    """One leaf of a state."""

    name: str
    """The keys on the way to it, joined by dots."""
    type: str
    shape: tuple[int, ...] | None
    size: int
    """In bytes; 0 of what is no tensor."""


def entries(path: Path | str) -> list[Entry]:
    """Return what a checkpoint holds, in its own order.

    Args:
        path: may be a URL; of an object only the parts that describe tensors are fetched.

    Raises:
        CorruptCheckpointError: its metadata can't be read.
        CheckpointingException: a part of a local checkpoint holds types of the program that wrote it.
        OSError, RuntimeError, pickle.UnpicklingError: the file can't be read, or holds what only
            executing it would show.
    """
    if folder_at(path).info(METADATA) is not None:
        return list(_of_directory(path))
    if isinstance(path, str):
        with open_object(path) as file, _FakeTensorMode():
            return list(_of_state("", torch.load(file, weights_only=True)))
    if path.is_dir():
        raise CorruptCheckpointError(path, "no .metadata: its writer has not finished")
    if is_part(path):
        return list(_of_part(path))
    with opened(path) as fd:  # torch maps no file whose name is not UTF-8
        state = torch.load(f"/proc/self/fd/{fd}", map_location="cpu", weights_only=True, mmap=True)
        return list(_of_state("", state))


def _of_state(name: str, value: Any) -> Iterator[Entry]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _of_state(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _of_state(f"{name}.{number}" if name else str(number), each)
    elif isinstance(value, torch.Tensor):
        size = value.numel() * value.element_size()
        yield Entry(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), size)
    else:
        yield Entry(name, type(value).__name__, None, 0)


def _of_part(path: Path) -> Iterator[Entry]:
    from nvrx_slurm.checkpointing.local.base_state_dict import decode
    from nvrx_slurm.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict,
        TensorPlaceholder,
        leaves_by_path,
    )
    from nvrx_slurm.checkpointing.local.errors import CheckpointingException

    state = decode(read_hollow(path))["state"]
    if not isinstance(state, BasicTensorAwareStateDict):
        raise CheckpointingException(f"it holds a {type(state).__name__}, which only its program knows")
    for keys, leaf in leaves_by_path(state.state_dict):
        name = ".".join(map(str, keys))
        if isinstance(leaf, TensorPlaceholder):
            size = leaf.shape.numel() * leaf.dtype.itemsize
            yield Entry(name, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape), size)
        else:
            yield Entry(name, type(leaf).__name__, None, 0)


def _of_directory(path: Path | str) -> Iterator[Entry]:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from nvrx_slurm.checkpointing.async_ckpt.metadata_pickle import unpickle

    manifest.read(path)  # is it the one that was committed?
    content = folder_at(path).read(METADATA)
    # Not by a reader, which may commit what ranks have left: who looks changes nothing.
    metadata = unpickle(folder_at(path).where(METADATA), io.BytesIO(content), stand_ins=True)
    if not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise CorruptCheckpointError(folder_at(path).where(METADATA), "it is no metadata of a checkpoint")
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            dtype = value.properties.dtype
            size = value.size.numel() * dtype.itemsize
            yield Entry(name, str(dtype).removeprefix("torch."), tuple(value.size), size)
        else:
            yield Entry(name, "object", None, 0)
