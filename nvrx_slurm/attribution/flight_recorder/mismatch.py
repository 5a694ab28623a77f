"""Ranks that call different things at one place of a group: a bug in the program, not a sick node."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from nvrx_slurm.attribution.flight_recorder.trace import GroupKey, Op, RankTrace

_SIZES_DIFFER = frozenset(
    ["broadcast", "reduce", "scatter", "gather", "all_to_all", "all_gather", "reduce_scatter"]
)
"""Calls in which ranks may rightly pass different sizes: the root's count, or each rank's own."""
_TORCH_SAYS = ("COLLECTIVE_TYPE_MISMATCH", "SIZE_OR_SYNTAX_MISMATCH", "COLLECTIVE_DTYPE_MISMATCH")


@dataclass(frozen=True)
class Mismatch:
    """The minority's call at one sequence number differs from the majority's."""

    group: GroupKey
    sequence: int
    ranks: tuple[int, ...]
    """The minority; empty when no side has a majority."""
    theirs: Op
    majority: Op
    what: str
    """What torch's matcher, or ours without torch, says of the difference."""


def find_mismatches(
    traces: Mapping[int, RankTrace], members: Mapping[GroupKey, tuple[int, ...]]
) -> list[Mismatch]:
    """Compare the pending collectives of equal number in each group; a group's first difference counts."""
    calls: dict[tuple[GroupKey, int], dict[int, Op]] = defaultdict(dict)
    for rank, trace in sorted(traces.items()):
        for key, op in trace.pending:
            if not op.is_p2p and op.kind != "coalesced":
                calls[key, op.collective_seq_id].setdefault(rank, op)
    found: dict[GroupKey, Mismatch] = {}
    for (key, sequence), ops in sorted(calls.items(), key=lambda item: item[0][1]):
        if key in found or len(ops) < 2:
            continue
        mismatch = _compare(key, sequence, ops, len(members[key]))
        if mismatch is not None:
            found[key] = mismatch
    return list(found.values())


def _compare(key: GroupKey, sequence: int, ops: Mapping[int, Op], size: int) -> Mismatch | None:
    by_call: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, op in ops.items():
        by_call[_call(op, size)].append(rank)
    if len(by_call) < 2:
        return None
    ranked = sorted(by_call.values(), key=len, reverse=True)
    tied = len(ranked[0]) == len(ranked[1])
    others = [rank for ranks in ranked[1:] for rank in ranks]
    majority, theirs = ops[ranked[0][0]], ops[others[0]]
    what = _by_torch(majority, theirs, size) or _by_fields(majority, theirs)
    return Mismatch(key, sequence, () if tied else tuple(sorted(others)), theirs, majority, what)


def _call(op: Op, size: int) -> tuple[object, ...]:
    """Return what all ranks of a correct program have in common."""
    if op.kind in _SIZES_DIFFER:
        return (op.kind,)
    sizes = Counter(math.prod(dims) for dims in op.input_sizes)
    return (op.kind, frozenset(sizes.items()), tuple(sorted(set(op.input_dtypes))))


def _by_fields(one: Op, other: Op) -> str:
    if one.kind != other.kind:
        return f"{other.kind} where the others call {one.kind}"
    if one.input_sizes != other.input_sizes:
        return f"{other.kind} of {other.input_sizes} where the others pass {one.input_sizes}"
    return f"{other.kind} of {other.input_dtypes} where the others pass {one.input_dtypes}"


def _by_torch(one: Op, other: Op, size: int) -> str:
    """Return what torch's own matcher says; empty where torch, or this part of it, is not installed."""
    if importlib.util.find_spec("torch") is None:
        return ""
    try:
        from torch.distributed.flight_recorder.components.types import Op as TorchOp
    except ImportError:
        return ""
    membership = {"group": set(range(size))}
    try:
        mine, theirs = (TorchOp(_event(op), membership, "group") for op in (one, other))
        info = mine.match(theirs)
    except (AssertionError, ValueError, KeyError, IndexError, TypeError):
        return ""  # an operation that this torch does not know
    return str(info.culprit or "") if info.state.name in _TORCH_SAYS else ""


def _event(op: Op) -> dict[str, Any]:
    event: dict[str, Any] = msgspec.to_builtins(op)
    event["process_group"] = list(op.process_group)
    return event
