"""The Unix socket on which a rank tells its agent the rare things; heartbeats do not pass here.

One JSON object per datagram (``SOCK_SEQPACKET`` keeps the boundaries); nothing is answered.
"""

from __future__ import annotations

import enum

import msgspec

from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, SectionTimeouts

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


class Checkpoint(Request, frozen=True):
    what: CheckpointEvent
    step: int
    layer: str


class TimeoutsChanged(Request, frozen=True):
    """The rank enforces other time-outs from now on; they are on its page already."""

    heartbeat: HeartbeatTimeouts
    section: SectionTimeouts


RankRequest = MonitoringStarted | FirstHeartbeat | Checkpoint | TimeoutsChanged

encode_request = msgspec.json.Encoder().encode
decode_request: msgspec.json.Decoder[RankRequest] = msgspec.json.Decoder(RankRequest)
