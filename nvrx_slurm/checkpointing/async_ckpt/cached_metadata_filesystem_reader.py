"""Read checkpoints of torch.distributed.checkpoint: verified, and ``.metadata`` only once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta

from nvrx_slurm.checkpointing.async_ckpt.metadata_pickle import unpickle
from nvrx_slurm.checkpointing.async_ckpt.roll_forward import finish_abandoned_save
from nvrx_slurm.checkpointing.async_ckpt.verified_read import Wanted, read_file
from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.checksums import Region, checksum, verify_content
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.folders import folder_at
from nvrx_slurm.checkpointing.storage.manifest import METADATA
from nvrx_slurm.checkpointing.storage.objects import absolute, is_url, read_object


class CachedMetadataFileSystemReader(FileSystemReader):  # type: ignore[misc]
    """A reader for ``torch.distributed.checkpoint.load(state, storage_reader=…)``."""

    _cache: ClassVar[dict[str, tuple[int, Any]]] = {}

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
        self._turn_to(path)

    def _turn_to(self, path: str | os.PathLike[str]) -> None:
        self.folder: Path | str = os.fspath(path) if is_url(path) else Path(path).absolute()
        self.path = self.folder
        self._identity = 0
        """Checksum of the metadata that was read."""
        self.fs = _Objects(verify=self._verify) if isinstance(self.folder, str) else FileSystem()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, of another checkpoint if one is named, as ``dcp.load(…, checkpoint_id=…)``."""
        super().reset()
        if checkpoint_id:
            self._turn_to(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL, that this reader may be asked for."""
        return is_url(checkpoint_id) or bool(super().validate_checkpoint_id(checkpoint_id))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metadata of the checkpoint; a newer one that ranks have left is committed before.

        Raises:
            CorruptCheckpointError: it is not the one that was committed, can't be unpickled, or names what
                has no place in it.
            OSError: it can't be read; without it there is no checkpoint.
        """
        if isinstance(self.folder, Path):
            finish_abandoned_save(self.folder)
        path = folder_at(self.folder).where(METADATA)
        content = folder_at(self.folder).read(METADATA)
        identity = self._identity = checksum(content)
        known = self._cache.get(str(path))
        if self._cache_metadata and known is not None and known[0] == identity:
            metadata = known[1]
        else:
            if self._verify:
                manifest.read(self.folder)
            metadata = unpickle(path, io.BytesIO(content))
        if self._cache_metadata:
            self._cache[str(path)] = identity, metadata
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
            cls._cache.pop(str(folder_at(absolute(path)).where(METADATA)), None)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Say which checkpoint this rank has found."""
        return dataclasses.replace(plan, storage_data=self._identity)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """See whether all ranks have found the same.

        Raises:
            CorruptCheckpointError: another one was committed while they looked.
        """
        if len({plan.storage_data for plan in plans}) > 1:
            why = "it was replaced while ranks began to read it, and they have found different checkpoints"
            raise CorruptCheckpointError(self.folder, why)
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read what this rank wants.

        Raises:
            CorruptCheckpointError: it is not what was written. What was read before is in the state's tensors
                by then: load another checkpoint before they are used.
        """
        if not self._verify:
            return super().read_data(plan, planner)
        wanted = defaultdict(list)
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            wanted[place.relative_path].append(Wanted(item, Region(place.offset, place.length)))
        listed = manifest.read(self.folder)
        if listed is not None:
            manifest.files_are_own(self.folder, listed, wanted)
        without_checksums: list[Any] = []
        for name, parts in wanted.items():
            if not isinstance(self.folder, Path) or not _read(self.folder / name, parts, planner):
                without_checksums += [each.request for each in parts]
        return super().read_data(dataclasses.replace(plan, items=without_checksums), planner)


class _Objects(FileSystem):  # type: ignore[misc]
    """What a reader of torch's asks of a file system, at a URL; each object is fetched and checked whole."""

    def __init__(self, *, verify: bool) -> None:
        self._verify = verify

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return os.fspath(path)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.BytesIO]:
        del mode  # "rb" for a reader
        try:
            content = read_object(os.fspath(path))
        except FileNotFoundError:
            raise CorruptCheckpointError(os.fspath(path), "the file is missing") from None
        if self._verify:
            verify_content(os.fspath(path), content)
        yield io.BytesIO(content)


def _read(path: Path, parts: list[Wanted], planner: Any) -> bool:
    try:
        return read_file(path, parts, planner)
    except FileNotFoundError:
        raise CorruptCheckpointError(path, "the file is missing") from None
