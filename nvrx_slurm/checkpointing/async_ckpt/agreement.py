"""What all ranks have to agree on before a save counts: one collective of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


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
    tensor = torch.tensor(said, dtype=torch.int64, device=_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    highest, lowest, missing, failed_rank, is_skipped = tensor.tolist()
    return Agreement(
        not missing, failed_rank - 1 if failed_rank else None, -lowest, highest, bool(is_skipped)
    )


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
