"""How ranks tell each other their times: numbers and names, no pickle, in a group of its own, bounded."""

from __future__ import annotations

import ctypes
import datetime
import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class ExchangeError(RuntimeError):
    """A rank did not take part in time, or is gone."""


class Exchange(Protocol):
    """Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    @property
    def ranks(self) -> Sequence[int]:
        """All that take part, in the order of rows and words."""
        ...

    def smallest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the lowest of each value over all ranks; float64, shape ``(n,)``.

        Raises:
            ExchangeError
        """
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        """Return a row of each rank on rank 0, shape ``(len(ranks), n)``, and None elsewhere.

        Raises:
            ExchangeError
        """
        ...

    def all_words(self, words: Sequence[str]) -> list[list[str]]:
        """Return every rank's words.

        Raises:
            ExchangeError
        """
        ...


class Alone:
    """Of a rank that asks nobody."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ranks = (rank,)

    def smallest(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        return values.unsqueeze(0)

    def all_words(self, words: Sequence[str]) -> list[list[str]]:
        return [list(words)]


class OverTorch:
    """Through ``torch.distributed``, by a gloo group of its own: those of training are not used.

    Every rank must make it at the same time.

    Args:
        timeout_s: how long a rank waits for the others.

    Raises:
        ExchangeError: the group can't be made.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.ranks = range(dist.get_world_size())
        try:
            self._group: Any = dist.new_group(
                backend="gloo", timeout=datetime.timedelta(seconds=timeout_s), group_desc="nvrx_straggler"
            )
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(str(error)) from error

    def smallest(self, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        self._do(dist.all_reduce, values, op=dist.ReduceOp.MIN)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor | None:
        rows = [torch.empty_like(values) for _ in self.ranks] if self.rank == 0 else None
        self._do(dist.gather, values, rows, dst=0)
        return None if rows is None else torch.stack(rows)

    def all_words(self, words: Sequence[str]) -> list[list[str]]:
        data = torch.frombuffer(bytearray(json.dumps(list(words)).encode()), dtype=torch.uint8)
        sizes = torch.zeros(len(self.ranks), dtype=torch.int64)
        sizes[self.rank] = len(data)
        self._do(dist.all_reduce, sizes, op=dist.ReduceOp.SUM)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = [torch.empty_like(padded) for _ in self.ranks]
        self._do(dist.all_gather, rows, padded)
        # Most ranks have the same words: they are read once.
        texts = [
            ctypes.string_at(row.data_ptr(), size) for row, size in zip(rows, sizes.tolist(), strict=True)
        ]
        read: dict[bytes, list[str]] = {text: json.loads(text) for text in set(texts)}
        return [read[text] for text in texts]

    def close(self) -> None:
        """Give the group back, while that of training is there; other ranks may be gone already."""
        dist.destroy_process_group(self._group)

    def _do(self, operation: Any, *args: Any, **keywords: Any) -> None:
        try:
            operation(*args, group=self._group, **keywords)
        except RuntimeError as error:
            raise ExchangeError(str(error).splitlines()[0]) from error
