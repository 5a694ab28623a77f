"""What is torn down at a fault so that a blocked training function returns: groups, collectives, helpers.

Runs beside the main thread. What fails here is logged, and the restart goes on.
"""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from nvrx_slurm.inprocess.bounded import call_with_timeout, in_thread
from nvrx_slurm.inprocess.flight_recorder import TRACE_PATH, active_trace, write_trace
from nvrx_slurm.inprocess.gloo_sockets import shut_gloo_connections
from nvrx_slurm.inprocess.param_utils import check_duration, check_path
from nvrx_slurm.inprocess.state import FrozenState

_log = logging.getLogger(__name__)


class Abort(ABC):
    """Unblocks the main thread and releases what the function held beyond Python objects."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return ``state``."""


class AbortTorchDistributed(Abort):
    """Ends all collectives and destroys all process groups.

    gloo's connections are shut down first, then all NCCL communicators are aborted side by side, then torch
    forgets the groups. Before that, the operations that are under way are taken from the Flight Recorder, if
    it is on; writing them to ``<path>/iter_<iteration>/_dump_<rank>.json`` happens beside the restart.

    Args:
        torch_fr_trace_path: directory for these; None: NVRX_FR_TRACE_PATH, and none are written without it.
        timeout: after which the restart goes on although groups still hang.
    """

    def __init__(
        self, torch_fr_trace_path: str | None = None, *, timeout: timedelta = timedelta(seconds=10)
    ) -> None:
        check_path("torch_fr_trace_path", torch_fr_trace_path)
        check_duration("timeout", timeout)
        self.torch_fr_trace_path = torch_fr_trace_path or os.environ.get(TRACE_PATH) or None
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        torch = sys.modules.get("torch")
        if torch is None or not torch.distributed.is_available():
            return state
        deadline = monotonic() + self.timeout.total_seconds()
        trace = active_trace() if self.torch_fr_trace_path is not None else None
        # A group that is still being made is not known to torch, and may be waiting for its connections.
        shut_gloo_connections()
        if torch.distributed.is_initialized():
            _end_groups(torch, deadline)
        if trace is not None and self.torch_fr_trace_path is not None:
            in_thread(
                partial(write_trace, trace, self.torch_fr_trace_path, state.iteration, state.rank),
                "nvrx-flight-recorder",
            )
        return state


def forget_attempts() -> None:
    """Have all ranks name their next groups alike; call it when no group is left.

    torch numbers groups and counts those whose making was interrupted, too; a rank that had not begun would
    name the same group otherwise, and wait for the others for ever (``_process_group_name``).
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available():
        world = torch.distributed.distributed_c10d._world
        if not world.pg_map:
            world.group_count = 0


def _end_groups(torch: Any, deadline: float) -> None:
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    aborts = [in_thread(partial(backend.abort), "nvrx-abort") for backend in _nccl_backends(torch, groups)]
    _, hanging = wait(aborts, deadline - monotonic())
    for each in aborts:
        if each not in hanging and each.exception() is not None:
            _log.warning("an NCCL communicator could not be aborted: %s", each.exception())
    destroyed = in_thread(torch.distributed.destroy_process_group, "nvrx-destroy")
    wait([destroyed], max(deadline - monotonic(), 0))
    # torch has forgotten them; taking them apart waits for their threads, and nobody needs to wait for that.
    in_thread(groups.clear, "nvrx-release")
    if hanging or not destroyed.done():
        _log.warning("process groups still hang; the restart goes on without them")
    elif destroyed.exception() is not None:
        _log.warning("process groups could not be destroyed: %s", destroyed.exception())


def _nccl_backends(torch: Any, groups: list[Any]) -> list[Any]:
    if not torch.distributed.is_nccl_available():
        return []
    found = []
    for group in groups:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # has none for this device
            continue
        if isinstance(backend, torch.distributed.ProcessGroupNCCL):
            found.append(backend)
    return found


class AbortTransformerEngine(Abort):
    """Resets what Transformer Engine keeps in the process: its communication buffers and its FP8 state.

    Only after process groups: ``Compose(AbortTransformerEngine(), AbortTorchDistributed())``.

    Args:
        timeout: after which the restart goes on.
    """

    def __init__(self, *, timeout: timedelta = timedelta(seconds=10)) -> None:
        check_duration("timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        # A program that has not imported it has nothing to reset.
        base = sys.modules.get("transformer_engine.pytorch.module.base")
        fp8 = sys.modules.get("transformer_engine.pytorch.fp8")
        if base is not None:
            call_with_timeout(base.destroy_ub, self.timeout, "Transformer Engine's destroy_ub")
        if fp8 is not None:
            reset = fp8.FP8GlobalStateManager.reset
            call_with_timeout(reset, self.timeout, "Transformer Engine's reset of FP8 state")
        return state


class AbortPersistentCheckpointProcesses(Abort):
    """Kills the workers of asynchronous checkpoints; what they were writing is not complete and never counts.

    Args:
        timeout: after which the restart goes on.
    """

    def __init__(self, *, timeout: timedelta = timedelta(seconds=10)) -> None:
        check_duration("timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        # A program that has not imported it has no such workers.
        checkpoints = sys.modules.get("nvrx_slurm.checkpointing.async_ckpt.core")
        if checkpoints is not None:
            call_with_timeout(checkpoints.abort_nvrx_checkpoint, self.timeout, "ending checkpoint workers")
        return state
