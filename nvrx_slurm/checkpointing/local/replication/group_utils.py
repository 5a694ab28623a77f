"""Process groups as replication needs them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict, decode, encode
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part, stage, state_of
from nvrx_slurm.checkpointing.local.replication.cliques import own_clique, parse_group_sequence
from nvrx_slurm.checkpointing.local.replication.exchange import DEFAULT_TIMEOUT, Exchange
from nvrx_slurm.checkpointing.local.replication.part_exchange import (
    Retrieved,
    gather_parts,
    move_parts,
    receive_part,
    send_part,
)
from nvrx_slurm.checkpointing.local.replication.plan import ExchangePlan, ExchangePlanEntry
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError

__all__ = [
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "ProcessGroupLike",
    "batched",
    "parse_group_sequence",
]


class GroupWrapper:
    """A process group, with the numbers of its members."""

    def __init__(self, group: Any = None, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        """
        Args:
            group: None is the default group.
            timeout: for each exchange.

        Raises:
            ValueError: ``group`` is no process group.
        """
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"{type(group).__name__} is no process group, or this rank is not in it")
        self.group = group
        self.timeout = timeout

    @classmethod
    def wrap(cls, group: Any) -> GroupWrapper:
        """Return ``group`` wrapped, unless it is already.

        Raises:
            ValueError: it is neither a process group nor a wrapped one.
        """
        return group if isinstance(group, GroupWrapper) else cls(group)

    @classmethod
    def from_list_of_groups(
        cls, list_of_groups: Sequence[Sequence[int]], timeout: timedelta = DEFAULT_TIMEOUT
    ) -> GroupWrapper:
        """Make all these groups, of global ranks, and return the one with this rank. All ranks call this.

        The groups use gloo: parts travel from host memory to host memory.

        Raises:
            ValueError: this rank is in none of them, or in several.
        """
        own = own_clique(list_of_groups, dist.get_rank())
        made = [dist.new_group(list(ranks), backend="gloo", timeout=timeout) for ranks in list_of_groups]
        return cls(made[[list(ranks) for ranks in list_of_groups].index(own)], timeout)

    @cached_property
    def exchange(self) -> Exchange:
        return Exchange(self.group, self.timeout)

    @property
    def backend(self) -> str:
        return str(dist.get_backend(self.group))

    @property
    def supported_devices(self) -> list[str]:
        """Kinds of devices whose memory the group can send from."""
        return [device.type for device in self.group._device_types]

    def get_device(self, wanted: str | None = None) -> torch.device:
        """Return a device that the group can send from, ``wanted`` if it can."""
        kinds = self.supported_devices
        return torch.device(wanted if wanted in kinds else kinds[0])

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members, in the order of the group."""
        return list(dist.get_process_group_ranks(self.group))

    @property
    def world_size(self) -> int:
        return int(dist.get_world_size(self.group))

    @property
    def my_group_rank(self) -> int:
        return int(dist.get_rank(self.group))

    @property
    def my_global_rank(self) -> int:
        return int(dist.get_rank())

    def get_group_rank(self, global_rank: int | None = None) -> int:
        """Return the number of a global rank in the group; None: this rank's."""
        return self.my_group_rank if global_rank is None else self.ranks.index(global_rank)

    def get_global_rank(self, group_rank: int | None = None) -> int:
        """Return the global rank of a member; None: this rank's."""
        return self.my_global_rank if group_rank is None else self.ranks[group_rank]

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return what each member has given. Not by pickle: plain values, and types that are trusted.

        Raises:
            ExchangeError: a member did not take part in time.
        """
        return self.exchange.gather(obj)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Fill ``tensor`` with that of the global rank ``src``; the group can send from its device.

        Raises:
            ExchangeError: a member did not take part in time.
        """
        self.exchange.broadcast(tensor, src)

    def all_gather_batch(
        self, tensors: Sequence[torch.Tensor], target_device: str | torch.device | None = None
    ) -> list[list[torch.Tensor]]:
        """Return by member the tensors that it has given, of any number and shapes, in host memory.

        Args:
            target_device: where to instead.

        Raises:
            ExchangeError: a member did not take part in time.
            CorruptCheckpointError: something did not arrive as it was sent.
        """
        pool = BufferPool()
        own = _part_of(
            BasicTensorAwareStateDict({"": list(tensors)}), CkptID(0, self.my_global_rank, ""), pool
        )
        parts = gather_parts(self.exchange, self.ranks, self.my_global_rank, own, pool)
        everybody = [list(state_of(part).tensors) for part in parts]
        if target_device is None:
            return everybody
        return [[tensor.to(target_device) for tensor in each] for each in everybody]

    def send_object(self, obj: Any, dst: int) -> None:
        """Send to a global rank what :meth:`recv_object` returns there; not by pickle, as all_gather_object.

        Raises:
            ExchangeError: the receiver did not take part in time.
        """
        data = torch.frombuffer(bytearray(encode(obj)), dtype=torch.uint8)
        self.exchange.send_and_receive([(dst, data)], [])

    def recv_object(self, src: int) -> Any:
        """
        Raises:
            ExchangeError: the sender did not take part in time.
        """
        received: list[torch.Tensor] = []

        def room(size: int) -> torch.Tensor:
            received.append(torch.empty(size, dtype=torch.uint8))
            return received[0]

        self.exchange.send_and_receive([], [(src, room)])
        return decode(bytes(received[0].tolist()))

    def isend_state_dict(self, state_dict: TensorAwareStateDict, dst: int) -> int:
        """Send a state to a global rank; return how many bytes that were. It is left as it is.

        Raises:
            ExchangeError: the receiver did not take part in time.
        """
        part = _part_of(state_dict, CkptID(0, self.my_global_rank, ""), BufferPool())
        send_part(self.exchange, dst, part)
        return part.size

    def irecv_state_dict(self, src: int) -> tuple[TensorAwareStateDict, int]:
        """Return the state that ``src`` sends, its tensors in host memory, and how many bytes that were.

        Raises:
            ExchangeError: the sender did not take part in time.
            CorruptCheckpointError: it did not arrive as it was sent.
        """
        part = receive_part(self.exchange, src, BufferPool())
        return state_of(part), part.size

    def execute_plan(
        self, plan: ExchangePlan, my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """Carry out a plan within this group, all transfers at once; return what this rank gets.

        Raises:
            ExchangeError: a member did not take part in time.
            CorruptCheckpointError: something did not arrive as it was sent.
        """
        return execute(
            lambda parts, pool: move_parts(self.exchange, plan.entries, self.my_global_rank, parts, pool),
            my_data,
        )


ProcessGroupLike = dist.ProcessGroup | GroupWrapper


def execute(
    move: Callable[[Mapping[CkptID, Part], BufferPool], Retrieved],
    my_data: Mapping[CkptID, TensorAwareStateDict],
) -> dict[CkptID, TensorAwareStateDict]:
    """Have ``move`` do with states what it does with parts.

    Raises:
        CorruptCheckpointError: a part did not arrive as it was sent.
    """
    pool = BufferPool()
    moved = move({id_: _part_of(state, id_, pool) for id_, state in my_data.items()}, pool)
    for id_, sender in moved.damaged.items():
        raise CorruptCheckpointError(f"the part {tuple(id_)} from rank {sender}", "not what was sent")
    return {id_: state_of(part) for id_, part in moved.parts.items()}


def batched(iterable: Iterable[Any], n: int) -> Iterator[tuple[Any, ...]]:
    """Yield so many items at a time, in the end fewer.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n}: a number from 1 is accepted")
    rest = iter(iterable)
    while batch := tuple(itertools.islice(rest, n)):
        yield batch


def _part_of(state: TensorAwareStateDict, id_: CkptID, pool: BufferPool) -> Part:
    return stage(state, CkptID(*id_), pool).seal(1, "")
