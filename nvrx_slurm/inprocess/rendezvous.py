"""How the ranks of a call find its hub."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from typing import Any

import msgspec

from nvrx_slurm.inprocess.link import Link
from nvrx_slurm.supervisor import messages as msg

_calls = itertools.count()
"""Every rank calls its wrapped functions in the same order."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Meeting(msgspec.Struct, frozen=True):
    """Where a call's hub is."""

    addresses: tuple[tuple[str, int], ...]
    token: str


def meet(link: Link, store: Any, rank: int, world_size: int, rejoin: bool) -> Meeting:
    """Have rank 0's supervisor run the hub, and every rank's join it.

    Args:
        link: to this rank's supervisor.
        store: of any kind that torch has; rank 0 writes one key.
        rank: of this process.
        world_size: of all.
        rejoin: this may be a process that comes later, in place of a lost one.

    Raises:
        InternalError: the hub can't be started.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"nvrx_inprocess/{attempt}/{next(_calls)}"
    if rank == 0 and not (rejoin and store.check([key])):
        token = secrets.token_hex(16)
        port = link.host(token, world_size, rejoin)
        meeting = Meeting(tuple((host, port) for host in _own_hosts()), token)
        store.set(key, msgspec.json.encode(meeting).decode())
    else:
        meeting = msgspec.json.decode(store.get(key), type=Meeting)
    link.join(meeting.addresses, msg.Join(meeting.token, rank, world_size))
    return meeting


def _own_hosts() -> list[str]:
    """Return how this host may be reached, the likeliest first."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    hosts = []
    try:
        # No packet is sent: this only asks which address leads there.
        with socket.socket(_family(master), socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            own = str(probe.getsockname()[0])
        if not own.startswith("127.") and own != "::1":
            hosts.append(own)
        elif master in _LOOPBACK:
            return [master]
    except OSError:
        pass
    # Without it: MASTER_ADDR is this host itself, if the launcher put rank 0 there as is usual.
    return [*hosts, *(host for host in (socket.gethostname(), master) if host not in hosts)]


def _family(host: str) -> socket.AddressFamily:
    family: socket.AddressFamily = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    return family
