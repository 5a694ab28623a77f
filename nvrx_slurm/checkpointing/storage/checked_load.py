"""Load a file and check it in one pass: its tensors are read and hashed on several cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from nvrx_slurm.checkpointing.storage.checksums import (
    Region,
    Table,
    checksum,
    find_table,
    mapped,
    opened,
    verify_file,
)
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.host_memory import host_bytes, new_storage

_MOST_THREADS = 8
_PIECE = 4 << 20


def load_checked(path: Path, *, map_location: Any, weights_only: bool) -> Any:
    """Load as torch.load does; a file of ours only if every bit is what was written.

    Raises:
        CorruptCheckpointError: it is not; with ``weights_only=False`` its pickle, which was checked before,
            has been executed by then.
    """
    with opened(path) as fd:
        with mapped(path, fd) as view:
            table = find_table(path, view)
            if table is not None:
                table.check_rest(path, view)
        # By this name it is the file that was checked, though another may have taken its place.
        name = f"/proc/self/fd/{fd}"
        if table is not None and table.sums:
            with ThreadPoolExecutor(_threads()) as pool:
                reader = _Reader(fd, table, pool, map_location)
                state = torch.load(name, map_location=reader.take, weights_only=weights_only, mmap=True)
                if reader.all_is_right():
                    return state
            del state
            # Either it is damaged, or its storages lie in an order that the reader did not expect.
            try:
                verify_file(name)
            except CorruptCheckpointError as error:
                raise CorruptCheckpointError(path, error.why) from None
        return torch.load(name, map_location=map_location, weights_only=weights_only)


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


class _Reader:
    """Reads each storage that the unpickler comes to, and has it hashed meanwhile.

    torch hands out views of the mapped file, whose address it keeps to itself. The first view is taken for
    the first tensor in the file, since that is how they are written; checksums tell if it is not.
    """

    def __init__(self, fd: int, table: Table, pool: ThreadPoolExecutor, map_location: Any) -> None:
        self._fd = fd
        self._sums = table.sums
        self._pool = pool
        self._place = _placement(map_location)
        self._base: int | None = None
        self._hashes: dict[Region, Future[int]] = {}
        self._strayed = False

    def take(self, view: Any, location: str) -> Any:
        """Return what torch.load is to use in place of a storage in the mapped file."""
        size = view.nbytes()
        storage = new_storage(size)
        if size:
            if self._base is None:
                self._base = view.data_ptr() - next(iter(self._sums)).offset
            region = Region(view.data_ptr() - self._base, size)
            self._strayed |= region not in self._sums
            if not self._strayed:
                self._read(region, host_bytes(storage))
        return self._place(storage, location)

    def _read(self, region: Region, target: memoryview) -> None:
        starts = range(0, region.length, _PIECE)
        if len(starts) == 1:
            _fill(self._fd, target, region.offset)
        else:
            pieces = [(target[start : start + _PIECE], region.offset + start) for start in starts]
            for _ in self._pool.map(lambda piece: _fill(self._fd, *piece), pieces):
                pass
        self._hashes[region] = self._pool.submit(checksum, target)

    def all_is_right(self) -> bool:
        """Whether all tensors of the file have been read, and are what was written."""
        return not self._strayed and {r: h.result() for r, h in self._hashes.items()} == self._sums


def _fill(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if not count:
            return  # the file is shorter than its table says: the checksum will not fit
        target, offset = target[count:], offset + count


def _placement(map_location: Any) -> Callable[[Any, str], Any]:
    """Where a storage goes, as torch.load's ``map_location`` says."""
    default = torch.serialization.default_restore_location
    if map_location is None:
        return lambda storage, location: default(storage, location)
    if isinstance(map_location, (str, torch.device)):
        return lambda storage, _location: default(storage, str(map_location))
    if isinstance(map_location, dict):
        return lambda storage, location: default(storage, map_location.get(location, location))

    def asked(storage: Any, location: str) -> Any:
        placed = map_location(storage, location)
        return default(storage, location) if placed is None else placed

    return asked
