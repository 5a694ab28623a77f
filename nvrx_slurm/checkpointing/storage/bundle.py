"""Several pieces one after another in one file, with a mark of its own and checksums at its end."""

from __future__ import annotations

import secrets
from dataclasses import replace

from nvrx_slurm.checkpointing.storage.checksums import MARK_SIZE, Region, encode_trailer, table_size
from nvrx_slurm.checkpointing.storage.layout import FileImage, Hole, Literal

_ALIGNMENT = 64  # as torch aligns storages in a file, so those of a piece stay aligned


class Bundle:
    """Collects the pieces; each is read on its own, by its place in the file."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(MARK_SIZE)
        """Tells this file from those of other ranks and saves, whose checksums are right as well."""
        self._end = 0
        self._literals: list[Literal] = []
        self._holes: list[Hole] = []
        self._tensors: list[object] = []

    def add_bytes(self, data: bytes) -> Region:
        """Add bytes; return where they are."""
        place = self._take(len(data))
        self._literals.append(Literal(place.offset, data))
        return place

    def add_image(self, image: FileImage) -> Region:
        """Add a file that has no table of its own; return where it is."""
        place = self._take(image.size)
        base = place.offset
        self._literals += [replace(each, offset=base + each.offset) for each in image.literals]
        self._holes += [replace(each, offset=base + each.offset) for each in image.holes]
        self._tensors += image.tensors
        return place

    def image(self, note: bytes = b"") -> FileImage:
        """Return the whole file; ``note`` stands before its mark."""
        end = self._end + len(note)
        mark = Literal(self._end, note + bytes.fromhex(self.mark))
        table = Region(end + MARK_SIZE, table_size(len(self._holes)))
        trailer = Literal(table.end, encode_trailer(table.length))
        size = table.end + len(trailer.data)
        literals = (*self._literals, mark, trailer)
        return FileImage(size, literals, tuple(self._holes), table, tuple(self._tensors))

    def _take(self, size: int) -> Region:
        padding = -self._end % _ALIGNMENT
        if padding:
            self._literals.append(Literal(self._end, bytes(padding)))
        place = Region(self._end + padding, size)
        self._end = place.end
        return place
