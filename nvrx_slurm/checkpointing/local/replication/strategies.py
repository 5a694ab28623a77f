"""How parts come to be on several nodes, and back to the rank that needs them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool
from nvrx_slurm.checkpointing.local.errors import NoReplicasAvailableError
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part, stage, state_of
from nvrx_slurm.checkpointing.local.replication.exchange import DEFAULT_TIMEOUT, Exchange, all_ranks
from nvrx_slurm.checkpointing.local.replication.group_utils import (
    ExchangePlan,
    GroupWrapper,
    execute,
    parse_group_sequence,
)
from nvrx_slurm.checkpointing.local.replication.part_exchange import Retrieved, gather_parts, move_parts
from nvrx_slurm.checkpointing.local.replication.plan import plan_fetches

__all__ = [
    "CliqueReplicationStrategy",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
]


class ReplicationStrategy(ABC):
    """Who keeps copies of whose parts."""

    @abstractmethod
    def members(self) -> list[int]:
        """The ranks whose parts this rank keeps, its own among them."""

    @property
    def works_in_background(self) -> bool:
        """Whether a thread may call ``replicate_part`` while another one trains."""
        return False

    @abstractmethod
    def replicate_part(self, part: Part, pool: BufferPool) -> list[Part]:
        """Give this rank's part to others; return it with those that this rank is to keep."""

    @abstractmethod
    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan:
        """Plan who sends what, so that each rank gets what it wants. All ranks call this.

        Args:
            globally_available_ids: by rank, the parts that it can give.
            wanted: by this rank.

        Raises:
            NoReplicasAvailableError: nobody can give a part; on all ranks.
        """

    @abstractmethod
    def retrieve_parts(self, plan: ExchangePlan, parts: Mapping[CkptID, Part], pool: BufferPool) -> Retrieved:
        """Carry out a plan.

        Args:
            parts: what this rank has to give, by the plan.
        """

    def replicate(
        self, local_ckpt: TensorAwareStateDict, id_: CkptID
    ) -> tuple[list[TensorAwareStateDict], list[CkptID]]:
        """Copy ``local_ckpt`` to others; return it with what they have given, all as copies."""
        pool = BufferPool()
        part = stage(local_ckpt, CkptID(*id_), pool).seal(len(self.members()), "")
        parts = self.replicate_part(part, pool)
        return [state_of(each) for each in parts], [each.id for each in parts]

    def retrieve_execute(
        self, plan: ExchangePlan, my_data: Mapping[CkptID, TensorAwareStateDict]
    ) -> dict[CkptID, TensorAwareStateDict]:
        """Carry out a plan with states in place of parts.

        Raises:
            CorruptCheckpointError: a part did not arrive as it was sent.
        """
        return execute(lambda parts, pool: self.retrieve_parts(plan, parts, pool), my_data)


class CliqueReplicationStrategy(ReplicationStrategy):
    """Each member of a clique keeps the parts of all. What is lost comes from whoever in the job has it."""

    def __init__(
        self,
        local_group: Any,
        target_device: str | torch.device = "cpu",
        timeout: timedelta | None = None,
    ) -> None:
        """
        Args:
            local_group: this rank's clique, a process group or a :class:`GroupWrapper`.
            target_device: where copies are kept until they are written; only ``cpu``.
            timeout: for each exchange; by default the one of ``local_group``, or five minutes.

        Raises:
            ValueError: ``local_group`` is something else, or ``target_device`` another device.
        """
        if torch.device(target_device).type != "cpu":
            raise ValueError(
                f"target_device={target_device}: copies are kept in host memory, cpu is accepted"
            )
        wrapped = GroupWrapper.wrap(local_group)
        self.local_group = wrapped if timeout is None else GroupWrapper(wrapped.group, timeout)
        self.target_device = torch.device("cpu")

    @classmethod
    def from_replication_params(
        cls,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> CliqueReplicationStrategy:
        """Make the cliques of the job, by :func:`parse_group_sequence`. All ranks call this.

        Args:
            replication_jump: ranks that fail together; by default the ranks of a node, ``LOCAL_WORLD_SIZE``.
            replication_factor: nodes that hold each part.

        Raises:
            ValueError: the ranks don't divide evenly, or the number of ranks on a node is not known.
        """
        jump = ranks_per_node() if replication_jump is None else replication_jump
        cliques = parse_group_sequence(jump, replication_factor, dist.get_world_size())
        return cls(GroupWrapper.from_list_of_groups(cliques, timeout))

    def members(self) -> list[int]:
        return self.local_group.ranks

    @property
    def works_in_background(self) -> bool:
        """With gloo. Transfers of NCCL must come in one order with those of training."""
        return self.local_group.exchange.is_on_host

    def replicate_part(self, part: Part, pool: BufferPool) -> list[Part]:
        """
        Raises:
            ExchangeError: a member did not take part in time.
            CorruptCheckpointError: a part did not arrive as it was sent.
        """
        group = self.local_group
        return gather_parts(group.exchange, group.ranks, group.my_global_rank, part, pool)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan:
        job = GroupWrapper(timeout=self.local_group.timeout)
        everybody = all_ranks(self.local_group.timeout).gather([CkptID(*id_) for id_ in wanted])
        plan = ExchangePlan(job)
        for entry in plan_fetches(globally_available_ids, dict(enumerate(everybody))):
            plan.plan(sender=entry.sender, receiver=entry.receiver, id_=entry.id_)
        return plan

    def retrieve_parts(self, plan: ExchangePlan, parts: Mapping[CkptID, Part], pool: BufferPool) -> Retrieved:
        """
        Raises:
            ExchangeError: a rank did not take part in time.
        """
        exchange = all_ranks(self.local_group.timeout)
        return move_parts(
            exchange if isinstance(exchange, Exchange) else None,
            plan.entries,
            self.local_group.my_global_rank,
            parts,
            pool,
        )


class LazyReplicationStrategyBuilder(ReplicationStrategy):
    """Makes its strategy when it is first needed, so it can itself be made before the process group is."""

    def __init__(self) -> None:
        self._built: ReplicationStrategy | None = None
        self._world: Any = None

    @abstractmethod
    def _eager_build(self) -> ReplicationStrategy:
        """Make the strategy. All ranks call this."""

    @property
    def _strategy(self) -> ReplicationStrategy:
        if self._built is None or self._world is not dist.group.WORLD:
            self._built, self._world = self._eager_build(), dist.group.WORLD
        return self._built

    def members(self) -> list[int]:
        return self._strategy.members()

    @property
    def works_in_background(self) -> bool:
        return self._strategy.works_in_background

    def replicate_part(self, part: Part, pool: BufferPool) -> list[Part]:
        return self._strategy.replicate_part(part, pool)

    def retrieve_plan(
        self, globally_available_ids: Mapping[int, Collection[CkptID]], wanted: Sequence[CkptID]
    ) -> ExchangePlan:
        return self._strategy.retrieve_plan(globally_available_ids, wanted)

    def retrieve_parts(self, plan: ExchangePlan, parts: Mapping[CkptID, Part], pool: BufferPool) -> Retrieved:
        return self._strategy.retrieve_parts(plan, parts, pool)


class LazyCliqueReplicationStrategy(LazyReplicationStrategyBuilder):
    """:meth:`CliqueReplicationStrategy.from_replication_params`, with the same arguments, when it is needed.

    After another ``init_process_group`` in the same process the cliques are made anew.
    """

    def __init__(
        self,
        replication_jump: int | None = None,
        replication_factor: int = 2,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__()
        self._parameters = (replication_jump, replication_factor, timeout)

    def _eager_build(self) -> CliqueReplicationStrategy:
        return CliqueReplicationStrategy.from_replication_params(*self._parameters)


def ranks_per_node() -> int:
    """Return ``LOCAL_WORLD_SIZE``, else the number of GPUs that this process sees.

    Raises:
        ValueError: neither is known.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or torch.cuda.device_count()
    if not ranks:
        raise ValueError(
            "replication_jump: neither LOCAL_WORLD_SIZE nor a GPU says how many ranks a node has"
        )
    return ranks
