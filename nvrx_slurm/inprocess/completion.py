"""What happens once the function has returned on every rank."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Completion(ABC):
    """Is called once, in the main thread, when all ranks are done; what it raises is only logged."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""
