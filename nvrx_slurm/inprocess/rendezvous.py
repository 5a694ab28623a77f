"""How the ranks of a call find its hub."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
from typing import Any

import msgspec
import torch.distributed as dist

from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.link import Link
from nvrx_slurm.inprocess.store import BarrierTimeout
from nvrx_slurm.supervisor import messages as msg

_calls = itertools.count()
"""Every rank calls its wrapped functions in the same order."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Meeting(msgspec.Struct, frozen=True):
    """Where a call's hub is."""

    addresses: tuple[tuple[str, int], ...]
    token: str
    key: str
    """Under which the store has this."""


def meet(link: Link, store: Any, rank: int, world_size: int, rejoin: bool) -> Meeting:
    """Have rank 0's supervisor run the hub, and every rank's join it.

    Args:
        link: to this rank's supervisor.
        store: of any kind that torch has; rank 0 writes one key.
        rank: of this process.
        world_size: of all.
        rejoin: this may be a process that comes later, in place of a lost one.

    Raises:
        InternalError: the hub can't be started, or found.
        BarrierTimeout: rank 0 has not come within the store's time-out.
    """
    key = f"{_job()}/{next(_calls)}"
    try:
        if rank == 0 and not (rejoin and store.check([key])):
            meeting = _call_together(link, store, key, world_size, rejoin)
        else:
            meeting = msgspec.json.decode(store.get(key), type=Meeting)
    except dist.DistStoreError as error:
        raise BarrierTimeout(f"rank {rank} waits for rank 0 in vain: {_first_line(error)}") from error
    except dist.DistError as error:
        raise InternalError(
            f"rank {rank} has lost the store in which it looks for rank 0: {_first_line(error)}"
        ) from error
    link.join(meeting.addresses, msg.Join(meeting.token, rank, world_size))
    return meeting


def close_meeting(store: Any, meeting: Meeting) -> None:
    """Take the secret out of the store when all ranks have it: a launcher's store lives on, open to all."""
    # Some kinds of stores can't.
    with contextlib.suppress(Exception):
        store.delete_key(meeting.key)
        store.delete_key(f"{meeting.key}/hubs")


def _call_together(link: Link, store: Any, key: str, world_size: int, rejoin: bool) -> Meeting:
    token = secrets.token_hex(16)
    port = link.host(token, world_size, rejoin)
    meeting = Meeting(tuple((host, port) for host in _own_hosts()), token, key)
    # Stores of users have add, which rank assignment needs, but not all compare_set.
    # With rejoin it may be in place of a rank 0 that ended just here.
    if store.add(f"{key}/hubs", 1) > 1 and not rejoin:
        raise InternalError(
            f"the store of store_factory has the key {key} already: another job uses the same store, by the "
            "same MASTER_PORT for example, or it is left of an earlier one"
        )
    store.set(key, msgspec.json.encode(meeting).decode())
    return meeting


def _job() -> str:
    """Return what all ranks of one job have in common, and ranks of two mostly don't."""
    names = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "/".join(["nvrx_inprocess", *(os.environ.get(name, "") for name in names)])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
