"""Messages between an agent and its worker server, JSON over a ``SOCK_SEQPACKET`` socket pair.

The pipes of the ranks' output travel beside :class:`StartRanks` as file descriptors, one per rank in order.
"""

from __future__ import annotations

import msgspec

from nvrx_slurm.wire.messages import Program

MAX_PACKET_BYTES = 160 * 1024
"""Below the default socket buffer (net.core.wmem_default, 208 KiB)."""
FD_VARIABLE = "NVRX_WORKER_SERVER_FD"
PARENT_VARIABLE = "NVRX_WORKER_SERVER_PARENT"
NO_PRELOAD = "--no-preload"


class Packet(msgspec.Struct, frozen=True, tag=True):
    """Base of all packets."""


class RankSpec(msgspec.Struct, frozen=True):
    rank: int
    env: dict[str, str]
    """Added to the server's own environment."""


class StartRanks(Packet, frozen=True):
    program: Program
    ranks: list[RankSpec]
    warm: bool


class SignalRanks(Packet, frozen=True):
    """Send a signal to the process groups of the ranks that are alive."""

    signal: int
    ranks: list[int] | None
    """None: all."""


class KillEverything(Packet, frozen=True):
    """SIGKILL ranks, their children and orphans; answered by :class:`Cleared` when nothing is left."""


Request = StartRanks | SignalRanks | KillEverything


class Started(Packet, frozen=True):
    pids: list[int]
    warm: bool
    why_cold: str


class StartError(Packet, frozen=True):
    why: str


class Exited(Packet, frozen=True):
    rank: int
    exit: int
    """Exit code, or minus the signal's number."""


class Cleared(Packet, frozen=True):
    pass


Reply = Started | StartError | Exited | Cleared

encode = msgspec.json.Encoder().encode
decode_request: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
decode_reply: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
