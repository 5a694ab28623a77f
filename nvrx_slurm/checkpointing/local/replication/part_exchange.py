"""Parts on their way between the ranks of a group, each verified on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from nvrx_slurm.checkpointing.local.buffers import BufferPool, SharedBuffer
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part, verified
from nvrx_slurm.checkpointing.local.replication.exchange import Exchange
from nvrx_slurm.checkpointing.local.replication.plan import ExchangePlanEntry
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError


@dataclass(frozen=True)
class Retrieved:
    """What came of a plan."""

    parts: dict[CkptID, Part]
    damaged: dict[CkptID, int]
    """Parts that did not arrive as they were saved, and who sent them."""


def gather_parts(
    exchange: Exchange, ranks: Sequence[int], own: int, part: Part, pool: BufferPool
) -> list[Part]:
    """Give ``part`` to all others; return all parts in the order of ``ranks``.

    Raises:
        ExchangeError: a rank did not take part in time.
        CorruptCheckpointError: a part did not arrive as it was sent.
    """
    others = [rank for rank in ranks if rank != own]
    room = _Room(pool)
    exchange.send_and_receive(
        [(rank, part.bytes()) for rank in others], [(rank, room.make) for rank in others]
    )
    received = {
        rank: verified(buffer, f"the part from rank {rank}")
        for rank, buffer in zip(others, room.buffers, strict=True)
    }
    return [part if rank == own else received[rank] for rank in ranks]


def move_parts(
    exchange: Exchange | None,
    entries: Sequence[ExchangePlanEntry],
    own: int,
    parts: Mapping[CkptID, Part],
    pool: BufferPool,
) -> Retrieved:
    """Carry out a plan, all transfers at once.

    Args:
        exchange: None: there are no other ranks.
        parts: what this rank has to give, itself included.

    Raises:
        ExchangeError: a rank did not take part in time.
    """
    kept = {e.id_: parts[e.id_] for e in entries if e.sender == e.receiver == own}
    moving = [entry for entry in entries if entry.sender != entry.receiver]
    arriving = [entry for entry in moving if entry.receiver == own]
    room = _Room(pool)
    if exchange is not None:
        exchange.send_and_receive(
            [(entry.receiver, parts[entry.id_].bytes()) for entry in moving if entry.sender == own],
            [(entry.sender, room.make) for entry in arriving],
        )
    damaged = {}
    for entry, buffer in zip(arriving, room.buffers, strict=True):
        try:
            part = verified(buffer, f"the part from rank {entry.sender}")
        except CorruptCheckpointError:
            part = None
        if part is None or part.id != entry.id_:
            damaged[entry.id_] = entry.sender
        else:
            kept[entry.id_] = part
    return Retrieved(kept, damaged)


def send_part(exchange: Exchange, receiver: int, part: Part) -> None:
    """
    Raises:
        ExchangeError: the receiver did not take part in time.
    """
    exchange.send_and_receive([(receiver, part.bytes())], [])


def receive_part(exchange: Exchange, sender: int, pool: BufferPool) -> Part:
    """
    Raises:
        ExchangeError: the sender did not take part in time.
        CorruptCheckpointError: the part did not arrive as it was sent.
    """
    room = _Room(pool)
    exchange.send_and_receive([], [(sender, room.make)])
    return verified(room.buffers[0], f"the part from rank {sender}")


class _Room:
    """Buffers for what arrives, in the order of arrival."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self.buffers: list[SharedBuffer] = []

    def make(self, size: int) -> torch.Tensor:
        buffer = self._pool.take(size)
        self.buffers.append(buffer)
        return torch.frombuffer(buffer.memory, dtype=torch.uint8, count=size)
