"""Checksums of the parts of a file, kept in the file itself; needs no torch.

The table lists where each tensor storage lies and the XXH3 of its bytes (xxhash.com); one more XXH3 covers
everything else. In a file as torch.save writes it, it is a record of the zip archive; in a file of
torch.distributed.checkpoint it stands at the end, behind everything that ``.metadata`` points to. Either way
torch reads the file as ever.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

import xxhash

from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.regular_file import open_regular

RECORD = "nvrx/checksums"
_MAGIC = b"NVRXSUM1"
_HEAD = struct.Struct("<8sQQ")  # magic, number of regions, checksum of everything outside of them
_TRAILER = struct.Struct("<8sQ")  # magic, size of the table before it
_TRAILER_MAGIC = b"NVRXEND1"
MARK_SIZE = 16
"""Of what stands before the table in a file of torch.distributed.checkpoint, and is in no other, in bytes."""
_ENTRY = struct.Struct("<QQQ")  # offset, length, checksum
_LOCAL_HEADER = 30  # bytes before the name; lengths of name and extra field end it (APPNOTE.TXT 4.3.7)
_SEARCHED = 64 << 20

Buffer = bytes | bytearray | memoryview | mmap.mmap


class Verification(Enum):
    """What a look at a file has shown; one that is damaged raises instead."""

    INTACT = "intact"
    NO_CHECKSUMS = "no checksums"
    """A whole archive that another writer made: it can't be told whether its bits are right."""


@dataclass(frozen=True)
class Region:
    """Where something lies in a file, in bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def overlaps(self, other: Region) -> bool:
        return self.offset < other.end and other.offset < self.end


def checksum(data: Buffer) -> int:
    """Return the XXH3 of ``data``, 64 bits."""
    return int(xxhash.xxh3_64_intdigest(data))


def table_size(regions: int) -> int:
    """Return how many bytes a table of so many regions takes."""
    return _HEAD.size + regions * _ENTRY.size


def encode_trailer(table: int) -> bytes:
    """Return what ends a file whose last part is a table of so many bytes."""
    return _TRAILER.pack(_TRAILER_MAGIC, table)


def mark_offset(size: int, read: Callable[[int, int], bytes]) -> int | None:
    """Return where the mark of a file stands, None: it has none.

    Args:
        size: of the file.
        read: returns what is from one offset to another in it.
    """
    end = size - _TRAILER.size
    if end < 0:
        return None
    magic, table = _TRAILER.unpack(read(end, size))
    start = int(end - table - MARK_SIZE)
    return start if magic == _TRAILER_MAGIC and start >= 0 else None


def read_mark(size: int, read: Callable[[int, int], bytes]) -> str | None:
    """Return the mark of a file, None: it has none where it would be; arguments as :func:`mark_offset`'s."""
    start = mark_offset(size, read)
    return None if start is None else read(start, start + MARK_SIZE).hex()


def encode_table(regions: Sequence[Region], sums: Sequence[int], rest: int) -> bytes:
    """Return the table: regions in the order of their offsets, their checksums, and that of the rest."""
    entries = (_ENTRY.pack(r.offset, r.length, s) for r, s in zip(regions, sums, strict=True))
    return _HEAD.pack(_MAGIC, len(regions), rest) + b"".join(entries)


def checksum_around(image: memoryview, regions: Iterable[Region], size: int) -> int:
    """Return the checksum of the first ``size`` bytes outside of ``regions``, which are in order."""
    rest = xxhash.xxh3_64()
    for gap in gaps(regions, size):
        rest.update(image[gap.offset : gap.end])
    return int(rest.intdigest())


def gaps(regions: Iterable[Region], size: int) -> Iterator[Region]:
    """Yield what lies between regions that are in order, up to ``size``."""
    position = 0
    for region in regions:
        if region.offset > position:
            yield Region(position, region.offset - position)
        position = max(position, region.end)
    if size > position:
        yield Region(position, size - position)


def verify_file(path: Path | str, parts: Sequence[Region] | None = None) -> Verification:
    """Read a file that ``storage.save``, a checkpoint writer or torch.save wrote, and check every bit.

    Args:
        parts: check only the tensors in these, and what is no tensor; None checks all.

    Raises:
        CorruptCheckpointError: it is no whole archive, or its bits are not those that were written.
        OSError: it can't be read.
    """
    path = Path(path)
    with opened(path) as fd, mapped(path, fd) as view:
        return _verify(path, view, parts)


def verify_content(where: Path | str, content: bytes, parts: Sequence[Region] | None = None) -> Verification:
    """Check a file that has been read already, as :func:`verify_file` does.

    Args:
        where: its path or URL, for messages.
    """
    if not content:
        raise CorruptCheckpointError(where, "the file is empty")
    with memoryview(content) as view:
        return _verify(where, view, parts, io.BytesIO(content))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield the descriptor of a regular file.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    fd = open_regular(path, follow_link=True)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def mapped(path: Path, fd: int) -> Iterator[memoryview]:
    """Yield the content of an open file, read as it is looked at.

    Raises:
        CorruptCheckpointError: the file is empty.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        raise CorruptCheckpointError(path, "the file is empty")
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as image:
        image.madvise(mmap.MADV_SEQUENTIAL)
        with memoryview(image) as view:
            yield view


@dataclass(frozen=True)
class Table:
    """The checksums of a file, as they stand in it."""

    place: Region
    sums: dict[Region, int]
    """Of each tensor storage, by rising offset."""
    rest: int
    """Of everything else."""

    def check_rest(self, path: Path | str, view: memoryview) -> None:
        """See whether what lies between the tensors, and what describes them, is what was written.

        Raises:
            CorruptCheckpointError: it is not.
        """
        parts = sorted([*self.sums, self.place], key=lambda each: each.offset)
        if (
            max(part.end for part in parts) > len(view)
            or checksum_around(view, parts, len(view)) != self.rest
        ):
            raise CorruptCheckpointError(path, "what lies between the tensors is not what was written")


def find_table(path: Path | str, view: memoryview, archive: BinaryIO | None = None) -> Table | None:
    """Return the checksums of a file whose content is ``view``; None: another writer made it.

    Args:
        archive: the content again, as a file; None: ``path`` can be opened.

    Raises:
        CorruptCheckpointError: it is no whole archive, or the table is damaged.
    """
    place = _find_table(path, view, archive)
    if place is None:
        if _MAGIC in bytes(view[-_SEARCHED:]):
            raise CorruptCheckpointError(path, "the archive's directory lacks the checksums that it holds")
        return None
    content = bytes(view[place.offset : place.end])
    if len(content) < _HEAD.size or content[:8] != _MAGIC:
        raise CorruptCheckpointError(path, "the table of checksums is damaged")
    _, count, rest = _HEAD.unpack_from(content)
    if table_size(count) != place.length:
        raise CorruptCheckpointError(path, "the table of checksums is damaged")
    entries = _ENTRY.iter_unpack(content[_HEAD.size :])
    return Table(place, {Region(offset, length): found for offset, length, found in entries}, rest)


def _verify(
    path: Path | str, view: memoryview, parts: Sequence[Region] | None, archive: BinaryIO | None = None
) -> Verification:
    table = find_table(path, view, archive)
    if table is None:
        return Verification.NO_CHECKSUMS
    for region, expected in table.sums.items():
        if parts is not None and not any(region.overlaps(part) for part in parts):
            continue
        if region.end > len(view) or checksum(view[region.offset : region.end]) != expected:
            raise CorruptCheckpointError(path, f"the tensor at byte {region.offset} is not what was written")
    table.check_rest(path, view)
    return Verification.INTACT


def _find_table(path: Path | str, view: memoryview, content: BinaryIO | None) -> Region | None:
    if len(view) >= _TRAILER.size:
        magic, length = _TRAILER.unpack_from(view, len(view) - _TRAILER.size)
        if magic == _TRAILER_MAGIC and length <= len(view) - _TRAILER.size:
            return Region(len(view) - _TRAILER.size - length, length)
    try:
        with zipfile.ZipFile(content or path) as archive:
            found = [info for info in archive.infolist() if info.filename.endswith("/" + RECORD)]
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error) as error:
        raise CorruptCheckpointError(path, f"no whole torch archive ({error})") from None
    if not found:
        return None
    start = found[0].header_offset
    header = bytes(view[start : start + _LOCAL_HEADER])
    if len(header) < _LOCAL_HEADER:
        raise CorruptCheckpointError(path, "the table of checksums is damaged")
    name, extra = struct.unpack_from("<HH", header, 26)
    return Region(start + _LOCAL_HEADER + name + extra, found[0].file_size)
