"""Read a data file of torch.distributed.checkpoint, and compare every bit with its checksums on the way.

A tensor that lies in the file as it is to lie in host memory is read to its place at once; others are read to
memory of their own first, and copied, as are parts of a tensor (sharded anew) and tensors of a device.
"""

from __future__ import annotations

import bisect
import functools
import io
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from nvrx_slurm.checkpointing.storage.checked_read import CheckedReads, Reading, reading
from nvrx_slurm.checkpointing.storage.checksums import Region, Table, checksum, find_table, mapped, opened
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.host_memory import host_bytes, new_storage

_AT_ONCE = 64 << 20  # bytes on their way


@dataclass(frozen=True)
class Wanted:
    """What a rank wants of a file."""

    request: Any
    """torch's ReadItem."""
    place: Region
    """Of the stored tensor, or object: a file of torch.save inside of the file."""


def read_file(path: Path, wanted: Sequence[Wanted], planner: Any) -> bool:
    """Give the planner what is wanted; return False when the file has no checksums, with nothing read.

    Raises:
        CorruptCheckpointError: it is not what was written. What was read before is in the state's tensors.
        OSError: it can't be read.
    """
    with opened(path) as fd, mapped(path, fd) as view:
        table = find_table(path, view)
        if table is None:
            return False
        table.check_rest(path, view)
        with reading(fd) as reads:
            _File(path, view, table, reads, planner).load(wanted)
    return True


@dataclass(frozen=True)
class _Kind:
    """What a stored contiguous tensor is, apart from its bytes."""

    dtype: torch.dtype
    shape: torch.Size


@dataclass(frozen=True)
class _UnderWay:
    region: Region
    reading: Reading
    finish: Callable[[], None]


class _File:
    def __init__(self, path: Path, view: memoryview, table: Table, reads: CheckedReads, planner: Any) -> None:
        self._path = path
        self._view = view
        self._sums = table.sums
        self._regions = sorted(table.sums, key=lambda region: region.offset)
        self._reads = reads
        self._planner = planner
        self._under_way: deque[_UnderWay] = deque()
        self._bytes_under_way = 0

    def load(self, wanted: Sequence[Wanted]) -> None:
        contiguous: dict[tuple[Region, _Kind], list[Any]] = defaultdict(list)
        for each in sorted(wanted, key=lambda each: each.place.offset):
            inside = self._regions_in(each.place)
            if each.request.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(each.request, io.BytesIO(self._checked(each.place, inside)))
            elif len(inside) == 1 and (kind := self._kind(each.place, inside[0])):
                contiguous[inside[0], kind].append(each.request)
            else:
                content = io.BytesIO(self._checked(each.place, inside))
                self._copy(each.request, torch.load(content, map_location="cpu", weights_only=True))
        for (region, kind), requests in contiguous.items():
            while self._bytes_under_way > _AT_ONCE:
                self._finish_first()
            self._bytes_under_way += region.length
            self._start(region, kind, requests)
        while self._under_way:
            self._finish_first()

    def _regions_in(self, place: Region) -> list[Region]:
        first = bisect.bisect_left(self._regions, place.offset, key=lambda region: region.offset)
        last = bisect.bisect_left(self._regions, place.end, key=lambda region: region.offset)
        inside = self._regions[first:last]
        if place.end > len(self._view) or any(region.end > place.end for region in inside):
            raise CorruptCheckpointError(self._path, "it has no whole tensor where .metadata says")
        return inside

    def _kind(self, place: Region, region: Region) -> _Kind | None:
        before = bytes(self._view[place.offset : region.offset])
        return _kind_of(before, region.length, bytes(self._view[region.end : place.end]))

    def _checked(self, place: Region, inside: Sequence[Region]) -> bytes:
        content = bytes(self._view[place.offset : place.end])
        for region in inside:
            start = region.offset - place.offset
            with memoryview(content)[start : start + region.length] as part:
                self._compare(region, checksum(part))
        return content

    def _compare(self, region: Region, found: int | None) -> None:
        if found != self._sums[region]:
            why = f"the tensor at byte {region.offset} is not what was written"
            raise CorruptCheckpointError(self._path, why)

    def _start(self, region: Region, kind: _Kind, requests: Sequence[Any]) -> None:
        if len(requests) == 1:
            (request,) = requests
            target = self._planner.resolve_tensor(request).detach()
            if _is_whole(request, kind) and _is_as_stored(target, kind):
                torch.autograd.graph.increment_version(target)
                under_way = self._reads.start(region, _bytes_of(target))
                finish = functools.partial(self._planner.commit_tensor, request, target)
                self._under_way.append(_UnderWay(region, under_way, finish))
                return
        storage = new_storage(region.length)
        stored = torch.empty(0, dtype=kind.dtype).set_(storage, 0, kind.shape)

        def copy() -> None:
            for request in requests:
                self._copy(request, stored)

        self._under_way.append(_UnderWay(region, self._reads.start(region, host_bytes(storage)), copy))

    def _finish_first(self) -> None:
        first = self._under_way.popleft()
        self._bytes_under_way -= first.region.length
        self._compare(first.region, first.reading.checksum())
        first.finish()

    def _copy(self, request: Any, stored: Any) -> None:
        for dimension, (start, length) in enumerate(
            zip(request.storage_offsets, request.lengths, strict=True)
        ):
            stored = stored.narrow(dimension, start, length)
        target = self._planner.resolve_tensor(request).detach()
        if target.size() != stored.size():
            name, sizes = request.dest_index.fqn, (tuple(target.size()), tuple(stored.size()))
            raise ValueError(f"{name}: the state has {sizes[0]} where the checkpoint has {sizes[1]}")
        target.copy_(stored)
        self._planner.commit_tensor(request, target)


@functools.lru_cache(maxsize=4096)
def _kind_of(before: bytes, size: int, after: bytes) -> _Kind | None:
    """Unpickle a stored tensor without its bytes; None: it isn't plainly contiguous."""
    fd = os.memfd_create("nvrx-stored-tensor", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, before, 0)
        os.pwrite(fd, after, len(before) + size)  # what lies between takes no memory
        stored = torch.load(
            f"/proc/self/fd/{fd}", map_location=lambda storage, _tag: storage, weights_only=True, mmap=True
        )
    finally:
        os.close(fd)
    if type(stored) not in (torch.Tensor, torch.nn.Parameter) or not _is_plain(stored):
        return None
    whole = stored.storage_offset() == 0 and stored.numel() * stored.element_size() == size
    return _Kind(stored.dtype, stored.shape) if whole else None


def _is_plain(tensor: Any) -> bool:
    """Whether its elements follow one another in memory, as they are."""
    is_strided = tensor.layout == torch.strided and not tensor.is_quantized
    return is_strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _is_whole(request: Any, kind: _Kind) -> bool:
    return not any(request.storage_offsets) and tuple(request.lengths) == tuple(kind.shape)


def _is_as_stored(target: Any, kind: _Kind) -> bool:
    """Whether the bytes in the file are those that the tensor is to have."""
    is_in_host_memory = type(target) is torch.Tensor and target.device.type == "cpu"
    is_same = target.dtype == kind.dtype and target.shape == kind.shape
    return is_in_host_memory and is_same and _is_plain(target) and not target.is_inference()


def _bytes_of(tensor: Any) -> memoryview:
    start = tensor.storage_offset() * tensor.element_size()
    size = tensor.numel() * tensor.element_size()
    return host_bytes(tensor.untyped_storage())[start : start + size]
