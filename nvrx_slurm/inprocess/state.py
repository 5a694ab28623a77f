"""Where one rank stands: its numbers, whether it runs the function, and what ended the last iteration."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from nvrx_slurm.inprocess.exception import RestartAbort


class Mode(enum.Enum):
    """What a rank does in an iteration."""

    INITIALIZED = enum.auto()
    """Nothing yet: its first assignment is still to come."""
    ACTIVE = enum.auto()
    """Runs the function."""
    INACTIVE = enum.auto()
    """Waits as a spare."""
    TERMINATED = enum.auto()
    """Takes part no longer."""


@dataclass(frozen=True)
class FrozenState:
    """A :class:`State` as plug-ins see it: they look at it and return it."""

    rank: int
    """Number among the ranks that are left; 0 to ``world_size`` - 1."""
    world_size: int
    active_rank: int | None
    """Number among those that run the function, as ``RANK`` tells it; None for a spare."""
    active_world_size: int | None
    """How many run the function; None before the first assignment."""
    initial_rank: int
    """Number that the launcher gave."""
    initial_world_size: int
    iteration: int
    """0 for the first call of the function."""
    mode: Mode
    fn_exception: BaseException | None
    """What this rank's function raised in the last iteration: the object itself, never a copy."""


@dataclass
class State:
    """The fields of :class:`FrozenState`, for those who may change them: the wrapper and rank assignment."""

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int = -1
    initial_world_size: int = -1
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def __post_init__(self) -> None:
        if self.initial_rank < 0:
            self.initial_rank = self.rank
        if self.initial_world_size < 0:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> State:
        """Return the state of a rank that begins, by RANK (0 if unset) and WORLD_SIZE (1 if unset).

        Raises:
            ValueError: they are no numbers, or RANK is not below WORLD_SIZE.
        """
        rank, world_size = _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)
        if rank >= world_size:
            raise ValueError(f"RANK is {rank} and WORLD_SIZE {world_size}: RANK must be the lower one")
        return cls(rank, world_size)

    def freeze(self) -> FrozenState:
        return FrozenState(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    def set_distributed_vars(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Write RANK and WORLD_SIZE as the function is to see them; ``None`` as RANK of a spare."""
        environ["RANK"] = str(self.active_rank)
        environ["WORLD_SIZE"] = str(self.active_world_size)

    def advance(self) -> None:
        """Go on to the next iteration."""
        self.iteration += 1
        self.fn_exception = None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(f"{name} is {text!r}: a number from 0 on is accepted")
    return int(text)


def check_activity(state: State) -> None:
    """Refuse numbers by which all ranks would be spares, and wait for each other for ever.

    Raises:
        ValueError: the rank is neither active nor a spare.
        RestartAbort: there is no active rank.
    """
    if state.mode not in (Mode.ACTIVE, Mode.INACTIVE):
        raise ValueError(
            "rank_assignment tells no rank whether it is active: ActivateAllRanks in a Compose does, and so "
            "do MaxActiveWorldSize, ActiveWorldSizeDivisibleBy and Tree"
        )
    if not state.active_world_size:
        raise RestartAbort(f"rank_assignment made none of {state.world_size} ranks active")
