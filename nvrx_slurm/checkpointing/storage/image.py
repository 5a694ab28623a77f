"""Write a file whose image lies in memory: checksums and writes follow whoever fills it. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from nvrx_slurm.checkpointing.storage.checksums import Region, checksum, checksum_around, encode_table
from nvrx_slurm.checkpointing.storage.durable import ALIGNMENT, replacing
from nvrx_slurm.checkpointing.storage.filling import Filling

_CHUNK = 4 << 20


@dataclass(frozen=True)
class ImageSpec:
    """Where the image of a file lies in memory, and what is in it."""

    path: str
    offset: int
    """In the memory, in bytes; a multiple of ``ALIGNMENT``."""
    size: int
    regions: tuple[Region, ...]
    """What tensors take, in order."""
    table: Region | None
    """Where the checksums go; behind all regions. None: the file is as it is to be."""
    sync: bool = True
    """Whether it is to be on disk, with fsync(2), when it is there."""

    @property
    def end(self) -> int:
        """Where the next image may begin."""
        return self.offset + aligned(self.size)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to what direct I/O can write."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_image(
    spec: ImageSpec,
    memory: memoryview,
    filling: Filling | None = None,
    *,
    at_once: int = 1,
    pace: Callable[[int], None] | None = None,
) -> None:
    """Fill the table of checksums in, if there is one, and write the file whole and durably.

    Args:
        filling: of ``memory``; what is not there yet is waited for, and the file gets its name only when
            everything is. None: it is full.
        at_once: writes in flight.
        pace: called before each write with its size; may wait.

    Raises:
        OSError: it could not be written; what stood at the path is still there.
        AbandonedError: the memory was not filled; likewise.
    """
    filling = filling or Filling.complete()
    image = memory[spec.offset : spec.end]
    with ThreadPoolExecutor(1) as hashing, replacing(spec.path, sync=spec.sync) as pending:
        table = hashing.submit(_table, spec, image, filling) if spec.table else None
        chunks = _chunks(spec, image, filling, table)
        pending.write_aligned(chunks, spec.size, at_once=at_once, pace=pace)
        filling.wait_until_whole()


def _table(spec: ImageSpec, image: memoryview, filling: Filling) -> bytes:
    assert spec.table is not None
    sums = []
    for region in spec.regions:
        filling.wait_for(spec.offset + region.end)
        sums.append(checksum(image[region.offset : region.end]))
    rest = checksum_around(image, [*spec.regions, spec.table], spec.size)
    return encode_table(spec.regions, sums, rest)


def _chunks(
    spec: ImageSpec, image: memoryview, filling: Filling, table: Future[bytes] | None
) -> Iterator[memoryview]:
    filled_by_others = spec.size if spec.table is None else spec.table.offset
    for start in range(0, len(image), _CHUNK):
        filling.wait_for(spec.offset + min(start + _CHUNK, filled_by_others))
        if table is not None and spec.table is not None and start + _CHUNK > spec.table.offset:
            image[spec.table.offset : spec.table.end] = table.result()
        yield image[start : start + _CHUNK]
