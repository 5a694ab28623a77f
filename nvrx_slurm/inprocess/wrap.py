"""The decorator that makes a training function restart in its process."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from nvrx_slurm.inprocess.abort import Abort, AbortTorchDistributed
from nvrx_slurm.inprocess.call_wrapper import CallWrapper
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.engine import Engine
from nvrx_slurm.inprocess.environment import warn_about_environment
from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.finalize import EmptyCudaCache, Finalize
from nvrx_slurm.inprocess.health_check import FaultCounter, HealthCheck, automatic_checks, with_automatic
from nvrx_slurm.inprocess.initialize import Initialize
from nvrx_slurm.inprocess.param_utils import check_subclass, check_type
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    MaxActiveWorldSize,
    RankAssignment,
    ShiftRanks,
    WholeNodes,
)
from nvrx_slurm.inprocess.store import StoreMixin, TCPStore
from nvrx_slurm.inprocess.terminate import Terminate
from nvrx_slurm.inprocess.wrapper_arguments import check_wrapper_arguments

__all__ = ["CallWrapper", "Wrapper"]

_is_running = False
"""A wrapped function of this process is being called."""
_F = TypeVar("_F", bound=Callable[..., Any])
_ABORT = AbortTorchDistributed()
_ALL_RANKS: Any = Compose(ActivateAllRanks(), ShiftRanks())


class Wrapper:
    """Calls a training function again, in the same process and on all ranks that are left, after every fault.

    ``Wrapper(...)(function)`` returns a function that ends when ``function`` has returned on every rank, with
    its value (None on spares), or when something ends this rank. A fault is an exception of the function on
    any rank, a rank that shows no progress, or one whose process is gone.

    Out of the wrapped function come: ``RestartAbort`` when nobody restarts any more, ``HealthCheckError`` and
    exceptions of ``finalize`` when this rank can't go on, ``RankDiscarded`` when rank assignment drops it,
    ``BarrierTimeout``, ``InternalError`` when the ranks have lost each other, and every ``BaseException`` of
    the function that is no ``Exception``.

    Args:
        store_factory: class of the store by which ranks find each other; derived from ``StoreMixin``.
        store_kwargs: its arguments.
        initialize: called at the start of every iteration, on spares too.
        abort: called in a thread at a fault; default: ends all process groups.
        finalize: called in the main thread after an interruption.
        health_check: called after ``initialize``, and after ``finalize`` together with automatic checks.
        rank_assignment: gives ranks their numbers before every iteration; default: all active, without gaps.
        monitor_thread_interval: accepted; notices are pushed, nothing is polled.
        monitor_process_interval: accepted, as above.
        heartbeat_interval: how often a supervisor shows the hub that it lives.
        progress_watchdog_interval: how often, at least, the main thread is asked for a sign of life.
        soft_timeout: without progress for so long the iteration is interrupted.
        hard_timeout: without progress for so long the process is killed.
        heartbeat_timeout: a supervisor, or the hub, that is silent for so long is lost.
        barrier_timeout: ranks wait so long for each other, at the start and in a restart.
        completion_timeout: ranks that have returned wait so long for the others.
        last_call_wait: accepted; faults that come later are merged in the barrier, so nobody waits for them.
        termination_grace_time: from SIGTERM to SIGKILL.
        monitor_process_logfile: absolute path for the supervisor's log; ``{rank}`` is the initial rank.
        monitor_process_pidfile: absolute path for its process id.
        enabled: False: the function is returned as it is.
        completion: called once in the main thread after success; its exceptions are logged.
        terminate: called once in the main thread when this rank leaves by an exception.
        granularity: ``"node"``: when a rank is lost, the other ranks of its node leave, too.
        active_world_size: at most so many ranks run the function, the others are spares.
        max_rank_faults: a rank whose function has raised more often leaves.
        rejoin: a process that is started in place of a lost rank, with its environment, takes part from the
            next iteration on; the store of ``store_factory`` must outlive ranks for that, as a file does.
        empty_cuda_cache: give unused GPU memory of torch's allocator back in every restart.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a value that is not accepted, or time-outs in the wrong order.
    """

    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = _ABORT,
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = _ALL_RANKS,
        monitor_thread_interval: timedelta = timedelta(seconds=1),
        monitor_process_interval: timedelta = timedelta(seconds=1),
        heartbeat_interval: timedelta = timedelta(seconds=1),
        progress_watchdog_interval: timedelta = timedelta(seconds=1),
        soft_timeout: timedelta = timedelta(seconds=60),
        hard_timeout: timedelta = timedelta(seconds=90),
        heartbeat_timeout: timedelta = timedelta(seconds=30),
        barrier_timeout: timedelta = timedelta(seconds=120),
        completion_timeout: timedelta = timedelta(seconds=120),
        last_call_wait: timedelta = timedelta(seconds=1),
        termination_grace_time: timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        monitor_process_pidfile: str | None = None,
        enabled: bool = True,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        granularity: str = "rank",
        active_world_size: int | None = None,
        max_rank_faults: int | None = None,
        empty_cuda_cache: bool = False,
        rejoin: bool = False,
    ) -> None:
        given = dict(locals())
        del given["self"], given["store_factory"], given["store_kwargs"]
        check_subclass("store_factory", store_factory, StoreMixin)
        check_type("store_kwargs", store_kwargs, Mapping, optional=True)
        check_wrapper_arguments(given)
        if not dist.is_available():
            raise ValueError("torch.distributed is not available: in-process restart needs it")
        if rank_assignment is not _ALL_RANKS and (granularity != "rank" or active_world_size is not None):
            raise ValueError(
                "rank_assignment was given together with granularity or active_world_size: "
                "one or the other is accepted"
            )
        self.store_factory = store_factory
        self.store_kwargs = dict(store_kwargs or {})
        self.initialize = initialize
        self.abort = abort
        self.finalize: Any = finalize
        if empty_cuda_cache:
            self.finalize = EmptyCudaCache() if finalize is None else Compose(EmptyCudaCache(), finalize)
        self.health_check = health_check
        self.rank_assignment: Any = rank_assignment
        if rank_assignment is _ALL_RANKS:
            self.rank_assignment = _assignment(granularity, active_world_size)
        self.monitor_thread_interval = monitor_thread_interval
        self.monitor_process_interval = monitor_process_interval
        self.heartbeat_interval = heartbeat_interval
        self.progress_watchdog_interval = progress_watchdog_interval
        self.soft_timeout = soft_timeout
        self.hard_timeout = hard_timeout
        self.heartbeat_timeout = heartbeat_timeout
        self.barrier_timeout = barrier_timeout
        self.completion_timeout = completion_timeout
        self.last_call_wait = last_call_wait
        self.termination_grace_time = termination_grace_time
        self.monitor_process_logfile = monitor_process_logfile
        self.monitor_process_pidfile = monitor_process_pidfile
        self.enabled = enabled
        self.rejoin = rejoin
        self.completion = completion
        self.terminate = terminate
        self._max_rank_faults = max_rank_faults
        if enabled:
            warn_about_environment(hard_timeout)

    @functools.cached_property
    def restart_health_check(self) -> Any:
        """What is checked in a restart: ``health_check``, then what this machine offers; None: nothing."""
        check: Any = self.health_check
        if self._max_rank_faults is not None:
            counter = FaultCounter(self._max_rank_faults)
            check = counter if check is None else Compose(check, counter)
        return with_automatic(check, automatic_checks())

    def __call__(self, fn: _F) -> _F:
        """Return ``fn`` as it restarts."""
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized():
                raise ValueError(
                    "torch.distributed is initialized already: `not torch.distributed.is_initialized()` is "
                    "required, and the function makes its process groups itself"
                )
            if threading.current_thread() is not threading.main_thread():
                raise ValueError(
                    f"the function was called in thread {threading.current_thread().name!r}: a wrapped "
                    "function runs in the main thread"
                )
            global _is_running
            name = getattr(fn, "__qualname__", repr(fn))
            if _is_running:
                # The outer one would only call it again.
                raise RestartAbort(
                    f"{name} was called inside another wrapped function, which restarts all that it calls: "
                    "only the outermost one is to be wrapped"
                )
            _is_running = True
            try:
                return Engine(self, fn, args, kwargs).run()
            finally:
                _is_running = False

        return wrapped  # type: ignore[return-value]


def _assignment(granularity: str, active_world_size: int | None) -> Any:
    activate = ActivateAllRanks() if active_world_size is None else MaxActiveWorldSize(active_world_size)
    nodes = [WholeNodes()] if granularity == "node" else []
    return Compose(activate, ShiftRanks(), *nodes)
