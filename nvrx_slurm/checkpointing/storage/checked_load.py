"""Load a file and check it in one pass: its tensors are read and hashed on several cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nvrx_slurm.checkpointing.storage.checked_read import CheckedReads, Reading, reading
from nvrx_slurm.checkpointing.storage.checksums import Region, Table, find_table, mapped, opened, verify_file
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.host_memory import host_bytes, new_storage

_AHEAD = 64 << 20  # bytes that are read before the unpickler asks for them


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
            try:
                with reading(fd) as reads:
                    reader = _Reader(reads, table, map_location)
                    state = torch.load(name, map_location=reader.take, weights_only=weights_only, mmap=True)
                if reader.all_is_right():
                    return state
                del state
            except Exception:
                _find_damage(name, path)  # of which the error may be a consequence
                raise
            # Either it is damaged, or its storages lie in an order that the reader did not expect.
            _find_damage(name, path)
        return torch.load(name, map_location=map_location, weights_only=weights_only)


def _find_damage(name: str, path: Path) -> None:
    try:
        verify_file(name)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(path, error.why) from None


class _Reader:
    """Gives the unpickler the storages that it comes to, read and hashed ahead in the order of the file.

    torch hands out views of the mapped file, whose address it keeps to itself. The first view is taken for
    the first tensor in the file, since that is how they are written; checksums tell if it is not.
    """

    def __init__(self, reads: CheckedReads, table: Table, map_location: Any) -> None:
        self._reads = reads
        self._sums = table.sums
        self._map_location = map_location
        self._base: int | None = None
        self._following = iter(table.sums)
        self._ahead: dict[Region, tuple[Any, Reading]] = {}
        self._ahead_bytes = 0
        self._right: set[Region] = set()

    def take(self, view: Any, location: str) -> Any:
        """Return what torch.load is to use in place of a storage in the mapped file."""
        size = view.nbytes()
        if not size:
            return _place(new_storage(0), location, self._map_location)
        if self._base is None:
            self._base = view.data_ptr() - next(iter(self._sums)).offset
        region = Region(view.data_ptr() - self._base, size)
        storage = self._read(region) if region in self._sums else new_storage(size)
        return _place(storage, location, self._map_location)

    def all_is_right(self) -> bool:
        """Whether all tensors of the file have been read, and are what was written."""
        return self._right == self._sums.keys()

    def _read(self, region: Region) -> Any:
        if region not in self._ahead:
            self._start(region)
        storage, reading = self._ahead[region]
        while self._ahead_bytes < _AHEAD and (following := next(self._following, None)):
            if following not in self._ahead and following not in self._right:
                self._start(following)
        if reading.checksum() == self._sums[region]:
            self._right.add(region)
        del self._ahead[region]
        self._ahead_bytes -= region.length
        return storage

    def _start(self, region: Region) -> None:
        storage = new_storage(region.length)
        self._ahead_bytes += region.length
        self._ahead[region] = storage, self._reads.start(region, host_bytes(storage))


def _place(storage: Any, location: str, map_location: Any) -> Any:
    """Bring a storage to where torch.load's ``map_location`` says."""
    default = torch.serialization.default_restore_location
    if map_location is None:
        return default(storage, location)
    if isinstance(map_location, (str, torch.device)):
        return default(storage, str(map_location))
    if isinstance(map_location, dict):
        return default(storage, map_location.get(location, location))
    placed = map_location(storage, location)
    return default(storage, location) if placed is None else placed
