"""Ranks that are of use only together: those of a node, a rack, a pipeline."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from datetime import timedelta

from nvrx_slurm.inprocess.param_utils import check_callable, check_duration
from nvrx_slurm.inprocess.rank_assignment.context import RankAssignment, RankAssignmentCtx
from nvrx_slurm.inprocess.state import State

KeyOrFn = str | Callable[[State], str]


def key_of(key_or_fn: KeyOrFn, state: State) -> str:
    """Return a rank's key."""
    return key_or_fn if isinstance(key_or_fn, str) else str(key_or_fn(state))


def check_key(key_or_fn: object) -> None:
    """Refuse what is neither a text nor a function.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(key_or_fn, str):
        check_callable("key_or_fn", key_or_fn)


class FilterCountGroupedByKey(RankAssignment):
    """Terminates the ranks of every group whose number of ranks does not meet a condition.

    A later part of the composition has to number those that are left anew.

    Args:
        key_or_fn: the group of this rank: a text, or a function of its state that returns one.
        condition: takes the number of ranks that the group has left; true: they may stay.
        timeout: of the two barriers that it needs.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        key_or_fn: KeyOrFn,
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        check_key(key_or_fn)
        check_callable("condition", condition)
        check_duration("timeout", timeout)
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        # Several of them share a store: told apart by the order in which every rank makes them.
        self._name = f"filter_{next(self._numbers)}"

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        left = ctx.state.world_size - len(ctx.terminated_ranks)
        group = f"{self._name}:count:{key_of(self.key_or_fn, ctx.state)}"
        unwanted = f"{self._name}:unwanted"
        ctx.store.add(group, 1)
        ctx.store.append(unwanted, "")
        ctx.store.barrier(f"{self._name}:counted", left, self.timeout)
        if not self.condition(ctx.store.add(group, 0)):
            ctx.store.append(unwanted, f"{ctx.state.rank},")
        ctx.store.barrier(f"{self._name}:judged", left, self.timeout)
        found = bytes(ctx.store.get(unwanted)).decode().rstrip(",")
        ctx.terminated_ranks |= {int(rank) for rank in found.split(",") if rank}
        return ctx


class WholeNodes(FilterCountGroupedByKey):
    """Terminates the ranks of every node that has lost one.

    Args:
        timeout: as above.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        whole = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        super().__init__(name, lambda count: count >= whole, timeout)
