"""Read checkpoints of torch.distributed.checkpoint: verified, and ``.metadata`` only once."""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.checksums import Region, verify_file
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.manifest import METADATA
from nvrx_slurm.regular_file import open_regular

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_PLAIN = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


class CachedMetadataFileSystemReader(FileSystemReader):  # type: ignore[misc]
    """A reader for ``torch.distributed.checkpoint.load(state, storage_reader=…)``."""

    _cache: ClassVar[dict[Path, tuple[tuple[int, int, int], Any]]] = {}

    def __init__(
        self, path: str | os.PathLike[str], cache_metadata: bool = True, *, verify: bool = True
    ) -> None:
        """
        Args:
            cache_metadata: unpickle ``.metadata`` once for all readers of this process, and anew when it
                is another file.
            verify: compare what is read with its checksums, where the files have some.
        """
        super().__init__(path)
        self._cache_metadata = cache_metadata
        self._verify = verify

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metadata of the checkpoint.

        Raises:
            CorruptCheckpointError: it is not the one that was committed, can't be unpickled, or names what
                has no place in it.
            OSError: it can't be read; without it there is no checkpoint.
        """
        path = Path(self.path).absolute() / METADATA
        with open(open_regular(path, follow_link=True), "rb") as file:
            stat = os.fstat(file.fileno())
            identity = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            known = self._cache.get(path)
            if self._cache_metadata and known is not None and known[0] == identity:
                metadata = known[1]
            else:
                if self._verify:
                    manifest.read(path.parent)
                metadata = _unpickle(path, file)
        if self._cache_metadata:
            self._cache[path] = identity, metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @classmethod
    def clear_metadata_cache(cls, path: str | os.PathLike[str] | None = None) -> None:
        """Forget the metadata of one checkpoint, or of all."""
        if path is None:
            cls._cache.clear()
        else:
            cls._cache.pop(Path(path).absolute() / METADATA, None)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what this rank wants.

        Raises:
            CorruptCheckpointError: it is not what was written; nothing has been loaded.
        """
        if self._verify:
            wanted = defaultdict(set)
            for item in plan.items:
                place = self.storage_data[item.storage_index]
                wanted[place.relative_path].add(Region(place.offset, place.length))
            for name, parts in wanted.items():
                _verify_parts(Path(self.path) / name, sorted(parts, key=lambda part: part.offset))
        return super().read_data(plan, planner)


def _verify_parts(path: Path, parts: list[Region]) -> None:
    try:
        verify_file(path, parts)
    except FileNotFoundError:
        raise CorruptCheckpointError(path, "the file is missing") from None


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of metadata, and no functions that a hostile pickle could call."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in _MODULES else None
        if isinstance(found, type) or (module, name) in _PLAIN:
            return found or super().find_class(module, name)
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _unpickle(path: Path, file: Any) -> Any:
    try:
        return _MetadataUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise CorruptCheckpointError(path, f"it can't be read: {error or 'it is cut off'}") from None
