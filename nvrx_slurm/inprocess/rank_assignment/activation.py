"""Which ranks run the function; the others wait as spares."""

from __future__ import annotations

from abc import abstractmethod

from nvrx_slurm.inprocess.param_utils import check_count
from nvrx_slurm.inprocess.rank_assignment.context import RankAssignment, RankAssignmentCtx
from nvrx_slurm.inprocess.state import Mode, State


def activate_first(state: State, size: int) -> None:
    """Have the ranks below ``size`` run the function."""
    state.active_world_size = size
    active = state.rank < size
    state.mode = Mode.ACTIVE if active else Mode.INACTIVE
    state.active_rank = state.rank if active else None


class ActivateAllRanks(RankAssignment):
    """Every rank that is left runs the function."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        activate_first(ctx.state, ctx.state.world_size)
        return ctx


class _Limit(RankAssignment):
    """The active world size never grows by this: one limit after another can be composed."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        before = state.active_world_size
        size = state.world_size if before is None else min(before, state.world_size)
        activate_first(state, self.limit(size))
        return ctx

    @abstractmethod
    def limit(self, size: int) -> int:
        """Return how many of ``size`` ranks may be active."""


class MaxActiveWorldSize(_Limit):
    """At most so many ranks run the function; the others are warm spares.

    Args:
        max_active_world_size: None: no limit.
    """

    def __init__(self, max_active_world_size: int | None = None) -> None:
        check_count("max_active_world_size", max_active_world_size, 1)
        self.max_active_world_size = max_active_world_size

    def limit(self, size: int) -> int:
        return size if self.max_active_world_size is None else min(size, self.max_active_world_size)


class ActiveWorldSizeDivisibleBy(_Limit):
    """The active world size is the largest multiple of ``divisor`` that there are ranks for."""

    def __init__(self, divisor: int = 1) -> None:
        check_count("divisor", divisor, 1)
        self.divisor = divisor

    def limit(self, size: int) -> int:
        return size // self.divisor * self.divisor
