"""What the main thread does between the interruption of the function and the health checks."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from nvrx_slurm.inprocess.bounded import call_with_timeout
from nvrx_slurm.inprocess.param_utils import check_callable, check_duration
from nvrx_slurm.inprocess.state import FrozenState


class Finalize(ABC):
    """Brings what the process holds into a state in which the function can begin anew.

    Is called in the main thread. An exception of it ends this rank, and health checks are left out.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""


class ThreadedFinalize(Finalize):
    """Calls a function in a thread, with the rank's CUDA device where there is one, and waits for it.

    Args:
        timeout: how long.
        fn: what to call.
        args: its arguments.
        kwargs: its named ones.

    Raises:
        TimeoutError: when called: ``fn`` takes longer. What ``fn`` raises comes out, too.
    """

    def __init__(
        self,
        timeout: timedelta,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_duration("timeout", timeout)
        check_callable("fn", fn)
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args)
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        device = cuda_device()

        def run() -> None:
            if device is not None:
                import torch

                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        call_with_timeout(run, self.timeout, f"finalize function {name}")
        return state


class EmptyCudaCache(Finalize):
    """Gives unused GPU memory of torch's allocator back, so that the function begins without fragments."""

    def __call__(self, state: FrozenState) -> FrozenState:
        if cuda_device() is not None:
            import torch

            torch.cuda.empty_cache()
        return state


def cuda_device() -> int | None:
    """Return this rank's CUDA device, by LOCAL_RANK or else the current one; None: CUDA is not in use."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    local_rank = os.environ.get("LOCAL_RANK", "")
    count: int = torch.cuda.device_count()
    if local_rank.isascii() and local_rank.isdigit() and int(local_rank) < count:
        return int(local_rank)
    # Each rank sees its own GPU only, or nobody has numbered the ranks of this node.
    return int(torch.cuda.current_device())
