"""A rank's side of its monitor: a heartbeat is a store to shared memory, the rest a datagram."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE, CheckpointEvent, RankRequest

_log = logging.getLogger("nvrx_slurm.fault_tolerance")


class RankMonitorClientError(RuntimeError):
    """The client was used in a way that can't work; the message says what to do."""


class RankMonitorClient:
    """Tells the node's agent that this rank is alive and how far it is.

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

    From ``init_workload_monitoring`` on, a rank that misses its heartbeat deadline (``nvrx-srun
    --initial-heartbeat-timeout`` and ``--heartbeat-timeout``) is taken for hung and all ranks are restarted.
    Started by anything but nvrx-srun, plain ``torchrun`` for instance, there is no monitor: every call does
    nothing, and the first says so in the log. A client is for one thread; heartbeats may be sent from
    another thread than the one that opened it, as long as only one sends.
    """

    def __init__(self) -> None:
        self._page: HeartbeatPage | None = None
        self._socket: socket.socket | None = None
        self._initialized = False
        self._beaten = False
        self._rank = 0
        self._cycle = 0

    @property
    def is_initialized(self) -> bool:
        """Between ``init_workload_monitoring`` and ``shutdown_workload_monitoring``."""
        return self._initialized

    def init_workload_monitoring(self) -> None:
        """Begin monitoring; the initial heartbeat deadline runs from here.

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
            self._connect(Path(page_path))
        self._initialized = True
        self._beaten = False

    def _connect(self, page_path: Path) -> None:
        try:
            self._rank = int(os.environ["RANK"])
            self._cycle = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            page = HeartbeatPage.open(page_path)
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            channel.connect(os.environ[SOCKET_VARIABLE])
        except (KeyError, OSError, ValueError) as error:
            raise RankMonitorClientError(f"cannot reach this rank's monitor: {error!r}") from error
        self._page, self._socket = page, channel
        page.start_monitoring()
        self._tell(rank_channel.MonitoringStarted(rank=self._rank, cycle=self._cycle))

    def send_heartbeat(self, step: int | None = None) -> None:
        """Say that this rank is alive, once per training or evaluation step.

        Args:
            step: the step that was just completed; the journal and the reports show it, and ``steps lost``
                is counted from it.

        Raises:
            RankMonitorClientError: monitoring has not begun.
        """
        page = self._page
        if page is None:
            self._require_initialized("send_heartbeat")
            return
        page.beat(step)
        if not self._beaten:
            self._beaten = True
            self._tell(rank_channel.FirstHeartbeat(rank=self._rank, cycle=self._cycle))

    def should_stop(self) -> bool:
        """Tell whether the job was asked to stop soon (time limit near, preemption).

        The request reaches the ranks at slightly different moments: agree on it, by an ``all_reduce`` of a
        flag for instance, before acting. Then save a checkpoint and return from the training script with
        exit code 0; nvrx-srun ends with 75, which asks for a requeue.
        """
        return self._page is not None and self._page.stop_requested

    def report_checkpoint_saved(self, step: int, layer: str = "shared") -> None:
        """Record in the journal that the state after ``step`` is on stable storage. One rank suffices."""
        self._report_checkpoint(CheckpointEvent.SAVED, step, layer)

    def report_checkpoint_loaded(self, step: int, layer: str = "shared") -> None:
        """Record in the journal that training resumes from the state after ``step``. One rank suffices."""
        self._report_checkpoint(CheckpointEvent.LOADED, step, layer)

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring; no deadline runs from here. Does nothing when monitoring has not begun."""
        if self._page is not None:
            self._page.stop_monitoring()
            self._page.close()
            self._page = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._initialized = False

    def _report_checkpoint(self, what: CheckpointEvent, step: int, layer: str) -> None:
        self._require_initialized(f"report_checkpoint_{what.value}")
        self._tell(
            rank_channel.Checkpoint(rank=self._rank, cycle=self._cycle, what=what, step=step, layer=layer)
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
