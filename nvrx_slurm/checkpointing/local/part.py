"""One rank's share of a checkpoint as one run of bytes, in memory and on its way; see ``part_format.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict, decode, encode
from nvrx_slurm.checkpointing.local.buffers import Buffer, BufferPool, SharedBuffer
from nvrx_slurm.checkpointing.local.errors import CheckpointingException
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart
from nvrx_slurm.checkpointing.local.part_format import (
    PAGE,
    Header,
    Row,
    check,
    encode_index,
    first_tensor,
    header_of,
    padded,
    parse_header,
    read_checked,
    write_header,
)
from nvrx_slurm.checkpointing.storage import checksum
from nvrx_slurm.checkpointing.storage.checksums import opened

_ALIGNMENT = 64


@dataclass(frozen=True)
class Part:
    """A whole part in memory."""

    held: HeldPart
    buffer: Buffer
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
        write_header(self.buffer.memory, header)
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
        CheckpointingException: it is none, or can't be pickled without its tensors.
        OSError: there is no memory for the copy.
    """
    if not hasattr(state, "tensors"):
        kind = type(state).__name__
        raise CheckpointingException(f"the state is a {kind}: wrap it in BasicTensorAwareStateDict")
    tensors = [tensor.detach() for tensor in state.tensors]
    popped = state.pop_tensors()
    try:
        places, length = _lay_out(tensors)
        hollow = encode({"state": state, "places": [(p.dtype, p.shape, p.offset, p.nbytes) for p in places]})
    finally:
        state.insert_tensors(popped)
    first = first_tensor(len(hollow), len(places))
    size = first + length
    buffer = pool.take(padded(size))
    index = hollow + encode_index(_copy(tensors, places, buffer, first))
    buffer.memory[PAGE : PAGE + len(index)] = index
    index_sum = checksum(index)
    header = Header(id_.iteration, id_.rank, id_.session_id, 0, "", len(hollow), len(places), index_sum, size)
    return StagedPart(id_, f"{index_sum:016x}", buffer, header)


def read_part(path: Path, pool: BufferPool) -> Part:
    """Read a file and check every bit of it.

    Raises:
        CorruptCheckpointError: it is not what was written.
        OSError: it can't be read.
    """
    with opened(path) as fd:
        header = header_of(fd, path)
        buffer = pool.take_any(padded(header.size))
        with memoryview(buffer.memory) as view:
            read_checked(fd, header, view, path)
    return Part(header.held, buffer, header.size)


def verified(buffer: Buffer, source: Path | str) -> Part:
    """Return the part that ``buffer`` holds.

    Args:
        source: where it comes from, for the error.

    Raises:
        CorruptCheckpointError: it is not what was written.
    """
    with memoryview(buffer.memory) as view:
        header = check(view, source)
    return Part(header.held, buffer, header.size)


def state_of(part: Part) -> TensorAwareStateDict:
    """Return the state in a part; its tensors are in host memory, views of the part's buffer."""
    state, tensors = contents_of(part)
    state.insert_tensors(tensors)
    return state


def contents_of(part: Part) -> tuple[TensorAwareStateDict, list[torch.Tensor]]:
    """Return the hollow state in a part, and its tensors, views of the part's buffer."""
    header = parse_header("a part", bytes(part.buffer.memory[:PAGE]))
    content = decode(bytes(part.buffer.memory[PAGE : PAGE + header.hollow_bytes]))
    state, places = content["state"], [_Place(*place) for place in content["places"]]
    first = header.first_tensor
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
) -> list[Row]:
    """Copy the tensors to their places; return the index of them."""
    for tensor, place in zip(tensors, places, strict=True):
        target = _view(buffer, first + place.offset, place.nbytes).view(place.dtype).reshape(place.shape)
        target.copy_(tensor, non_blocking=True)
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    with memoryview(buffer.memory) as view:
        rows = []
        for place in places:
            begin = first + place.offset
            padded = -(-place.nbytes // _ALIGNMENT) * _ALIGNMENT
            view[begin + place.nbytes : begin + padded] = bytes(padded - place.nbytes)
            with view[begin : begin + place.nbytes] as content:
                rows.append(Row(place.offset, place.nbytes, checksum(content)))
    return rows


def _view(buffer: Buffer, offset: int, nbytes: int) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(buffer.memory, dtype=torch.uint8, offset=offset, count=nbytes)
