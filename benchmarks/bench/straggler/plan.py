"""Which ranks are slow when: drawn once, known to the ranks and to whoever judges what was found."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

REPORTS = 3
"""Of each window: a verdict needs two, and a gap of three forgets what was before."""


class Kind(str, enum.Enum):
    HEALTHY = "healthy"
    NODE = "throttled-node"
    """All ranks of a node get a part of their processor time only."""
    WORK = "extra-work"
    """A rank computes twice as much."""
    LOADER = "slow-loader"
    """A rank's data come late."""
    ALL = "all-slow"
    """Everybody's data come late."""
    FAST = "fast-rank"
    """A rank has next to nothing to do: nobody else is slow for that."""


@dataclass(frozen=True)
class Window:
    """A few reports in a row."""

    kind: Kind
    ranks: tuple[int, ...] = ()
    """Those that are different; empty: all, or none."""

    @property
    def sections(self) -> frozenset[str]:
        """Where they are slow."""
        match self.kind:
            case Kind.NODE | Kind.WORK:
                return frozenset({"compute"})
            case Kind.LOADER | Kind.ALL:
                return frozenset({"load"})
            case _:
                return frozenset()


def draw(seed: int, runs: int, nodes: int, ranks_per_node: int) -> list[Window]:
    """Return ``runs`` windows of each kind in any order, a healthy one after each and at the start."""
    rng = random.Random(seed)
    kinds = [kind for kind in Kind for _ in range(runs)]
    rng.shuffle(kinds)
    windows = [Window(Kind.HEALTHY)]
    for kind in kinds:
        rank = rng.randrange(nodes * ranks_per_node)
        first = rank - rank % ranks_per_node
        match kind:
            case Kind.NODE:
                ranks = tuple(range(first, first + ranks_per_node))
            case Kind.WORK | Kind.LOADER | Kind.FAST:
                ranks = (rank,)
            case _:
                ranks = ()
        windows += [Window(kind, ranks), Window(Kind.HEALTHY)]
    return windows
