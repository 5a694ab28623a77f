"""A rank's side of its monitor: heartbeats and sections are stores to shared memory, the rest a datagram."""

from __future__ import annotations

import logging
import operator
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nvrx_slurm.fault_tolerance import stopping
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.fault_tolerance.flight_recorder import serve_traces
from nvrx_slurm.fault_tolerance.stacks import StacksOnRequest
from nvrx_slurm.fault_tolerance.timeouts import (
    IntervalMeter,
    Maxima,
    NotEnoughDataError,
    calculate_heartbeat,
    calculate_sections,
)
from nvrx_slurm.pace import StragglerVerdict
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.rank_channel import (
    CheckpointEvent,
    RankRequest,
    WorkloadAction,
    is_layer,
    is_step,
)
from nvrx_slurm.wire.rank_client import connect, one_line
from nvrx_slurm.wire.timeouts import (
    MAX_NAME_BYTES,
    MONITORING_VARIABLE,
    HeartbeatTimeouts,
    Monitoring,
    SectionTimeouts,
    to_state,
    with_state,
)

_log = logging.getLogger("nvrx_slurm.fault_tolerance")
_clock = time.monotonic_ns


class RankMonitorClientError(RuntimeError):
    """The client was used in a way that can't work; the message says what to do."""


def _bad_step(call: str, step: object) -> RankMonitorClientError:
    # The text of a number may be refused for its length.
    shown = "a longer integer" if type(step) is int else f"{step!r:.100}"
    return RankMonitorClientError(f"{call} got {shown} as step: an integer of 64 bits is accepted")


def _check_step(call: str, step: object) -> int:
    """Return ``step``, an integer of whatever library, as Python's own."""
    try:
        index = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise _bad_step(call, step) from None
    if isinstance(step, bool) or not is_step(index):
        raise _bad_step(call, step)
    return index


@dataclass(frozen=True)
class RankInfo:
    global_rank: int
    local_rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class WorkloadControlRequest:
    """What a rank wants for the whole job, and why."""

    action: WorkloadAction
    description: str = ""
    """For the journal and the terminal: its first 500 characters are shown, on one line."""


class RankMonitorClient:
    """Tells the node's agent that this rank is alive, what it does, and how far it is.

    Typical use::

        client = RankMonitorClient()
        client.init_workload_monitoring()
        for step in range(start, steps):
            train(step)
            client.send_heartbeat(step=step)
            if client.should_stop():
                save(step)
                break
        client.shutdown_workload_monitoring()

    From ``init_workload_monitoring`` on, a rank that misses a deadline is taken for hung and all ranks are
    restarted. Deadlines run between heartbeats, for every open section that has a time-out, and while no
    section is open; see ``docs/hang_detection.md``. Either kind can be used alone.

    Started by anything but nvrx-srun, plain ``torchrun`` for instance, there is no monitor: every call does
    nothing, and the first says so in the log. A client is for one thread; heartbeats may be sent from
    another thread than the one that opened it, as long as only one uses it at a time.
    """

    def __init__(self) -> None:
        self.cfg: FaultToleranceConfig | None = None
        """What nvrx-srun was told; None before ``init_workload_monitoring`` and without a monitor."""
        self.rank_info: RankInfo | None = None
        self.hb_timeouts = HeartbeatTimeouts()
        """As they are enforced now."""
        self.section_timeouts = SectionTimeouts()
        """As they are enforced now."""
        self._page: HeartbeatPage | None = None
        self._socket: socket.socket | None = None
        self._stacks: StacksOnRequest | None = None
        self._meter = IntervalMeter(0, 0)
        self._slots: dict[str, int] = {}
        self._warmup: dict[str, int] = {}
        """How often each section with a warm-up time-out may still be opened with it."""
        self._monitoring: Monitoring | None = None
        self._loaded_state: Mapping[str, Any] | None = None
        self._unmonitored: set[str] = set()
        self._initialized = False
        self._beaten = False
        self._rank = 0
        self._cycle = 0

    @property
    def is_initialized(self) -> bool:
        """Between ``init_workload_monitoring`` and ``shutdown_workload_monitoring``."""
        return self._initialized

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Begin monitoring; the initial heartbeat deadline and the one outside of sections run from here.

        Args:
            num_warmup_iters: how often a section with a warm-up time-out is opened with it, instead of
                ``num_warmup_iterations`` of the configuration.

        Raises:
            RankMonitorClientError: called twice, or the monitor that the environment names is not there.
        """
        if self._initialized:
            raise RankMonitorClientError(
                "init_workload_monitoring was called before; call shutdown_workload_monitoring first"
            )
        page_path = os.environ.get(PAGE_VARIABLE)
        if page_path is None:
            _log.info("no rank monitor here (%s is not set): heartbeats do nothing", PAGE_VARIABLE)
        else:
            self._connect(Path(page_path), num_warmup_iters)
        self._initialized = True
        self._beaten = False

    def _connect(self, page_path: Path, num_warmup_iters: int | None) -> None:
        try:
            self._rank = int(os.environ["RANK"])
            self._cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            local_rank = int(os.environ["LOCAL_RANK"])
            monitoring = msgspec.json.decode(os.environ[MONITORING_VARIABLE], type=Monitoring)
            page = HeartbeatPage.open(page_path)
            channel = connect()
        except (KeyError, OSError, ValueError) as error:
            raise RankMonitorClientError(f"cannot reach this rank's monitor: {error!r}") from error
        self._page, self._socket, self._monitoring = page, channel, monitoring
        self.cfg = FaultToleranceConfig.from_monitoring(monitoring)
        self.rank_info = RankInfo(self._rank, local_rank, socket.gethostname(), os.getpid())
        self.hb_timeouts, self.section_timeouts = monitoring.heartbeat, monitoring.section
        self._slots = {name: slot for slot, name in enumerate(monitoring.section.section)}
        now = _clock()
        self._meter = IntervalMeter(len(self._slots), now)
        page.set_timeouts(self.hb_timeouts, self.section_timeouts)
        self._begin_warmup(page, monitoring, num_warmup_iters)
        self._stacks = StacksOnRequest(page_path)
        serve_traces(page_path)
        page.start_monitoring(now)
        self._tell(rank_channel.MonitoringStarted(rank=self._rank, cycle=self._cycle))
        if self._loaded_state is not None:
            self.load_state_dict(self._loaded_state)

    def _begin_warmup(self, page: HeartbeatPage, monitoring: Monitoring, iterations: int | None) -> None:
        count = monitoring.warmup_iterations if iterations is None else iterations
        self._warmup = dict.fromkeys(monitoring.warmup, count) if count > 0 else {}
        for name in self._warmup:
            page.set_section_timeout(self._slots[name], monitoring.warmup[name])

    # --- signs of life -------------------------------------------------------------------------------

    def send_heartbeat(self, step: int | None = None) -> None:
        """Say that this rank is alive, once per training or evaluation step.

        Args:
            step: the step that was just completed; the journal and the reports show it, and ``steps lost``
                is counted from it.

        Raises:
            RankMonitorClientError: monitoring has not begun, or ``step`` is no integer of 64 bits.
        """
        page = self._page
        if page is None:
            self._require_initialized("send_heartbeat")
            if step is not None:
                _check_step("send_heartbeat", step)
            return
        now = _clock()
        try:
            page.beat(step, now)
        except (TypeError, ValueError):
            raise _bad_step("send_heartbeat", step) from None
        self._meter.heartbeat(now)
        if not self._beaten:
            self._beaten = True
            self._tell(rank_channel.FirstHeartbeat(rank=self._rank, cycle=self._cycle))

    def start_section(self, name: str) -> None:
        """Open a section; its deadline runs until ``end_section``. Sections may overlap.

        A section without an entry in ``--ft-rank-section-timeouts`` is not monitored: the call does nothing
        then, and says so once in the log.

        Raises:
            RankMonitorClientError: the section is open already, or monitoring has not begun.
        """
        slot = self._slots.get(name)
        page = self._page
        if slot is None or page is None:
            self._require_initialized("start_section")
            self._note_unmonitored(name)
            return
        meter = self._meter
        if meter.is_open(slot):
            raise RankMonitorClientError(f"section {name!r} is open already: end_section comes first")
        if self._warmup:
            self._count_warmup(page, name, slot)
        now = _clock()
        page.open_section(slot, now, meter.open(slot, now))

    def end_section(self, name: str) -> None:
        """Close a section.

        Raises:
            RankMonitorClientError: the section is not open, or monitoring has not begun.
        """
        slot = self._slots.get(name)
        page = self._page
        if slot is None or page is None:
            self._require_initialized("end_section")
            return
        meter = self._meter
        if not meter.is_open(slot):
            raise RankMonitorClientError(f"section {name!r} is not open: start_section comes first")
        now = _clock()
        page.close_section(slot, now, meter.close(slot, now))

    def end_all_sections(self) -> None:
        """Close every open section, as after an exception; does nothing when none is open.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        self._require_initialized("end_all_sections")
        for name, slot in self._slots.items():
            if self._meter.is_open(slot):
                self.end_section(name)

    def _count_warmup(self, page: HeartbeatPage, name: str, slot: int) -> None:
        left = self._warmup.get(name)
        if left is None:
            return
        if left > 0:
            self._warmup[name] = left - 1
        else:
            del self._warmup[name]
            page.set_section_timeout(slot, self.section_timeouts.section[name])

    def _note_unmonitored(self, name: str) -> None:
        if self._page is not None and name not in self._unmonitored:
            self._unmonitored.add(name)
            _log.info(
                "section %r is not monitored: it has no entry in --ft-rank-section-timeouts (there: %s)",
                name,
                ", ".join(self._slots) or "none",
            )

    # --- time-outs -----------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Calculate the heartbeat time-outs from what all ranks have measured, and enforce them.

        Every rank must call it at the same point. Later cycles, and later jobs with the same run directory,
        begin with the calculated values.

        Args:
            skip_if_not_ready: return False, on every rank, where an error would be raised.

        Returns:
            True if the time-outs were set. False without a monitor.

        Raises:
            RankMonitorClientError: no rank has sent two heartbeats yet, or there is no process group.
        """
        self._require_initialized("calculate_and_set_hb_timeouts")

        def calculate(merged: Maxima, factor: float) -> None:
            self._set_timeouts(calculate_heartbeat(merged, self.hb_timeouts, factor), self.section_timeouts)

        return self._calculate(calculate, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same for sections.

        Args:
            selected_sections: whose time-outs; by default of all monitored sections.
            calc_out_of_section: calculate the time-out outside of sections, too.
            skip_if_not_ready: return False, on every rank, where an error would be raised.

        Raises:
            RankMonitorClientError: no rank has ended one of the sections yet, a section is not monitored, or
                there is no process group.
        """
        self._require_initialized("calculate_and_set_section_timeouts")

        def calculate(merged: Maxima, factor: float) -> None:
            sections = calculate_sections(
                merged, self.section_timeouts, factor, selected_sections, calc_out_of_section
            )
            self._set_timeouts(self.hb_timeouts, sections)

        return self._calculate(calculate, skip_if_not_ready)

    def _calculate(self, calculate: Callable[[Maxima, float], None], skip_if_not_ready: bool) -> bool:
        if self._monitoring is None:
            return False
        from nvrx_slurm.fault_tolerance.collective import maximum_over_ranks

        try:
            merged = Maxima.from_list(maximum_over_ranks(self._meter.maxima(_clock()).to_list()))
            calculate(merged, self._monitoring.safety_factor)
        except NotEnoughDataError as error:
            # Known after the reduction only, so that every rank comes to the same result.
            if skip_if_not_ready:
                return False
            raise RankMonitorClientError(f"time-outs cannot be calculated yet: {error}") from error
        except (RuntimeError, ValueError) as error:
            raise RankMonitorClientError(f"time-outs cannot be calculated: {error}") from error
        return True

    def _set_timeouts(self, heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> None:
        self.hb_timeouts, self.section_timeouts = heartbeat, section
        if self._page is None:
            return
        self._page.set_timeouts(heartbeat, section)
        for name in self._warmup:
            if self._monitoring is not None:
                self._page.set_section_timeout(self._slots[name], self._monitoring.warmup[name])
        self._tell(
            rank_channel.TimeoutsChanged(
                rank=self._rank, cycle=self._cycle, heartbeat=heartbeat, section=section
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the calculated time-outs as plain values, the same on all ranks; for a checkpoint."""
        return to_state(self.hb_timeouts, self.section_timeouts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Enforce the time-outs of an earlier ``state_dict``; before ``init_workload_monitoring``: from then.

        Raises:
            RankMonitorClientError: it is none.
        """
        monitoring = self._monitoring or Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts())
        current = msgspec.structs.replace(
            monitoring, heartbeat=self.hb_timeouts, section=self.section_timeouts
        )
        try:
            loaded = with_state(current, state_dict)
        except ValueError as error:
            raise RankMonitorClientError(str(error)) from error
        if self._monitoring is None:
            self._loaded_state = dict(state_dict)
        else:
            self._set_timeouts(loaded.heartbeat, loaded.section)

    # --- the rest ------------------------------------------------------------------------------------

    def should_stop(self) -> bool:
        """Tell whether the job was asked to stop soon (time limit near, preemption).

        The request reaches the ranks at slightly different moments: agree on it, by an ``all_reduce`` of a
        flag for instance, before acting. Then save a checkpoint and return from the training script with
        exit code 0; nvrx-srun ends with 75, which asks for a requeue.

        Also true after a signal that ``stop_on_signals`` was told of. Processes without a client, data-loader
        workers for instance, call ``nvrx_slurm.fault_tolerance.should_stop``.
        """
        return stopping.signalled() or (self._page is not None and self._page.stop_requested)

    def send_workload_control_request(self, request: WorkloadControlRequest) -> None:
        """Have this rank's node left out of the job, or the whole job ended; it is done at once.

        The call returns when the request is on its way; all ranks, this one included, are then stopped with
        SIGTERM. What this rank does meanwhile makes no difference, nor its exit code.

        Raises:
            RankMonitorClientError: monitoring has not begun, or ``request`` is none.
        """
        call = "send_workload_control_request"
        self._require_initialized(call)
        if not isinstance(request, WorkloadControlRequest) or request.action not in list(WorkloadAction):
            raise RankMonitorClientError(f"{call} got {request!r:.100}: a WorkloadControlRequest is accepted")
        if request.action is WorkloadAction.Continue:
            return
        if self._socket is None:
            _log.warning("no rank monitor here: nobody does what was asked for: %s", request)
        description = one_line(request.description)
        action = WorkloadAction(request.action)
        self._tell(
            rank_channel.Control(rank=self._rank, cycle=self._cycle, action=action, description=description)
        )

    def report_checkpoint_saved(self, step: int, layer: str = "shared") -> None:
        """Record in the journal that the state after ``step`` is on stable storage. One rank suffices.

        Raises:
            RankMonitorClientError: ``step`` is no integer of 64 bits, or monitoring has not begun.
        """
        self._report_checkpoint(CheckpointEvent.SAVED, step, layer)

    def report_checkpoint_loaded(self, step: int, layer: str = "shared", why: str = "") -> None:
        """Record in the journal that training resumes from the state after ``step``. One rank suffices.

        Args:
            why: this one was chosen, where there were several.

        Raises:
            RankMonitorClientError: ``step`` is no integer of 64 bits, or monitoring has not begun.
        """
        self._report_checkpoint(CheckpointEvent.LOADED, step, layer, one_line(why))

    def report_straggler(
        self, rank: int, section: str, score: float, lost_ms: float, reports: int, of_reports: int
    ) -> None:
        """Record in the journal that ``rank`` is slow; one rank suffices to tell of it.

        The arguments are fields of :class:`nvrx_slurm.straggler.StragglerVerdict`. All that follows from
        it is a line in output and report.

        Raises:
            RankMonitorClientError: a value is out of its range, or monitoring has not begun.
        """
        call = "report_straggler"
        self._require_initialized(call)
        try:
            verdict = StragglerVerdict(
                rank=operator.index(rank),
                node="",
                section=section,
                score=float(score),
                lost_ms=float(lost_ms),
                reports=operator.index(reports),
                of_reports=operator.index(of_reports),
            )
            request = rank_channel.Straggler(rank=self._rank, cycle=self._cycle, verdict=verdict)
            acceptable = rank_channel.is_acceptable(request)
        except (TypeError, ValueError):
            acceptable = False
        if not acceptable:
            given = (rank, section, score, lost_ms, reports, of_reports)
            raise RankMonitorClientError(
                f"{call} got {given!r:.200}: a rank, a section's name, a score from 0 to 1, milliseconds from"
                " 0, and so many of so many reports are accepted"
            )
        self._tell(request)

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring; no deadline runs from here. Does nothing when monitoring has not begun."""
        if self._page is not None:
            self._page.stop_monitoring()
            self._page.close()
            self._page = None
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._slots, self._warmup, self._monitoring = {}, {}, None
        self._initialized = False

    def _report_checkpoint(self, what: CheckpointEvent, step: int, layer: str, why: str = "") -> None:
        call = f"report_checkpoint_{what.value}"
        self._require_initialized(call)
        step = _check_step(call, step)
        if not is_layer(layer):
            raise RankMonitorClientError(
                f"{call} got {layer!r:.100} as layer: 1 to {MAX_NAME_BYTES} bytes of text are accepted"
            )
        self._tell(
            rank_channel.Checkpoint(
                rank=self._rank, cycle=self._cycle, what=what, step=step, layer=layer, why=why
            )
        )

    def _require_initialized(self, call: str) -> None:
        if not self._initialized:
            raise RankMonitorClientError(f"{call} needs init_workload_monitoring first")

    def _tell(self, request: RankRequest) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL)
        except OSError as error:
            # The agent is gone or going, and this process with it; training code must not see an error first.
            _log.warning("the rank monitor is gone: %s", error)
            self._socket.close()
            self._socket = None
