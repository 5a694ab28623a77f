"""Ranks as a tree of nodes, racks and so on, which replace each other where that costs least."""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from nvrx_slurm.inprocess.param_utils import check_callable, check_type
from nvrx_slurm.inprocess.rank_assignment.context import RankAssignment, RankAssignmentCtx, RankDiscarded
from nvrx_slurm.inprocess.rank_assignment.groups import key_of
from nvrx_slurm.inprocess.rank_assignment.tree_plan import Layer, Plan
from nvrx_slurm.inprocess.state import Mode, State


class Tree(RankAssignment):
    """Keeps as many ranks active as the layers allow, and moves as few of them as it can.

    It numbers and activates ranks by itself and can't be composed with others. In the order of the tree ranks
    become active until a layer's ``max_ranks``; the others are spares of all nodes above them. At a fault a
    node with fewer ranks than ``min_ranks`` is given up; a spare takes the active rank of a terminated one
    (RESERVE), else the highest active rank below the node does (BACKFILL), else all active ranks above move
    down.

    Args:
        layers: from the root down; all ranks have the same key in the first one.
        world_size_filter: takes the active world size and returns the one to use, not more; the ranks above
            become spares.

    Raises:
        RuntimeError: when called: the ranks do not agree on the key of the first layer.
    """

    def __init__(
        self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        if not layers:
            raise ValueError("layers is empty: at least one Layer is accepted")
        for layer in layers:
            check_type("layers", layer, Layer)
        if world_size_filter is not None:
            check_callable("world_size_filter", world_size_filter)
        self.layers = tuple(layers)
        self.world_size_filter = world_size_filter
        self._plan: Plan | None = None

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state = ctx.state
        if state.rank in ctx.terminated_ranks:
            raise RankDiscarded(f"rank {state.rank} of {state.world_size} is among the terminated ranks")
        plan = None if state.mode is Mode.INITIALIZED else self._plan
        if plan is not None:
            plan.terminate(ctx.terminated_ranks, self.world_size_filter)
        if plan is None or ctx.joined_ranks:
            plan = self._meet(ctx, plan)
            plan.terminate((), self.world_size_filter)
        self._plan = plan
        _adopt(plan, state)
        ctx.terminated_ranks = set()
        return ctx

    def _meet(self, ctx: RankAssignmentCtx, known: Plan | None) -> Plan:
        """Return the tree of all ranks: the lowest one collects their keys and hands out one short text."""
        state, alive = ctx.state, ctx.alive()
        keys = [key_of(layer.key_or_fn, state) for layer in self.layers]
        ctx.store.set(f"tree:{state.rank}", json.dumps([state.initial_rank, keys]))
        if state.rank == alive[0]:
            rows = [json.loads(row) for row in ctx.store.multi_get([f"tree:{rank}" for rank in alive])]
            ctx.store.set("tree", zlib.compress(json.dumps(_document(rows, known)).encode()))
        found = json.loads(zlib.decompress(ctx.store.get("tree")))
        plan = Plan(self.layers, {rank: tuple(path) for rank, path in found["keys"]})
        if found["active"] is None:
            order = [leaf.initial_rank for leaf in plan.leaves]
            if order != sorted(order):
                warnings.warn("the order of ranks in the tree is not that of RANK", UserWarning, stacklevel=3)
            plan.activate()
        else:
            plan.resume(dict(found["active"]))
        return plan


def _document(rows: list[tuple[int, list[str]]], known: Plan | None) -> dict[str, Any]:
    """Return the keys of all ranks that ``known`` has not given up, and which of them it has active."""
    if known is None:
        return {"keys": rows, "active": None}
    active = [(leaf.initial_rank, leaf.active_rank) for leaf in known.leaves if leaf.mode is Mode.ACTIVE]
    given_up = known.given_up
    return {"keys": [row for row in rows if row[0] not in given_up], "active": active}


def _adopt(plan: Plan, state: State) -> None:
    """Take this rank's numbers from the plan.

    Raises:
        RankDiscarded: it is not in it any more.
    """
    for rank, leaf in enumerate(plan.leaves):
        if leaf.initial_rank == state.initial_rank:
            state.rank, state.world_size = rank, len(plan.leaves)
            state.mode, state.active_rank = leaf.mode, leaf.active_rank
            state.active_world_size = plan.active_world_size
            return
    raise RankDiscarded(
        f"initial rank {state.initial_rank} is given up: a layer above it has fewer ranks than its min_ranks"
    )
