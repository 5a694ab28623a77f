"""Messages between an agent and its worker server, JSON over a ``SOCK_SEQPACKET`` socket pair.

File descriptors travel beside :class:`StartRanks`: first a memory file with the :class:`StartOrder`, of any
length, then the pipes of the ranks' output, one per rank in order.
"""

from __future__ import annotations

import os

import msgspec

from nvrx_slurm.wire.messages import Program

MAX_PACKET_BYTES = 160 * 1024
"""Below the default socket buffer (net.core.wmem_default, 208 KiB)."""
FD_VARIABLE = "NVRX_WORKER_SERVER_FD"
PARENT_VARIABLE = "NVRX_WORKER_SERVER_PARENT"
NO_PRELOAD = "--no-preload"
"""Argument of a server that is to import nothing; else its arguments are modules to import after torch."""


class Packet(msgspec.Struct, frozen=True, tag=True):
    """Base of all packets."""


class NumaBinding(msgspec.Struct, frozen=True):
    """Where a rank's threads run, and where its memory comes from."""

    node: int
    cpus: list[int]
    strict: bool
    """Its memory comes from this node or not at all."""


class RankSpec(msgspec.Struct, frozen=True):
    rank: int
    env: dict[str, str]
    """What differs between ranks."""
    binding: NumaBinding | None = None


class StartOrder(msgspec.Struct, frozen=True):
    """Which ranks to start, and how."""

    program: Program
    env: dict[str, str]
    """Added to the server's own environment for all ranks."""
    ranks: list[RankSpec]
    warm: bool
    exit_on_exception: bool = False
    """After the traceback, without joining threads or running exit handlers."""


class StartRanks(Packet, frozen=True):
    """Carry out the order in the memory file."""


class SignalRanks(Packet, frozen=True):
    """Signal the ranks that are alive: their process groups with SIGKILL and SIGCONT, and with every signal
    where the program is not Python; else the main process.
    """

    signal: int
    ranks: list[int] | None
    """None: all."""


class KillEverything(Packet, frozen=True):
    """SIGKILL ranks, their children and orphans; answered by :class:`Cleared` when nothing is left."""

    writers_s: float = 0.0
    """Only so long later the processes that write checkpoints, with what is below them: those that have
    nothing to write end by themselves when their rank does."""


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
    writers_killed: int = 0
    """Processes that were still writing checkpoints when their time was over."""


Reply = Started | StartError | Exited | Cleared

encode = msgspec.json.Encoder().encode
decode_request: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
decode_reply: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
decode_order: msgspec.json.Decoder[StartOrder] = msgspec.json.Decoder(StartOrder)


def write_order(order: StartOrder) -> int:
    """Return a descriptor of a memory file (memfd_create(2)) that holds ``order``.

    Raises:
        OSError: no memory, or no descriptor.
    """
    fd = os.memfd_create("nvrx-start-order", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(encode(order))
    return fd


def read_order(fd: int) -> StartOrder:
    """Return what :func:`write_order` wrote."""
    return decode_order.decode(os.pread(fd, os.fstat(fd).st_size, 0))
