"""What all ranks have to agree on before a save counts: one collective of fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_OF_HOST_MEMORY = ("gloo", "mpi", "ucc", "fake", "undefined")  # undefined: gloo beside that of the device


@dataclass(frozen=True)
class Agreement:
    """What all ranks together say of their oldest save."""

    all_done: bool
    failed_rank: int | None
    """One of the ranks on which it failed."""
    lowest_index: int
    highest_index: int
    is_skipped: bool = False
    """On one of the ranks, so on all."""


def agree(index: int, *, done: bool, failed: bool, skipped: bool = False) -> Agreement:
    """Tell the other ranks of the default group about the save of this index; hear what they say.

    Alone, without ``torch.distributed``, a rank agrees with itself.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Agreement(done, 0 if failed else None, index, index, skipped)
    said = [index, -index, 0 if done else 1, dist.get_rank() + 1 if failed else 0, int(skipped)]
    tensor = torch.tensor(said, dtype=torch.int64, device=device_of())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    highest, lowest, missing, failed_rank, is_skipped = tensor.tolist()
    return Agreement(
        not missing, failed_rank - 1 if failed_rank else None, -lowest, highest, bool(is_skipped)
    )


def device_of(group: Any = None) -> torch.device:
    """Return where tensors are for a collective of a group: in host memory wherever it can do that."""
    backend = str(dist.get_backend(group)).lower()  # "nccl", or as "cpu:gloo,cuda:nccl"
    if any(name in backend for name in _OF_HOST_MEMORY):
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, f"{backend} without a device"
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
