"""What happens when a rank leaves with an exception."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Terminate(ABC):
    """Is called once, in the main thread, before the exception that ends this rank reaches the caller.

    What it raises itself reaches the caller instead, with that exception as its cause.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""
