"""Which faults, when, and against whom: drawn once from a seed, so that a run can be repeated."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.journal import FaultKind

STEPS_BETWEEN = 10
"""Strikes are this many steps apart, give or take half of it: training gets beyond its last checkpoint."""
_AGAIN_SHARE = 0.15
_AGAIN_WITHIN_S = 1.5


class Kind(str, enum.Enum):
    """What is done. The first word says to whom."""

    RANK_SIGKILL = "rank_sigkill"
    RANK_SIGSEGV = "rank_sigsegv"
    RANK_SIGABRT = "rank_sigabrt"
    RANK_EXCEPTION = "rank_exception"
    RANK_EXIT = "rank_exit"
    RANK_ORPHAN = "rank_orphan"
    """It starts a detached child that ignores SIGTERM, and dies."""
    RANK_STOPPED = "rank_stopped"
    RANK_LIVELOCK = "rank_livelock"
    """An endless loop in Python."""
    RANK_BLOCKED = "rank_blocked"
    """A call into C that keeps the GIL."""
    SERVER_SIGKILL = "server_sigkill"
    """The node's warm worker server."""
    STORE_SIGKILL = "store_sigkill"
    """The process of the rendezvous stores."""
    AGENT_SIGKILL = "agent_sigkill"
    GUARDIAN_SIGKILL = "guardian_sigkill"
    NODE_LOST = "node_lost"

    @property
    def blamed(self) -> frozenset[FaultKind]:
        """What the verdict may say that it was."""
        match self:
            case Kind.RANK_SIGKILL | Kind.RANK_SIGSEGV | Kind.RANK_SIGABRT | Kind.SERVER_SIGKILL:
                return frozenset({FaultKind.SIGNAL})
            case Kind.RANK_EXCEPTION | Kind.RANK_EXIT | Kind.RANK_ORPHAN:
                return frozenset({FaultKind.EXIT})
            case Kind.RANK_STOPPED | Kind.RANK_LIVELOCK | Kind.RANK_BLOCKED:
                return frozenset({FaultKind.HANG})
            case Kind.STORE_SIGKILL:
                return frozenset({FaultKind.START, FaultKind.EXIT})
            case Kind.AGENT_SIGKILL | Kind.GUARDIAN_SIGKILL | Kind.NODE_LOST:
                return frozenset({FaultKind.NODE_LOST})

    @property
    def costs_agent(self) -> bool:
        """The node loses its agent, and gets a new one."""
        return self in (Kind.AGENT_SIGKILL, Kind.GUARDIAN_SIGKILL)

    @property
    def ordered(self) -> bool:
        """The rank does it to itself, told by a file."""
        return self in (
            Kind.RANK_EXCEPTION,
            Kind.RANK_EXIT,
            Kind.RANK_ORPHAN,
            Kind.RANK_LIVELOCK,
            Kind.RANK_BLOCKED,
        )


@dataclass(frozen=True)
class Strike:
    """One fault."""

    kind: Kind
    step: int
    """Training must have got there."""
    rank: int
    """The victim, or one on the node whose worker server is. Which node loses its agent is decided then."""
    again_after_s: float | None
    """Then another rank is killed so long after it, in the middle of the recovery."""


def draw(seed: int, faults: int, world: int, kinds: Sequence[Kind], losses: int) -> tuple[Strike, ...]:
    """Return ``faults`` strikes in order, ``losses`` of them lost nodes if :attr:`Kind.NODE_LOST` is drawn.

    Every other kind comes about equally often, but a node must not lose its agent so often that it is left
    out: there are no more of those than ranks.
    """
    dice = random.Random(seed)
    rare = [kind for kind in kinds if kind.costs_agent]
    others = [kind for kind in kinds if kind is not Kind.NODE_LOST and not kind.costs_agent]
    drawn = [Kind.NODE_LOST] * min(losses, faults) if Kind.NODE_LOST in kinds else []
    left = faults - len(drawn)
    few = min(world, left * len(rare) // (len(rare) + len(others))) if others else left
    drawn += [rare[number % len(rare)] for number in range(few)] if rare else []
    left = faults - len(drawn)
    drawn += [others[number % len(others)] for number in range(left)] if others else []
    dice.shuffle(drawn)
    turn = itertools.cycle(dice.sample(range(world), world))
    return tuple(
        Strike(
            kind=kind,
            step=number * STEPS_BETWEEN + dice.randint(STEPS_BETWEEN // 2, STEPS_BETWEEN),
            rank=next(turn) if kind.costs_agent else dice.randrange(world),
            again_after_s=dice.uniform(0, _AGAIN_WITHIN_S) if dice.random() < _AGAIN_SHARE else None,
        )
        for number, kind in enumerate(drawn)
    )


def steps_needed(strikes: Sequence[Strike]) -> int:
    """Return the length of a training that outlives all strikes."""
    return max((strike.step for strike in strikes), default=0) + 3 * STEPS_BETWEEN
