"""Tells the job's journal of restarts, under nvrx-srun and nvrx-launch; elsewhere it does nothing."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Sequence

from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.timings import RestartTimings
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.rank_client import connect, one_line

_log = logging.getLogger("nvrx_slurm.inprocess")


_DEATHS = (Interruption.TERMINATED, Interruption.HARD_TIMEOUT, Interruption.UNRESPONSIVE)
_STOP_S = 10.0
"""An agent that restarts the job has stopped its ranks by then, or doesn't want to."""


def leave_to_job(records: Sequence[InterruptionRecord]) -> None:
    """Wait to be stopped when a rank has died whose agent restarts the whole job for that.

    Under nvrx-srun and nvrx-launch that decision is the Coordinator's alone: the survivors must not begin
    without the dead one, only to be stopped a moment later. Returns if nobody stops this process.
    """
    if rank_channel.SOCKET_VARIABLE in os.environ and any(r.interruption in _DEATHS for r in records):
        _log.warning("a rank has died: its restart is left to the job")
        threading.Event().wait(_STOP_S)


def report_restart(state: State, timings: RestartTimings, why: str) -> None:
    """Tell of the restart that begins ``state``'s iteration; one rank suffices. Never raises."""
    if rank_channel.SOCKET_VARIABLE not in os.environ:
        return
    faulty = sorted({record.rank for record in timings.records})
    try:
        request = rank_channel.InProcessRestart(
            # As the agent knows this process, whatever its number is by now.
            rank=state.initial_rank,
            cycle=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            iteration=state.iteration,
            faulty=tuple(faulty[: rank_channel.MOST_FAULTY]),
            terminated=len(timings.terminated_ranks),
            world_size=state.world_size,
            took_s=timings.total_s,
            phases_s=timings.phases(),
            why=one_line(why),
        )
        with connect() as channel:
            channel.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL)
    except (KeyError, OSError, ValueError) as error:
        _log.warning("the journal does not hear of this restart: %r", error)
