"""Whether a save fits, before it begins."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.checkpointing.local.base_state_dict import trust
from nvrx_slurm.checkpointing.storage.host_memory import available_memory

_GIB = 1 << 30
_MEMORY_TYPES = ("tmpfs", "ramfs", "hugetlbfs")


@trust
@dataclass(frozen=True)
class Room:
    """What a rank finds where it saves to, in bytes."""

    host: str
    device: int
    """Number of the file system on this host."""
    where: str
    free: int
    in_memory: bool
    memory: int
    """What processes of this host can still have."""
    spare: int = 0
    """What this rank has already for copies."""


def look_at(directory: Path, spare: int = 0) -> Room:
    """
    Args:
        spare: memory that this rank has for copies.

    Raises:
        OSError: there is no such directory.
    """
    found = os.statvfs(directory)
    return Room(
        host=socket.gethostname(),
        device=os.stat(directory).st_dev,
        where=str(directory),
        free=found.f_bavail * found.f_frsize,
        in_memory=file_system_type(directory) in _MEMORY_TYPES,
        memory=available_memory(),
        spare=spare,
    )


def file_system_type(directory: Path) -> str:
    """Return the type that the kernel gives the mounted file system, ``""`` if it does not list it."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, rest = line.partition(" - ")
        if mount.split()[2] == number:
            return rest.split()[0]
    return ""


def shortage(rooms: Mapping[int, Room], own: Mapping[int, int], needed: Mapping[int, int]) -> str | None:
    """Say where a save does not fit: on the file system, or in memory until it is there.

    Args:
        rooms: by rank.
        own: bytes of a rank's own part, which it has copied already.
        needed: bytes that a rank writes: its own part, and those that it gets from others.
    """
    for host in sorted({room.host for room in rooms.values()}):
        ranks = [rank for rank, room in rooms.items() if room.host == host]
        copies = sum(needed[rank] - own[rank] - rooms[rank].spare for rank in ranks)
        total = max(0, copies) + sum(needed[rank] for rank in ranks if rooms[rank].in_memory)
        free = min(rooms[rank].memory for rank in ranks)
        if total > free:
            return f"{host} has {_text(free)} of memory free, the save needs {_text(total)}"
    ranks_at: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, room in rooms.items():
        ranks_at[room.host, room.device].append(rank)
    for (host, _), ranks in sorted(ranks_at.items()):
        room = rooms[ranks[0]]
        total = sum(needed[rank] for rank in ranks)
        free = min(rooms[rank].free for rank in ranks)
        if total > free:
            return f"{room.where} on {host} has {_text(free)} free, the save needs {_text(total)}"
    return None


def _text(size: int) -> str:
    return f"{size / _GIB:.2f} GiB" if size >= _GIB // 100 else f"{size} bytes"


def total_of(ranks: Collection[int], sizes: Mapping[int, int]) -> int:
    """Return what the parts of ``ranks`` take together."""
    return sum(sizes[rank] for rank in ranks)
