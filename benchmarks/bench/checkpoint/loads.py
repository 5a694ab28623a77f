"""One process that loads a checkpoint again and again, or reads its bytes; prints ``[seconds, …]``.

A process of its own for each, so that the first time is the first of a process. Before it, memory is taken
and given back: what a virtual machine's host takes to find memory for it counts for nobody.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import write_part
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import read_part, stage, state_of

_STEP = 16 << 20
_HUGE_PAGE = 2 << 20
_SECTOR = 4096

NEW, SAME, DIRECT = "floor: read, new memory", "floor: read, same memory", "floor: read, direct I/O"
LOAD, PART, DCP = "ours", "ours, local part", "ours, dcp.load"
"""The first two load to new memory, the third to that of the state."""
COLD = (SAME, DIRECT, LOAD, PART, DCP, "torch.load", "dcp.load")
"""Who also loads from the disk."""


def write(state: dict[str, torch.Tensor], folder: Path) -> None:
    """Save the state in each of the formats."""
    storage.save(state, folder / "file")
    part = stage(BasicTensorAwareStateDict(dict(state)), CkptID(0, 0, ""), BufferPool())
    write_part(part.seal(1, "x"), folder / "part")
    writer = FileSystemWriterAsync(folder / "dcp")
    plan = save_state_dict_async_plan(state, writer)
    save, _, arguments = writer.get_save_function_and_args()
    assert save is not None
    save(*arguments)
    save_state_dict_async_finalize(*plan)


def contenders(folder: Path) -> dict[str, Callable[[], Callable[[], object]]]:
    """Return what is measured: each makes ready, and returns what is timed."""
    return {
        NEW: lambda: _into_new_memory(folder / "file"),
        SAME: lambda: _into_same_memory(folder / "file", os.O_RDONLY),
        DIRECT: lambda: _into_same_memory(folder / "file", os.O_RDONLY | os.O_DIRECT),
        LOAD: lambda: lambda: storage.load(folder / "file"),
        PART: lambda: lambda: state_of(read_part(folder / "part", BufferPool())),
        DCP: lambda: _dcp_load(folder / "dcp", lambda path: CachedMetadataFileSystemReader(path)),
        "ours, not verified": lambda: lambda: storage.load(folder / "file", verify=False),
        "ours, mmap": lambda: lambda: storage.load(folder / "file", mmap=True),
        "torch.load": lambda: lambda: torch.load(folder / "file", weights_only=True),
        "dcp.load": lambda: _dcp_load(folder / "dcp", dcp.FileSystemReader),
    }


def _into_new_memory(path: Path) -> Callable[[], object]:
    def read() -> object:
        memory = _huge_pages(path.stat().st_size)
        _read(path, memory, os.O_RDONLY)
        return memory

    return read


def _into_same_memory(path: Path, flags: int) -> Callable[[], object]:
    memory = _huge_pages(path.stat().st_size)
    memory[:] = bytes(len(memory))
    return lambda: _read(path, memory, flags)


def _huge_pages(size: int) -> memoryview:
    memory = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _read(path: Path, memory: memoryview, flags: int) -> None:
    """With as many threads as there are cores, and nothing else."""
    fd, size = os.open(path, flags), path.stat().st_size

    def read(start: int) -> None:
        end = min(start + _STEP, size)
        while start < end:
            start += os.preadv(fd, [memory[start : -(-end // _SECTOR) * _SECTOR]], start)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(read, range(0, size, _STEP)))
    os.close(fd)


def _dcp_load(path: Path, reader: Callable[[Path], Any]) -> Callable[[], object]:
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {
        name: torch.zeros(each.size, dtype=each.properties.dtype)
        for name, each in metadata.state_dict_metadata.items()
    }
    return lambda: dcp.load(state, storage_reader=reader(path), no_dist=True)


def _evict(folder: Path) -> None:
    """Have the page cache forget the files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def main() -> None:
    folder, who, runs, is_cold = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "cold"
    call = contenders(folder)[who]()
    spare = _huge_pages((folder / "file").stat().st_size * 3 // 2)
    spare[::_SECTOR] = bytes(len(spare[::_SECTOR]))
    spare.release()
    seconds = []
    for _ in range(runs):
        if is_cold:
            _evict(folder)
        began = time.perf_counter()
        loaded = call()
        seconds.append(time.perf_counter() - began)
        del loaded  # before the next one takes its memory
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
