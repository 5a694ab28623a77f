"""Tells the job's journal of restarts, under nvrx-srun and nvrx-launch; elsewhere it does nothing."""

from __future__ import annotations

import logging
import os
import socket

from nvrx_slurm.fault_tolerance.channel import connect, one_line
from nvrx_slurm.inprocess.attribution import format_interruption_records
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.timings import RestartTimings
from nvrx_slurm.wire import rank_channel

_log = logging.getLogger("nvrx_slurm.inprocess")


def report_restart(state: State, timings: RestartTimings) -> None:
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
            why=one_line(format_interruption_records(timings.records)),
        )
        with connect() as channel:
            channel.send(rank_channel.encode_request(request), socket.MSG_NOSIGNAL)
    except (KeyError, OSError, ValueError) as error:
        _log.warning("the journal does not hear of this restart: %r", error)
