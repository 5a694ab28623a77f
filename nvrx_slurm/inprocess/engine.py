"""One call of a wrapped function on this rank: iteration after iteration, until all have completed."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from nvrx_slurm.inprocess import injection
from nvrx_slurm.inprocess.abort import AbortTorchDistributed, forget_attempts
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.bounded import call_with_timeout
from nvrx_slurm.inprocess.call_wrapper import CallWrapper, release_all
from nvrx_slurm.inprocess.exception import HealthCheckError, InternalError
from nvrx_slurm.inprocess.exception_summary import drop_locals, exc_info, summary
from nvrx_slurm.inprocess.gloo_sockets import answer_gloo_listeners, shut_gloo_connections
from nvrx_slurm.inprocess.job_report import leave_to_job, report_restart
from nvrx_slurm.inprocess.link import Link, describe_with_reason
from nvrx_slurm.inprocess.monitor_thread import (
    Interrupted,
    MonitorThread,
    Outcome,
    Raised,
    Returned,
    UserCode,
)
from nvrx_slurm.inprocess.rank_assignment import RankAssignmentCtx, RankDiscarded
from nvrx_slurm.inprocess.rendezvous import close_meeting, meet
from nvrx_slurm.inprocess.spare_descriptors import SpareDescriptors
from nvrx_slurm.inprocess.state import FrozenState, Mode, State, check_activity
from nvrx_slurm.inprocess.store import BarrierTimeout, HubStore
from nvrx_slurm.inprocess.timings import RestartTimings, Stopwatch
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.page import Phase, Plugin, Word
from nvrx_slurm.supervisor.process import Settings

if TYPE_CHECKING:
    from nvrx_slurm.inprocess.wrap import Wrapper

_log = logging.getLogger("nvrx_slurm.inprocess")
_ABORT_S = 30.0
"""A rank that leaves waits so long for an abort that has begun."""
_TICK_S = 0.1
"""The main thread is asked for a sign of life at least so often."""


class Engine:
    """One call.

    Args:
        wrapper: has the settings and plug-ins.
        function: to call, with ``args`` and ``kwargs``, in every iteration.
    """

    def __init__(
        self, wrapper: Wrapper, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._wrapper = wrapper
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._state = State.from_env()
        self._excepthook = sys.excepthook
        self._monitor: MonitorThread | None = None
        self._closers: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        """By which the function has ended, until a restart has got over it."""
        self._is_closed = False
        self._assigned: HubStore | None = None
        """The part of the store that the last assignment used."""

    def run(self) -> Any:
        """Return what the function returned; None on a spare.

        Raises:
            BaseException: what ends this rank; see the wrapper.
        """
        link = self._link = Link(self._supervisor_settings(), self._tick_s())
        try:
            link.start()
            try:
                result = self._iterate() if self._begin() else None
            except _InCopy as copy:
                # Sockets, store and supervisor are the parent's.
                self._is_closed = True
                outcome = copy.outcome
            except BaseException as error:
                self._leave(error)
                raise
            else:
                self._complete()
                return result
        finally:
            interrupted: BaseException | None = None
            # Ctrl-C may come anywhere in the cleaning up, which is then done again from the start.
            while not self._is_closed:
                try:
                    self._close()
                except (KeyboardInterrupt, SystemExit) as error:
                    interrupted = error
            if interrupted is not None:
                raise interrupted
        return outcome.result()

    def _close(self) -> None:
        """Clean up; called again if it did not come to its end."""
        # torch wraps it with every process group that is made.
        sys.excepthook = self._excepthook
        for close in self._closers:
            close()
        self._link.close()
        if self._monitor is not None:
            self._monitor.join(_ABORT_S)
        # An abort that hangs may still write to the page.
        if self._monitor is None or not self._monitor.is_alive():
            self._link.page.close()
        self._drop_locals()
        self._is_closed = True

    # --- before the first iteration ----------------------------------------------------------------------

    def _begin(self) -> bool:
        """Meet the others; False: their call has ended without this rank."""
        wrapper, state = self._wrapper, self._state
        self._link.page.words[Word.MAIN_THREAD] = threading.get_native_id()
        # Kept until all have read from it.
        meeting_store = wrapper.store_factory(**wrapper.store_kwargs)
        meeting = meet(self._link, meeting_store, state.rank, state.world_size, wrapper.rejoin)
        self._store = HubStore(meeting.addresses, meeting.token, timeout=wrapper.barrier_timeout)
        self._call = CallWrapper(wrapper, state, self._link.page, self._store)
        self._spare = SpareDescriptors()
        self._closers = [self._store.close, self._call.end, self._spare.release]
        if wrapper.rejoin:
            self._meeting_store = meeting_store
        barrier_s = wrapper.barrier_timeout.total_seconds()
        if not self._link.wait_joined(barrier_s):
            raise BarrierTimeout(
                f"not all of {state.world_size} ranks called the function within {barrier_s:g} s"
            )
        if state.rank == 0 and not wrapper.rejoin:
            close_meeting(meeting_store, meeting)
        self._signature = inspect.signature(self._function)
        self._injected = injection.parameters_of_type(self._function, CallWrapper)
        if self._link.is_queued:
            admitted = self._link.wait_admitted()
            if admitted is None:
                return False
            state.rank, state.iteration = admitted.rank, admitted.release.iteration
            state.world_size = admitted.world_size - admitted.release.joined
            release: msg.Release | None = admitted.release
        else:
            release = None
        self._phase(Phase.RECOVERY)
        self._assign(release)
        self._phase(Phase.WAITING)
        self._user_code = UserCode()
        monitor = MonitorThread(
            self._link,
            self._user_code,
            self._call.lock,
            self._abort_in_time,
            self._unblock,
            wrapper.hard_timeout.total_seconds(),
        )
        # There may be no more threads to be had.
        monitor.start()
        self._monitor = monitor
        return True

    def _supervisor_settings(self) -> Settings:
        wrapper, rank = self._wrapper, self._state.initial_rank
        return Settings(
            member=rank,
            soft_timeout_s=wrapper.soft_timeout.total_seconds(),
            hard_timeout_s=wrapper.hard_timeout.total_seconds(),
            heartbeat_interval_s=wrapper.heartbeat_interval.total_seconds(),
            heartbeat_timeout_s=wrapper.heartbeat_timeout.total_seconds(),
            termination_grace_s=wrapper.termination_grace_time.total_seconds(),
            logfile=(wrapper.monitor_process_logfile or "").format(rank=rank),
            pidfile=(wrapper.monitor_process_pidfile or "").format(rank=rank),
        )

    def _tick_s(self) -> float:
        interval = self._wrapper.progress_watchdog_interval.total_seconds()
        return min(interval, _TICK_S, self._wrapper.soft_timeout.total_seconds() / 10)

    # --- iterations --------------------------------------------------------------------------------------

    def _iterate(self) -> Any:
        while True:
            outcome = self._run_iteration()
            if isinstance(outcome, Returned):
                timed_out = self._wait_for_all()
                if self._link.is_done:
                    return outcome.value
                outcome = Raised(timed_out) if timed_out is not None else Interrupted(None)
            if isinstance(outcome, Raised) and not isinstance(outcome.error, Exception):
                raise outcome.error
            self._restart(outcome)

    def _run_iteration(self) -> Outcome:
        state, link = self._state, self._link
        self._call.reset_progress()
        self._phase(Phase.START)
        link.enter(state.iteration, state.rank, state.world_size)
        if link.is_interrupted:
            return Interrupted(None)
        outcome = self._user_code.run(self._user_section)
        if self._call.is_copy:
            raise _InCopy(outcome)
        self._phase(Phase.WAITING)
        if isinstance(outcome, Returned) and state.mode is not Mode.ACTIVE and not link.wait_any_completed():
            return Interrupted(None)
        return outcome

    def _user_section(self) -> Any:
        """What is interrupted: initialize, health check, function."""
        wrapper, frozen = self._wrapper, self._state.freeze()
        if wrapper.initialize is not None:
            self._at(Plugin.INITIALIZE)
            wrapper.initialize(frozen)
        if wrapper.health_check is not None:
            self._at(Plugin.HEALTH_CHECK)
            _check_health(wrapper.health_check, frozen)
        self._phase(Phase.USER)
        if self._state.mode is not Mode.ACTIVE:
            return None
        args, kwargs = injection.with_injected(
            self._signature, self._injected, self._call, self._args, self._kwargs
        )
        return self._function(*args, **kwargs)

    def _wait_for_all(self) -> BarrierTimeout | None:
        """Wait until all ranks have completed or the iteration is interrupted; return what else happened."""
        self._call.reset_progress()
        self._link.send(msg.Complete(self._state.iteration))
        limit_s = self._wrapper.completion_timeout.total_seconds()
        if self._link.wait_done(limit_s):
            return None
        return BarrierTimeout(f"not all ranks have completed within {limit_s:g} s")

    # --- from a fault to the next iteration --------------------------------------------------------------

    def _restart(self, outcome: Outcome) -> None:
        wrapper, state, link = self._wrapper, self._state, self._link
        watch = Stopwatch(time.monotonic())
        error = self._error = outcome.error if isinstance(outcome, (Raised, Interrupted)) else None
        is_own = not link.is_interrupted
        if is_own:
            self._phase(Phase.RECOVERY)
            self._at(Plugin.EXCEPTION_TEXT)
            self._report(error)
            self._phase(Phase.WAITING)
        barrier_s = wrapper.barrier_timeout.total_seconds()
        if not link.wait_aborted(barrier_s):
            raise BarrierTimeout(f"the abort of iteration {state.iteration} took more than {barrier_s:g} s")
        release_all(self._call.lock)
        self._phase(Phase.RECOVERY)
        link.notice()
        if wrapper.abort is not None and dist.is_initialized():
            # The function was about to make it when the abort ran.
            try:
                AbortTorchDistributed()(state.freeze())
            except Exception:
                _log.exception("process groups of iteration %d can't be ended", state.iteration)
        forget_attempts()
        sys.excepthook = self._excepthook
        if not is_own:
            watch = Stopwatch(link.interrupted_at)
        # Those whose exception follows from another rank's fault are no culprits.
        state.fn_exception = error if is_own and isinstance(error, Exception) else None
        self._drop_locals()
        self._spare.take()
        interrupt_s = watch.lap()
        frozen = state.freeze()
        if wrapper.finalize is not None:
            self._at(Plugin.FINALIZE)
            wrapper.finalize(frozen)
        finalize_s = watch.lap()
        if wrapper.restart_health_check is not None:
            self._at(Plugin.HEALTH_CHECK)
            _check_health(wrapper.restart_health_check, frozen)
        health_check_s = watch.lap()
        release = self._barrier()
        records = tuple(InterruptionRecord(r.rank, Interruption[r.kind]) for r in release.records)
        leave_to_job(records)
        barrier_s = watch.lap()
        self._phase(Phase.RECOVERY)
        iteration = state.iteration
        self._assign(release)
        state = self._state
        self._collect_garbage()
        assignment_s = watch.lap()
        self._call.last_restart = RestartTimings(
            iteration, records, release.terminated, interrupt_s, finalize_s, health_check_s, barrier_s,
            assignment_s, watch.total,
        )  # fmt: skip
        why = describe_with_reason(release.records)
        if state.rank == 0:
            report_restart(state, self._call.last_restart, why)
        _log.warning(
            "rank %d restarts as iteration %d, %.3f s after: %s",
            state.initial_rank, state.iteration, watch.total, why,
        )  # fmt: skip

    def _report(self, error: BaseException | None) -> None:
        iteration = self._state.iteration
        self._link.send(msg.Fault(iteration, Interruption.EXCEPTION.name, summary(error)))
        if error is not None:
            _log.warning(
                "rank %d, iteration %d: %s", self._state.initial_rank, iteration, summary(error),
                exc_info=exc_info(error),
            )  # fmt: skip

    def _barrier(self) -> msg.Release:
        self._phase(Phase.WAITING)
        self._link.send(msg.Arrive(self._state.iteration))
        limit_s = self._wrapper.barrier_timeout.total_seconds()
        release = self._link.wait_release(limit_s)
        if release is None:
            raise BarrierTimeout(f"not all ranks were ready to restart within {limit_s:g} s")
        return release

    def _assign(self, release: msg.Release | None) -> None:
        """Give this rank its numbers for the next iteration; None: for the first one."""
        state = self._state
        joined = range(state.world_size, state.world_size + (release.joined if release else 0))
        if joined:
            state.world_size = joined.stop
            # No filter lets it grow.
            state.active_world_size = None
        # Before the first iteration, and after each: every assignment has keys of its own.
        name = str(state.iteration) if release else "first"
        used, self._assigned = self._assigned, self._store.part(f"nvrx/assignment/{name}")
        context = RankAssignmentCtx(
            state, self._assigned, set(release.terminated if release else ()), frozenset(joined)
        )
        self._at(Plugin.RANK_ASSIGNMENT)
        assigned = self._wrapper.rank_assignment(context)
        self._at(Plugin.NONE)
        if not isinstance(assigned, RankAssignmentCtx):
            raise TypeError(
                f"rank_assignment returned {type(assigned).__name__}: a RankAssignmentCtx is accepted"
            )
        state = self._state = self._call.state = assigned.state
        check_activity(state)
        if release:
            state.advance()
        state.set_distributed_vars()
        # Two barriers have passed since: nobody reads them any more. Mostly there are none.
        if used is not None and used.was_used and state.rank == 0:
            used.delete_all()

    def _collect_garbage(self) -> None:
        """Free what the last iteration has left in cycles.

        A full collection takes longer than all the rest of a restart, and only GPU memory is worth it.
        """
        gc.collect(2 if torch.cuda.is_initialized() else 1)

    def _unblock(self) -> None:
        """End what the function may wait in for a rank that never comes, a group that it makes included."""
        if self._link.page.words[Word.PHASE] in (Phase.START, Phase.USER):
            self._store.interrupt()
            if self._wrapper.abort is not None:
                answer_gloo_listeners(self._state.world_size)
                shut_gloo_connections()

    def _abort(self) -> None:
        self._spare.release()
        self._unblock()
        if self._wrapper.abort is not None:
            self._wrapper.abort(self._state.freeze())

    def _abort_in_time(self) -> None:
        """Abort, but go on without it after half of the hard time-out; a plug-in may hang.

        The other half is for a main thread that must still be interrupted, before it is killed.
        """
        call_with_timeout(self._abort, self._wrapper.hard_timeout / 2, "the abort")

    # --- the end -----------------------------------------------------------------------------------------

    def _complete(self) -> None:
        state = self._state
        # For the next call: who is left, spares included.
        os.environ.update(RANK=str(state.rank), WORLD_SIZE=str(state.world_size))
        if self._wrapper.completion is not None:
            self._phase(Phase.RECOVERY)
            self._at(Plugin.COMPLETION)
            try:
                self._wrapper.completion(state.freeze())
            except Exception:
                _log.exception("the completion plug-in failed")
            self._phase(Phase.WAITING)

    def _leave(self, error: BaseException) -> None:
        """Tell the others, and clean up; called while ``error`` is on its way to the caller."""
        state = self._state
        self._phase(Phase.RECOVERY)
        self._at(Plugin.EXCEPTION_TEXT)
        kind = "" if issubclass(type(error), RankDiscarded) else Interruption.BASE_EXCEPTION.name
        self._link.send(msg.Leave(state.iteration, kind, summary(error)))
        self._phase(Phase.WAITING)
        if self._monitor is not None:
            release_all(self._call.lock)
            self._link.notice()
            if self._link.is_interrupted:
                with contextlib.suppress(InternalError):
                    self._link.wait_aborted(_ABORT_S)
            else:
                with contextlib.suppress(Exception):
                    self._abort_in_time()
        state.mode = Mode.TERMINATED
        if self._wrapper.terminate is not None:
            # It has its bound: nobody else would end a process that the job has given up.
            self._phase(Phase.RECOVERY)
            self._at(Plugin.TERMINATE)
            try:
                self._wrapper.terminate(state.freeze())
            except Exception as failure:
                raise failure from error

    def _drop_locals(self) -> None:
        """Let go of what the frames of the interrupted function hold: models, tensors, process groups."""
        error, self._error = self._error, None
        drop_locals(error)

    def _phase(self, phase: Phase) -> None:
        self._at(Plugin.NONE)
        self._link.page.set_phase(phase, time.monotonic_ns())

    def _at(self, plugin: Plugin) -> None:
        self._link.page.words[Word.PLUGIN] = plugin


class _InCopy(BaseException):
    """The function has forked this process, and its code has come to its end here, too."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


def _check_health(check: Callable[[FrozenState], Any], frozen: FrozenState) -> None:
    try:
        check(frozen)
    except Exception as error:
        if issubclass(type(error), HealthCheckError):
            raise
        raise HealthCheckError(str(error) or type(error).__name__) from error
