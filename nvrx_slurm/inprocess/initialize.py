"""What happens at the start of every iteration, the first one included, on active ranks and spares."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.param_utils import check_count
from nvrx_slurm.inprocess.state import FrozenState


class Initialize(ABC):
    """Is called in the main thread. An ``Exception`` restarts everybody; ``RestartAbort`` ends the job."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""


class RetryController(Initialize):
    """Ends the job when it has been restarted too often, or too few ranks are left.

    Args:
        max_iterations: how often the function is called at the most, the first time included; None: no limit.
        min_world_size: ranks that must be left, spares included.
        min_active_world_size: ranks that must run the function.

    Raises:
        RestartAbort: when called: a limit is passed.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
    ) -> None:
        check_count("max_iterations", max_iterations, 1)
        check_count("min_world_size", min_world_size, 1)
        check_count("min_active_world_size", min_active_world_size, 1)
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        active = state.active_world_size or 0
        if state.world_size < self.min_world_size:
            raise RestartAbort(
                f"{state.world_size} ranks are left, and min_world_size is {self.min_world_size}"
            )
        if active < self.min_active_world_size:
            raise RestartAbort(
                f"{active} ranks are active, and min_active_world_size is {self.min_active_world_size}"
            )
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(f"the function was called {state.iteration} times, as max_iterations allows")
        return state
