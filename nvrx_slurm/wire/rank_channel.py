"""The Unix socket on which a rank tells its agent the rare things; heartbeats do not pass here.

One JSON object per datagram (``SOCK_SEQPACKET`` keeps the boundaries); nothing is answered.
"""

from __future__ import annotations

import enum
import math
from pathlib import Path

import msgspec

from nvrx_slurm.pace import StragglerVerdict
from nvrx_slurm.pace.exchange import Name, Period, is_name, is_period
from nvrx_slurm.pace.names import MOST_NAMES
from nvrx_slurm.wire.timeouts import MAX_NAME_BYTES, HeartbeatTimeouts, SectionTimeouts

SOCKET_VARIABLE = "NVRX_RANK_SOCKET"
"""Environment variable with the socket's path."""
MAX_REQUEST_BYTES = 64 * 1024


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what a rank may say."""

    rank: int
    cycle: int


class MonitoringStarted(Request, frozen=True):
    """``init_workload_monitoring`` was called."""


class FirstHeartbeat(Request, frozen=True):
    """The cycle's first heartbeat of this rank is on its page."""


class CheckpointEvent(str, enum.Enum):
    SAVED = "saved"
    LOADED = "loaded"
    HELD_UP = "held_up"
    """The storage, or the memory, can't keep up with what is saved."""


class Checkpoint(Request, frozen=True):
    what: CheckpointEvent
    step: int
    """Of training; of one that was held up: which save it is, counted from 0."""
    layer: str
    why: str = ""
    """Why this one, where several were to be had."""


class WorkloadAction(enum.IntEnum):
    """What a rank can ask for; names and values are those of NVIDIA's extension."""

    Continue = 0
    """Nothing."""
    ExcludeThisNode = 1
    """All ranks restart without the rank's node, which the job does not use again."""
    ShutdownWorkload = 2
    """The job ends in good order, with exit code 0."""


class Control(Request, frozen=True):
    action: WorkloadAction
    description: str


MAX_DESCRIPTION = 500
"""Characters."""
_MOST_TEXTS = 32


def is_description(text: str) -> bool:
    """Tell whether ``text`` can be shown on a terminal as it is."""
    return len(text) <= MAX_DESCRIPTION and text.isprintable()


class TimeoutsChanged(Request, frozen=True):
    """The rank enforces other time-outs from now on; they are on its page already."""

    heartbeat: HeartbeatTimeouts
    section: SectionTimeouts


class Straggler(Request, frozen=True):
    """A rank has been found slow, by its own or by another rank's report."""

    verdict: StragglerVerdict


class PaceNames(Request, frozen=True):
    """Names of sections and kernels that :class:`PacePeriod` has numbers for."""

    first: int
    """The number of the first."""
    names: list[Name]


class PacePeriod(Request, frozen=True):
    """How long this rank took since it last said so; the answer is a file beside its page."""

    period: Period


def pace_path(page: Path) -> Path:
    """Return where a rank finds the scores of all ranks, beside its heartbeat page."""
    return page.with_suffix(".pace")


class InProcessRestart(Request, frozen=True):
    """The ranks have called their function again in their processes; one rank of all tells it."""

    iteration: int
    """The one that begins; 1 for the first restart."""
    faulty: tuple[int, ...]
    """Ranks that had a fault, numbered as in the iteration before; :data:`MOST_FAULTY` at most."""
    terminated: int
    """How many ranks are gone."""
    world_size: int
    """How many go on, spares included."""
    took_s: float
    phases_s: dict[str, float]
    why: str


MOST_FAULTY = 128


class GivenUp(Request, frozen=True):
    """The rank hangs, and the supervisor of its in-process restart is about to kill it."""

    why: str


class ProgramFailed(Request, frozen=True):
    """The main thread has failed; the process itself ends soon, or is kept by something."""

    exit: int
    """The code that it ends with, 1 to 255."""


def is_step(value: object) -> bool:
    """Tell whether ``value`` can be a step everywhere that steps go: an integer of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def is_layer(value: object) -> bool:
    """Tell whether ``value`` can name a checkpoint's layer."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return 0 < len(value.encode()) <= MAX_NAME_BYTES


def is_timeout(value: float | None) -> bool:
    """Tell whether ``value`` can be enforced; None: there is none."""
    return value is None or (math.isfinite(value) and value > 0)


def is_verdict(verdict: StragglerVerdict) -> bool:
    """Tell whether its values can be true, and be shown."""
    texts = [verdict.node, verdict.gpu, *verdict.context, *(loss.kernel for loss in verdict.kernels)]
    return (
        is_layer(verdict.section)
        and 0 <= verdict.score <= 1
        and 0 <= verdict.lost_ms < math.inf
        and 0 < verdict.reports <= verdict.of_reports < 2**31
        and 0 <= verdict.rank < 2**31
        and len(texts) <= _MOST_TEXTS
        and all(map(is_description, texts))
        and all(math.isfinite(loss.lost_ms) for loss in verdict.kernels)
    )


RankRequest = (
    MonitoringStarted
    | FirstHeartbeat
    | Checkpoint
    | Control
    | TimeoutsChanged
    | Straggler
    | PaceNames
    | PacePeriod
    | InProcessRestart
    | GivenUp
    | ProgramFailed
)

encode_request = msgspec.json.Encoder().encode


def is_acceptable(request: RankRequest) -> bool:
    """Tell whether the values of a request can be passed on."""
    match request:
        case Checkpoint():
            return is_step(request.step) and is_layer(request.layer) and is_description(request.why)
        case Control():
            return is_description(request.description)
        case TimeoutsChanged():
            heartbeat, section = request.heartbeat, request.section
            values = [heartbeat.initial, heartbeat.subsequent, section.out_of_section]
            return all(map(is_timeout, [*values, *section.section.values()]))
        case Straggler():
            return is_verdict(request.verdict)
        case PaceNames():
            return 0 <= request.first <= MOST_NAMES and all(map(is_name, request.names))
        case PacePeriod():
            return is_period(request.period)
        case InProcessRestart():
            counts = (request.iteration, request.terminated, request.world_size, *request.faulty)
            times = (request.took_s, *request.phases_s.values())
            return (
                all(0 <= count < 2**31 for count in counts)
                and all(0 <= time < math.inf for time in times)
                and len(request.faulty) <= MOST_FAULTY
                and len(request.phases_s) <= MOST_FAULTY
                and all(map(is_layer, request.phases_s))
                and is_description(request.why)
            )
        case GivenUp():
            return is_description(request.why)
        case ProgramFailed():
            return 0 < request.exit < 256
        case _:
            return True


decode_request: msgspec.json.Decoder[RankRequest] = msgspec.json.Decoder(RankRequest)
