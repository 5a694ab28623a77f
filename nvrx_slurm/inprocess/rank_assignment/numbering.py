"""New numbers for the ranks that are left: 0 to their count - 1, without gaps."""

from __future__ import annotations

from abc import abstractmethod

from nvrx_slurm.inprocess.rank_assignment.context import RankAssignment, RankAssignmentCtx, RankDiscarded


class _Renumber(RankAssignment):
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        rank, world_size = ctx.state.rank, ctx.state.world_size
        if rank in ctx.terminated_ranks:
            raise RankDiscarded(f"rank {rank} of {world_size} is among the terminated ranks")
        ctx.state.rank = self.new_rank(rank, world_size, ctx.terminated_ranks)
        ctx.state.world_size = world_size - len(ctx.terminated_ranks)
        ctx.terminated_ranks = set()
        return ctx

    @abstractmethod
    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """Return the new number of a rank that is left."""


class ShiftRanks(_Renumber):
    """Every rank moves down by the number of terminated ranks below it: the order stays."""

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        return rank - sum(1 for dead in terminated if dead < rank)


class FillGaps(_Renumber):
    """Ranks below the new world size keep their numbers; those above take the gaps, ascending into ascending.

    Fewer ranks change their number than with :class:`ShiftRanks`.
    """

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        size = world_size - len(terminated)
        if rank < size:
            return rank
        gaps = sorted(dead for dead in terminated if dead < size)
        return gaps[sum(1 for above in range(size, rank) if above not in terminated)]
