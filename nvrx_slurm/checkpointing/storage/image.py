"""Write a file whose image lies in memory: checksums on one core while another writes. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.checkpointing.storage.checksums import Region, checksum, checksum_around, encode_table
from nvrx_slurm.checkpointing.storage.durable import ALIGNMENT, replacing

_CHUNK = 16 << 20


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

    @property
    def end(self) -> int:
        """Where the next image may begin."""
        return self.offset + aligned(self.size)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to what direct I/O can write."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def write_image(spec: ImageSpec, memory: memoryview) -> None:
    """Fill the table of checksums in, if there is one, and write the file whole and durably.

    Raises:
        OSError: it could not be written; what stood at the path is still there.
    """
    image = memory[spec.offset : spec.end]
    with ThreadPoolExecutor(1) as hashing, replacing(Path(spec.path)) as pending:
        table = hashing.submit(_table, spec, image) if spec.table else None
        pending.write_aligned(_chunks(spec, image, table), spec.size)


def _table(spec: ImageSpec, image: memoryview) -> bytes:
    assert spec.table is not None
    sums = [checksum(image[region.offset : region.end]) for region in spec.regions]
    rest = checksum_around(image, [*spec.regions, spec.table], spec.size)
    return encode_table(spec.regions, sums, rest)


def _chunks(spec: ImageSpec, image: memoryview, table: Future[bytes] | None) -> Iterator[memoryview]:
    for start in range(0, len(image), _CHUNK):
        if table is not None and spec.table is not None and start + _CHUNK > spec.table.offset:
            image[spec.table.offset : spec.table.end] = table.result()
        yield image[start : start + _CHUNK]
