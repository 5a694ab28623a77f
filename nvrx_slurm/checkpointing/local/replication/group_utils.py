"""Process groups as replication needs them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.local.replication.cliques import own_clique, parse_group_sequence
from nvrx_slurm.checkpointing.local.replication.exchange import DEFAULT_TIMEOUT, Exchange
from nvrx_slurm.checkpointing.local.replication.plan import ExchangePlan, ExchangePlanEntry

__all__ = ["ExchangePlan", "ExchangePlanEntry", "GroupWrapper", "parse_group_sequence"]


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
