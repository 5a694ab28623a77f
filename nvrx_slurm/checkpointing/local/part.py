"""One rank's share of a checkpoint as one run of bytes: what is sent to other ranks, and what a file holds.

    header   one page: magic, length and checksum of what follows, then JSON (:class:`Header`)
    hollow   the state without its tensors, and types, shapes and places of these
    sums     the XXH3 of each tensor, 8 bytes each
    tensors  from a new page on, each from a multiple of 64 bytes on

All numbers are little-endian. The same state gives the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict, decode, encode
from nvrx_slurm.checkpointing.local.buffers import BufferPool, SharedBuffer
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError, checksum

PAGE = 4096
_ALIGNMENT = 64
_MAGIC = b"NVRXPRT1"
_HEAD = struct.Struct("<8sQQ")


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
    """Checksum of hollow and sums."""
    size: int
    """Of it all, in bytes."""

    @property
    def held(self) -> HeldPart:
        return HeldPart(CkptID(self.iteration, self.rank, self.session), self.world_size, self.save_id)


@dataclass(frozen=True)
class Part:
    """A whole part in memory."""

    held: HeldPart
    buffer: SharedBuffer
    size: int

    @property
    def id(self) -> CkptID:
        return self.held.id

    def bytes(self) -> torch.Tensor:
        """Return the content as a tensor that views it."""
        return _view(self.buffer, 0, self.size)


@dataclass(frozen=True)
class StagedPart:
    """The copy of a state, and room for what is known only when all ranks have made theirs."""

    id: CkptID
    digest: str
    """Of the content."""
    buffer: SharedBuffer
    header: Header

    def seal(self, world_size: int, save_id: str) -> Part:
        header = msgspec.structs.replace(self.header, world_size=world_size, save_id=save_id)
        _write_header(self.buffer, header)
        return Part(header.held, self.buffer, header.size)


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int


def stage(state: TensorAwareStateDict, id_: CkptID, pool: BufferPool) -> StagedPart:
    """Copy ``state``; what happens to it afterwards makes no difference. It is left as it was.

    Raises:
        CheckpointingException: it can't be pickled without its tensors.
        OSError: there is no memory for the copy.
    """
    tensors = [tensor.detach() for tensor in state.tensors]
    popped = state.pop_tensors()
    try:
        places, length = _lay_out(tensors)
        hollow = encode({"state": state, "places": [(p.dtype, p.shape, p.offset, p.nbytes) for p in places]})
    finally:
        state.insert_tensors(popped)
    first = _first_tensor(len(hollow), len(places))
    size = first + length
    buffer = pool.take(_padded(size))
    sums = _copy(tensors, places, buffer, first)
    index = hollow + sums
    buffer.memory[PAGE : PAGE + len(index)] = index
    index_sum = checksum(index)
    header = Header(id_.iteration, id_.rank, id_.session_id, 0, "", len(hollow), len(places), index_sum, size)
    return StagedPart(id_, f"{index_sum:016x}", buffer, header)


def read_header(path: Path) -> Header:
    """Read the first page of a file, and compare the file's length with it.

    Raises:
        CorruptCheckpointError: it is no whole part.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        header = _parse_header(path, file.read(PAGE))
        length = file.seek(0, 2)
    if length != header.size:
        raise CorruptCheckpointError(path, f"it has {length} bytes of {header.size}")
    return header


def read_part(path: Path, pool: BufferPool) -> Part:
    """Read a file and check every bit of it.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it can't be read.
    """
    header = read_header(path)
    buffer = pool.take(_padded(header.size))
    with open(path, "rb", buffering=0) as file, memoryview(buffer.memory)[: header.size] as view:
        done = 0
        while done < header.size:
            count = file.readinto(view[done:])
            if not count:
                raise CorruptCheckpointError(path, "it became shorter while it was read")
            done += count
    return verified(buffer, path)


def verified(buffer: SharedBuffer, source: Path | str) -> Part:
    """Return the part that ``buffer`` holds.

    Args:
        source: where it comes from, for the error.

    Raises:
        CorruptCheckpointError: it is not what was written.
    """
    with memoryview(buffer.memory) as view:
        header = _parse_header(source, bytes(view[:PAGE]))
        first = _first_tensor(header.hollow_bytes, header.tensors)
        if not first <= header.size <= len(view):
            raise CorruptCheckpointError(source, "its header and its length do not fit")
        index = bytes(view[PAGE : PAGE + header.hollow_bytes + 8 * header.tensors])
        if checksum(index) != header.index_sum:
            raise CorruptCheckpointError(source, "the state without its tensors is not what was written")
        _, places = _read_hollow(index[: header.hollow_bytes])
        sums = struct.unpack_from(f"<{header.tensors}Q", index, header.hollow_bytes)
        for number, (place, expected) in enumerate(zip(places, sums, strict=True)):
            begin = first + place.offset
            with view[begin : begin + place.nbytes] as content:
                if checksum(content) != expected:
                    raise CorruptCheckpointError(source, f"tensor {number} is not what was written")
    return Part(header.held, buffer, header.size)


def state_of(part: Part) -> TensorAwareStateDict:
    """Return the state in a part; its tensors are in host memory, views of the part's buffer."""
    state, tensors = contents_of(part)
    state.insert_tensors(tensors)
    return state


def contents_of(part: Part) -> tuple[TensorAwareStateDict, list[torch.Tensor]]:
    """Return the hollow state in a part, and its tensors, views of the part's buffer."""
    header = _parse_header("a part", bytes(part.buffer.memory[:PAGE]))
    first = _first_tensor(header.hollow_bytes, header.tensors)
    state, places = _read_hollow(bytes(part.buffer.memory[PAGE : PAGE + header.hollow_bytes]))
    if not isinstance(state, TensorAwareStateDict):
        raise CheckpointingException(f"A part holds a {type(state).__name__} in place of a state dict.")
    tensors = [
        _view(part.buffer, first + place.offset, place.nbytes).view(place.dtype).reshape(place.shape)
        for place in places
    ]
    return state, tensors


def _lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[_Place], int]:
    """Return the place of each tensor, and where the last ends."""
    places, offset, end = [], 0, 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        places.append(_Place(tensor.dtype, tensor.shape, offset, nbytes))
        end = offset + nbytes
        offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _copy(
    tensors: Sequence[torch.Tensor], places: Sequence[_Place], buffer: SharedBuffer, first: int
) -> bytes:
    """Copy the tensors to their places; return their checksums."""
    for tensor, place in zip(tensors, places, strict=True):
        target = _view(buffer, first + place.offset, place.nbytes).view(place.dtype).reshape(place.shape)
        target.copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    with memoryview(buffer.memory) as view:
        sums = []
        for place in places:
            begin = first + place.offset
            padded = -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
            view[begin + place.nbytes : begin + padded] = bytes(padded - place.nbytes)
            with view[begin : begin + place.nbytes] as content:
                sums.append(checksum(content))
    return struct.pack(f"<{len(sums)}Q", *sums)


def _view(buffer: SharedBuffer, offset: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer.memory, dtype=torch.uint8, offset=offset, count=nbytes)


def _first_tensor(hollow_bytes: int, tensors: int) -> int:
    return PAGE + _padded(hollow_bytes + 8 * tensors)


def _padded(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _write_header(buffer: SharedBuffer, header: Header) -> None:
    content = msgspec.json.encode(header)
    if len(content) > PAGE - _HEAD.size:
        raise CheckpointingException(f"The session id {header.session[:40]!r}… is too long.")
    head = _HEAD.pack(_MAGIC, len(content), checksum(content)) + content
    buffer.memory[:PAGE] = head.ljust(PAGE, b"\0")
    index_end = PAGE + header.hollow_bytes + 8 * header.tensors
    first = _first_tensor(header.hollow_bytes, header.tensors)
    buffer.memory[index_end:first] = bytes(first - index_end)


def _parse_header(source: Path | str, page: bytes) -> Header:
    try:
        magic, length, expected = _HEAD.unpack_from(page)
        content, rest = page[_HEAD.size : _HEAD.size + length], page[_HEAD.size + length :]
        if magic == _MAGIC and checksum(content) == expected and not any(rest):
            return msgspec.json.decode(content, type=Header)
    except (struct.error, msgspec.DecodeError):
        pass
    raise CorruptCheckpointError(source, "it does not begin as a part of a checkpoint does")


def _read_hollow(data: bytes) -> tuple[object, list[_Place]]:
    content = decode(data)
    return content["state"], [_Place(*place) for place in content["places"]]
