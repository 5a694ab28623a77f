"""The bytes of tensor storages in host memory, and how much memory there is. Needs torch, no NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path
from typing import Any

import torch

_HUGE_PAGE = 2 << 20
_WORTH_HUGE_PAGES = 2 * _HUGE_PAGE


def host_bytes(storage: Any) -> memoryview:
    """Return the bytes of a storage: shared if it is in host memory, else a copy."""
    storage = storage.cpu()
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array.owner = storage  # a memoryview keeps the array alive, and that the storage
    return memoryview(array).cast("B")


def new_storage(size: int) -> Any:
    """Allocate a storage; a large one begins at a huge page. Like those of torch.load it can't be resized."""
    if size < _WORTH_HUGE_PAGES:
        return torch.UntypedStorage(size)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -_address(memory) % _HUGE_PAGE
    _advise_huge_pages(memory, start, size)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).untyped_storage()


def huge_pages(size: int) -> mmap.mmap:
    """Map new memory; a large piece of it is on huge pages, all but its ends."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _WORTH_HUGE_PAGES:
        start = -_address(memory) % _HUGE_PAGE
        _advise_huge_pages(memory, start, size - start)
    return memory


def _advise_huge_pages(memory: mmap.mmap, start: int, size: int) -> None:
    """Faults of small pages outlast the reading of what fills them."""
    with contextlib.suppress(AttributeError, OSError):  # advice; a system without it is just slower
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE_PAGE * _HUGE_PAGE)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this host, and this process's control groups (v2), can still give.

    Files in the page cache count as free, of a group as of the host: the kernel drops them first.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    room = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    own = next(
        (line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::")), "/"
    )
    group = cgroups / own.lstrip("/")
    for each in (group, *group.parents):
        limit, used = _number(each / "memory.max"), _number(each / "memory.current")
        if limit is not None and used is not None:
            room = min(room, max(0, limit - max(0, used - _cached(each / "memory.stat"))))
        if each == cgroups:
            break
    return room


def _cached(stat: Path) -> int:
    try:
        rows = (line.split() for line in stat.read_text().splitlines())
        return sum(int(value) for name, value in rows if name in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no limit is called "max"
        return None
