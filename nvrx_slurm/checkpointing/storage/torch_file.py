"""One object in one file: written whole and durably, read back verified. torch.load reads it too."""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash

from nvrx_slurm.checkpointing.storage import checksums
from nvrx_slurm.checkpointing.storage.checked_load import load_checked
from nvrx_slurm.checkpointing.storage.durable import PendingFile, replacing
from nvrx_slurm.checkpointing.storage.host_memory import host_bytes
from nvrx_slurm.checkpointing.storage.layout import FileImage, Hole, Literal, lay_out
from nvrx_slurm.checkpointing.storage.objects import PendingObject, is_url, read_object

_CHUNK = 8 << 20


def save(obj: object, path: Path | str) -> None:
    """Save as torch.save does, but durably, atomically and with checksums; takes 16 MiB of memory.

    Raises:
        OSError: it could not be written; what stood at ``path`` is still there.
        Exception: an object that can't be pickled; nothing was written.
    """
    write_file(path, lay_out(obj))


def write_file(path: Path | str, image: FileImage) -> None:
    """Write a file that has been laid out, as :func:`save` does."""
    with replacing(path, sync=image.sync) as pending:
        _Writer(pending, image).run()


def load(
    path: Path | str,
    *,
    map_location: Any = None,
    weights_only: bool = True,
    mmap: bool = False,
    verify: bool = True,
) -> Any:
    """Load what :func:`save` or torch.save wrote.

    Args:
        map_location: as torch.load's.
        weights_only: False executes what the pickle in the file says: only for a file that is yours.
        mmap: tensors are views of the file, read when they are used; not at a URL, from where all is
            fetched.
        verify: compare the file with its checksums, where it has some: tensors while they are read, with
            ``mmap`` all of it before.

    Raises:
        CorruptCheckpointError: the file is torn, or not what was written.
        OSError: it can't be read.
    """
    if is_url(path):
        content = read_object(str(path))
        if verify:
            checksums.verify_content(str(path), content)
        return torch.load(io.BytesIO(content), map_location=map_location, weights_only=weights_only)
    if verify and not mmap:
        return load_checked(Path(path), map_location=map_location, weights_only=weights_only)
    if verify:
        checksums.verify_file(path)
    return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)


class _Writer:
    """Fills one buffer while the other is written."""

    def __init__(self, pending: PendingFile | PendingObject, file: FileImage) -> None:
        self._pending = pending
        self._file = file
        self._rest = xxhash.xxh3_64()
        self._sums: list[int] = []

    def run(self) -> None:
        with ThreadPoolExecutor(1) as writing:
            self._pending.write_aligned(self._filled_ahead(writing), self._file.size)

    def _filled_ahead(self, filling: ThreadPoolExecutor) -> Iterator[memoryview]:
        chunks = self._chunks()
        following: Future[memoryview | None] = filling.submit(next, chunks, None)
        while (chunk := following.result()) is not None:
            following = filling.submit(next, chunks, None)
            yield chunk

    def _chunks(self) -> Iterator[memoryview]:
        buffers = [memoryview(mmap.mmap(-1, _CHUNK)) for _ in range(2)]
        current, used = 0, 0
        for source in self._pieces():
            position = 0
            while position < len(source):
                count = min(_CHUNK - used, len(source) - position)
                buffers[current][used : used + count] = source[position : position + count]
                position += count
                used += count
                if used == _CHUNK:
                    yield buffers[current]
                    current, used = 1 - current, 0
        if used:
            yield buffers[current][: -(-used // mmap.PAGESIZE) * mmap.PAGESIZE]

    def _pieces(self) -> Iterator[memoryview]:
        """The content in order; each piece is hashed as it passes.

        The table comes after all tensors and before the last literals, whose checksum stands in it.
        """
        file = self._file
        pieces: list[Literal | Hole] = sorted([*file.literals, *file.holes], key=lambda each: each.offset)
        if file.table is None:
            yield from map(self._hashed, pieces)
            return
        before = [piece for piece in pieces if piece.offset < file.table.offset]
        after = [piece for piece in pieces if piece.offset > file.table.offset]
        for piece in before:
            yield self._hashed(piece)
        tail = [self._hashed(piece) for piece in after]
        regions = [hole.region for hole in file.holes]
        table = checksums.encode_table(regions, self._sums, self._rest.intdigest())
        yield memoryview(table)
        yield from tail

    def _hashed(self, piece: Literal | Hole) -> memoryview:
        if isinstance(piece, Literal):
            self._rest.update(piece.data)
            return memoryview(piece.data)
        content = host_bytes(piece.storage)
        self._sums.append(checksums.checksum(content))
        return content
