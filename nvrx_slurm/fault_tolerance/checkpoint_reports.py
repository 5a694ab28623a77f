"""Tells the job's journal of checkpoints on behalf of whoever makes them; the script need not."""

from __future__ import annotations

import logging
import os
import socket
import threading
from functools import cache

from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE, CheckpointEvent
from nvrx_slurm.wire.rank_client import connect, one_line

_log = logging.getLogger("nvrx_slurm.fault_tolerance")


class JobJournal:
    """As :class:`RankMonitorClient` reports checkpoints, but needs none. Outside a job it does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_lost = SOCKET_VARIABLE not in os.environ

    def report_checkpoint_saved(self, step: int, layer: str = "shared") -> None:
        """Record that the state after ``step`` is on stable storage; one rank suffices."""
        self._tell(CheckpointEvent.SAVED, step, layer)

    def report_checkpoint_loaded(self, step: int, layer: str = "shared", why: str = "") -> None:
        """Record that training resumes from the state after ``step``, and why; one rank suffices."""
        self._tell(CheckpointEvent.LOADED, step, layer, one_line(why))

    def report_checkpoint_held_up(self, save: int, why: str) -> None:
        """Record that a save had to wait, was skipped or has failed for want of room.

        Args:
            save: which one of its queue, from 0.
        """
        self._tell(CheckpointEvent.HELD_UP, save, "async", one_line(why))

    def _tell(self, what: CheckpointEvent, step: int, layer: str, why: str = "") -> None:
        """Never raises: training must not fail for what is said of it."""
        with self._lock:
            if self._is_lost:
                return
            try:
                rank, cycle = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
                request = rank_channel.Checkpoint(
                    rank=rank, cycle=cycle, what=what, step=step, layer=layer, why=why
                )
                if not rank_channel.is_acceptable(request):
                    _log.warning("the journal takes no checkpoint of step %r, layer %r", step, layer)
                    return
                self._socket = self._socket or connect()
                self._socket.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL)
            except (KeyError, OSError, ValueError) as error:
                _log.warning("the journal hears of no checkpoint from here: %r", error)
                self._is_lost = True


@cache
def job_journal() -> JobJournal:
    """Return that of this process."""
    return JobJournal()
