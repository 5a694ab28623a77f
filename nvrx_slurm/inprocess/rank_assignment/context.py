"""What rank assignment is given, and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

from nvrx_slurm.inprocess.exception import RestartError
from nvrx_slurm.inprocess.state import State


class RankDiscarded(RestartError):
    """This rank takes part no longer."""


class AssignmentStore(Protocol):
    """The part of a store that rank assignment needs; its keys are of one assignment only."""

    def set(self, key: str, value: str | bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Wait for the key."""
        ...

    def add(self, key: str, amount: int, /) -> int: ...

    def append(self, key: str, value: str, /) -> None: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def barrier(self, group_name: str, rendezvous_count: int, timeout: timedelta) -> None: ...


@dataclass
class RankAssignmentCtx:
    """One assignment.

    Args:
        state: this rank's, in the numbering of the iteration that has ended.
        store: shared by the ranks that are left.
        terminated_ranks: those that are not, in that same numbering.
        joined_ranks: those that were not there in that iteration, numbered after all others.
    """

    state: State
    store: AssignmentStore
    terminated_ranks: set[int]
    joined_ranks: frozenset[int] = field(default_factory=frozenset)

    def alive(self) -> list[int]:
        """Return the ranks that are left, ascending."""
        return [rank for rank in range(self.state.world_size) if rank not in self.terminated_ranks]


class RankAssignment(ABC):
    """Gives ranks their numbers, and says which of them run the function.

    Is called in the main thread before every iteration, with no terminated ranks before the first. Every rank
    must come to the same result.
    """

    @abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Return ``ctx``, changed.

        Raises:
            RankDiscarded: this rank is among the terminated.
        """
