"""Where every byte of a torch.save file goes, before a single tensor has been copied.

The format is torch's own (a zip archive of uncompressed records, torch/serialization.py), with holes where
tensor storages go and one more record for checksums. So the copy of a tensor can be made straight
into its place in the file's image, and the image be written as it is.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nvrx_slurm.checkpointing.storage.checksums import RECORD, Region, table_size
from nvrx_slurm.checkpointing.storage.torch_internals import require

location_tag, normalize_storage_type = require(
    "torch.serialization", "location_tag", "normalize_storage_type"
)
_ArchiveWriter = require("torch._C", "PyTorchFileWriter")

_PROTOCOL = 2  # torch.serialization.DEFAULT_PROTOCOL: what weights_only=True reads
_STORAGE_ALIGNMENT = 64  # of torch.save, by default


@dataclass(frozen=True)
class Literal:
    """Bytes that are known already."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class Hole:
    """Where the bytes of one storage go."""

    offset: int
    storage: Any
    """A torch.UntypedStorage; its bytes may be on a device."""

    @property
    def region(self) -> Region:
        return Region(self.offset, self.storage.nbytes())


@dataclass(frozen=True)
class FileImage:
    """A file, all but the tensors' bytes."""

    size: int
    literals: tuple[Literal, ...]
    holes: tuple[Hole, ...]
    """Storages that are not empty, by rising offset; each storage once, however many tensors view it."""
    table: Region | None
    """Where the checksums go; behind all holes."""
    tensors: tuple[Any, ...] = ()
    """The tensors whose bytes these are: torch counts the changes of each."""
    sync: bool = True
    """Whether it is to be on disk, with fsync(2), when it is there."""


def lay_out(obj: object, *, with_table: bool = True) -> FileImage:
    """Pickle ``obj``, all but the bytes of its tensors.

    Args:
        with_table: leave room for checksums.

    Raises:
        Exception: whatever pickle says about an object that can't be pickled.
        RuntimeError: two tensors view the same memory as different types, which torch can't save.
    """
    content = io.BytesIO()
    pickler = _Pickler(content, protocol=_PROTOCOL)
    pickler.dump(obj)
    pieces = _Pieces()
    archive = _ArchiveWriter(pieces, False, _STORAGE_ALIGNMENT)
    _record(archive, "data.pkl", content.getvalue())
    _record(archive, ".format_version", b"1")
    _record(archive, ".storage_alignment", str(_STORAGE_ALIGNMENT).encode())
    _record(archive, "byteorder", sys.byteorder.encode())
    storages = list(pickler.storages.values())
    for number, storage in enumerate(storages):
        archive.write_record_metadata(f"data/{number}", storage.nbytes())
    filled = [storage for storage in storages if storage.nbytes()]
    if with_table:
        archive.write_record_metadata(RECORD, table_size(len(filled)))
    archive.write_end_of_file()
    offsets = pieces.holes
    table = Region(offsets[-1], table_size(len(filled))) if with_table else None
    holes = tuple(Hole(offset, storage) for offset, storage in zip(offsets, filled, strict=False))
    return FileImage(pieces.position, tuple(pieces.literals()), holes, table, tuple(pickler.tensors))


def _record(archive: Any, name: str, content: bytes) -> None:
    archive.write_record(name, content, len(content))


class _Pickler(pickle.Pickler):
    """Names storages as torch.save does, and keeps them."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol=protocol)
        self.storages: dict[int, Any] = {}
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._dtypes: dict[int, Any] = {}

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
        return NotImplemented

    def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        elif torch.is_storage(obj):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = normalize_storage_type(type(obj))
        else:
            return None
        self._refuse_two_types(storage, dtype)
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        self.storages[number] = storage
        return ("storage", kind, str(number), location_tag(storage), numel)

    def _refuse_two_types(self, storage: Any, dtype: Any) -> None:
        if storage.device.type != "meta" and storage.data_ptr():
            first = self._dtypes.setdefault(storage.data_ptr(), dtype)
            if first != dtype:
                raise RuntimeError(
                    f"two tensors view the same memory as {first} and {dtype}: torch can't save that"
                )


class _Pieces:
    """The file that torch's archive writer believes to write to: keeps what is written, notes what is not."""

    def __init__(self) -> None:
        self.position = 0
        self.holes: list[int] = []
        self._literals: list[tuple[int, bytearray]] = [(0, bytearray())]

    def write(self, data: memoryview) -> int:
        self._literals[-1][1].extend(data)
        self.position += len(data)
        return len(data)

    def seek(self, distance: int, _whence: object) -> int:
        """Called for the content of a record that is to be filled in later, and for nothing else."""
        self.holes.append(self.position)
        self.position += distance
        self._literals.append((self.position, bytearray()))
        return self.position

    def flush(self) -> None:
        pass

    def literals(self) -> Iterator[Literal]:
        for offset, data in self._literals:
            if data:
                yield Literal(offset, bytes(data))
