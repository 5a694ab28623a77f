"""What another host needs to go on with a job: a file with its specification, and the journal."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from nvrx_slurm import journal
from nvrx_slurm.coordinator.ft_state import adopt
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.journal import Record, VerdictAction
from nvrx_slurm.whole_file import replace_file
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

_VERSION = 1


class HandoverError(RuntimeError):
    """The specification can't be used; the message says why."""


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Written once per start of the job; holds no secret: the agents have the token."""

    job_id: str
    restart_count: int
    submitted: int
    policy: Policy
    welcome: msg.Welcome
    monitoring: Monitoring
    keep_timeouts: bool
    standby: bool
    """Whoever finds the Coordinator lost goes on in the same allocation; otherwise it requeues the job."""
    iteration_file: str | None = None
    ends: int | None = None
    time_limit_margin_s: float = 0.0
    cycle_info_dir: str | None = None
    applog_prefix: str | None = None
    attribution: bool = True
    attribution_endpoint: str = ""
    output: str = ""
    """The file that the job's output goes to; empty: none."""
    v: int = _VERSION


_decoder = msgspec.json.Decoder(Handover)


def shared_output() -> str:
    """Return the file that this process's standard error goes to, as Slurm has opened it; empty: none.

    From now on this process appends to it, lest it overwrite what another host has appended.
    """
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            for fd in (1, 2):
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_APPEND)
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return ""


def save_handover(path: Path, handover: Handover) -> None:
    """Write the file.

    Raises:
        OSError: the directory can't be written.
    """
    replace_file(path, msgspec.json.encode(handover))


def load_handover(path: Path) -> Handover:
    """Read the file.

    Raises:
        HandoverError: it is not there, of another version, or something else.
    """
    try:
        handover = _decoder.decode(path.read_bytes())
    except OSError as error:
        raise HandoverError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise HandoverError(f"{path}: {error}") from error
    if handover.v != _VERSION:
        raise HandoverError(f"{path}: version {handover.v}, {_VERSION} is accepted")
    return handover


@dataclass
class JobState:
    """How far a start of the job had come, as its journal tells."""

    next_cycle: int = 0
    restarts: int = 0
    excluded: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    """Nodes that are gone and have not come back."""
    monitoring: Monitoring | None = None
    """With what ranks have calculated; None if nothing has been."""


def job_state(records: Iterable[Record], restart_count: int, configured: Monitoring) -> JobState:
    """Return the state of the start of the job that has this restart count; cycles count on over all."""
    state = JobState()
    for record in records:
        if isinstance(record.event, journal.CycleStarted):
            state.next_cycle = max(state.next_cycle, record.cycle + 1)
        if record.attempt != restart_count:
            continue
        match record.event:
            case journal.JobStarted():
                # A script may call nvrx-srun more than once.
                state = JobState(next_cycle=state.next_cycle)
            case journal.Verdict(action=VerdictAction.RESTART):
                state.restarts += 1
            case journal.NodeExcluded() as event:
                state.excluded[event.node] = event.reason
            case journal.NodeLost() as event:
                state.lost.add(event.node)
            case journal.NodeJoined() as event:
                state.lost.discard(event.node)
            case journal.TimeoutsCalculated() as event:
                state.monitoring = _calculated(event, configured) or state.monitoring
            case _:
                pass
    return state


def _calculated(event: journal.TimeoutsCalculated, configured: Monitoring) -> Monitoring | None:
    heartbeat = HeartbeatTimeouts(
        initial=event.initial,
        subsequent=event.subsequent,
        were_calculated=event.initial is not None and event.subsequent is not None,
    )
    section = SectionTimeouts(
        section=event.section,
        out_of_section=event.out_of_section,
        calculated_sections=[name for name, value in event.section.items() if value is not None],
        is_out_of_section_calculated=event.out_of_section is not None,
    )
    try:
        return adopt(configured, heartbeat, section)
    except ValueError:
        return None
