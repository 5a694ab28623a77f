"""How the part of one rank lies in a file; whether it is what was written. Unpickles nothing, needs no torch.

    header   one page: magic, length and checksum of what follows, then JSON (:class:`Header`)
    hollow   the state without its tensors, and their types and shapes
    index    of each tensor its place, its length and its XXH3, 8 bytes each
    tensors  from a new page on, each from a multiple of 64 bytes on

All numbers are little-endian. The same state gives the same bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError, checksum
from nvrx_slurm.checkpointing.storage.checked_read import fill, reading
from nvrx_slurm.checkpointing.storage.checksums import Region, gaps, opened

PAGE = 4096
_MAGIC = b"NVRXPRT2"
_HEAD = struct.Struct("<8sQQ")
_ROW = struct.Struct("<QQQ")


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the first page says."""

    iteration: int
    rank: int
    session: str
    world_size: int
    save_id: str
    hollow_bytes: int
    tensors: int
    """How many."""
    index_sum: int
    """Checksum of hollow and index."""
    size: int
    """Of it all, in bytes."""

    @property
    def held(self) -> HeldPart:
        return HeldPart(CkptID(self.iteration, self.rank, self.session), self.world_size, self.save_id)

    @property
    def index_end(self) -> int:
        return PAGE + self.hollow_bytes + _ROW.size * self.tensors

    @property
    def first_tensor(self) -> int:
        return first_tensor(self.hollow_bytes, self.tensors)


@dataclass(frozen=True)
class Row:
    """One tensor of the index."""

    offset: int
    """From the first tensor."""
    nbytes: int
    checksum: int


def padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def first_tensor(hollow_bytes: int, tensors: int) -> int:
    """Return where the first tensor begins."""
    return PAGE + padded(hollow_bytes + _ROW.size * tensors)


def encode_index(rows: Sequence[Row]) -> bytes:
    return b"".join(_ROW.pack(row.offset, row.nbytes, row.checksum) for row in rows)


def read_header(path: Path) -> Header:
    """Read the first page of a file, and compare the file's length with it.

    Raises:
        CorruptCheckpointError: it is no whole part.
        OSError: it can't be read.
    """
    with opened(path) as fd:
        return header_of(fd, path)


def header_of(fd: int, path: Path) -> Header:
    """As :func:`read_header`, of an open file."""
    header = parse_header(path, os.pread(fd, PAGE, 0))
    length = os.fstat(fd).st_size
    if length != header.size:
        raise CorruptCheckpointError(path, f"it has {length} bytes of {header.size}")
    return header


def write_header(memory: mmap.mmap, header: Header) -> None:
    """Put the header into the first page, and zeros behind the index."""
    content = msgspec.json.encode(header)
    if len(content) > PAGE - _HEAD.size:
        raise CheckpointingException(f"The session id {header.session[:40]!r}… is too long.")
    head = _HEAD.pack(_MAGIC, len(content), checksum(content)) + content
    memory[:PAGE] = head.ljust(PAGE, b"\0")
    memory[header.index_end : header.first_tensor] = bytes(header.first_tensor - header.index_end)


def parse_header(source: Path | str, page: bytes) -> Header:
    """
    Raises:
        CorruptCheckpointError: it is none.
    """
    try:
        magic, length, expected = _HEAD.unpack_from(page)
        content, rest = page[_HEAD.size : _HEAD.size + length], page[_HEAD.size + length :]
        if magic == _MAGIC and checksum(content) == expected and not any(rest):
            return msgspec.json.decode(content, type=Header)
    except (struct.error, msgspec.DecodeError):
        pass
    raise CorruptCheckpointError(source, "it does not begin as a part of a checkpoint does")


def check(view: memoryview, source: Path | str) -> Header:
    """Compare every bit of a part with its checksums.

    Args:
        source: where it comes from, for the error.

    Raises:
        CorruptCheckpointError: it is not what was written.
    """
    header = parse_header(source, bytes(view[:PAGE]))
    index = _index(header, view, source)
    for gap in _between(header, index):
        if any(bytes(view[gap.offset : gap.end])):
            raise CorruptCheckpointError(source, "what lies between the tensors is not what was written")
    for number, (place, expected) in enumerate(index):
        with view[place.offset : place.end] as content:
            if checksum(content) != expected:
                raise CorruptCheckpointError(source, _damaged(number))
    return header


def read_checked(fd: int, header: Header, view: memoryview, source: Path) -> None:
    """Read a file into memory, and compare every bit with its checksums on the way, on several threads.

    Args:
        view: at least as large as the file.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it can't be read.
    """
    if not fill(fd, view[: header.first_tensor], 0) or parse_header(source, bytes(view[:PAGE])) != header:
        raise CorruptCheckpointError(source, "it was changed while it was read")
    index = _index(header, view, source)
    for gap in _between(header, index):
        view[gap.offset : gap.end] = bytes(gap.length)
    with reading(fd) as reads:
        under_way = [reads.start(place, view[place.offset : place.end]) for place, _ in index]
        for number, (each, (_, expected)) in enumerate(zip(under_way, index, strict=True)):
            if each.checksum() != expected:
                raise CorruptCheckpointError(source, _damaged(number))


def _index(header: Header, view: memoryview, source: Path | str) -> list[tuple[Region, int]]:
    """Return the place of each tensor in the file, and its checksum; reads no tensor."""
    if not header.first_tensor <= header.size <= len(view):
        raise CorruptCheckpointError(source, "its header and its length do not fit")
    index = bytes(view[PAGE : header.index_end])
    if checksum(index) != header.index_sum:
        raise CorruptCheckpointError(source, "the state without its tensors is not what was written")
    rows = [Row(*each) for each in _ROW.iter_unpack(index[header.hollow_bytes :])]
    places = [Region(header.first_tensor + row.offset, row.nbytes) for row in rows]
    if any(place.end > header.size for place in places):
        raise CorruptCheckpointError(source, "its header and its length do not fit")
    return [(place, row.checksum) for place, row in zip(places, rows, strict=True)]


def _between(header: Header, index: list[tuple[Region, int]]) -> Iterator[Region]:
    """Yield what holds nothing: zeros."""
    return gaps([Region(0, header.index_end), *(place for place, _ in index)], header.size)


def _damaged(tensor: int) -> str:
    return f"tensor {tensor} is not what was written"


def check_file(path: Path) -> Header:
    """As :func:`check`, for a file.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it can't be read.
    """
    header = read_header(path)
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        check(view, path)
    return header


def read_hollow(path: Path) -> bytes:
    """Return the state without its tensors, as it was encoded.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it can't be read.
    """
    header = read_header(path)
    with open(path, "rb") as file:
        file.seek(PAGE)
        index = file.read(header.index_end - PAGE)
    if checksum(index) != header.index_sum:
        raise CorruptCheckpointError(path, "the state without its tensors is not what was written")
    return index[: header.hollow_bytes]
