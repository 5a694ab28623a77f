"""Saves into a directory that nobody has committed yet; needs no torch.

Each data file ends with a note: which save it belongs to, and where its pieces lie. Beside them lies the
save's plan: the metadata, and how many pieces make it whole. So whoever comes when the ranks are gone can
tell that everything was written, and commit it.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import msgspec

from nvrx_slurm.checkpointing.storage.checksums import checksum, mark_offset
from nvrx_slurm.checkpointing.storage.folders import Folder

_END = struct.Struct("<QQ8s")  # checksum and length of the note before it, magic
_MAGIC = b"NVRXNOTE"
_SLOTS = ("nvrx-plan-0.msgpack", "nvrx-plan-1.msgpack")
"""Two, so that the plan of a save does not take the place of the one before, which may still be written."""


class SaveId(msgspec.Struct, frozen=True):
    """Names a save, the same on all ranks."""

    session: str
    """The same for all saves of one start of the training."""
    number: int
    """Rises from save to save."""


class Note(msgspec.Struct, frozen=True):
    """What a data file says of itself."""

    save: SaveId
    pieces: int
    places: bytes
    """Pickled pairs of torch's ``MetadataIndex`` and ``_StorageInfo``, one of each piece."""


class Plan(msgspec.Struct, frozen=True):
    """What a save will be."""

    save: SaveId
    sequence: int
    """Rises from save to save into one directory; an older save never takes the place of a newer one."""
    pieces: int
    """Of all ranks together."""
    metadata: bytes
    """Pickled, without the places of the pieces."""


_Said = TypeVar("_Said", Note, Plan)


def encode_note(note: Note) -> bytes:
    """Return what stands in a data file right before its mark."""
    return _sealed(note)


def encode_plan(plan: Plan) -> tuple[str, bytes]:
    """Return name and content of the plan's file."""
    return _SLOTS[plan.sequence % len(_SLOTS)], _sealed(plan)


def _sealed(said: Note | Plan) -> bytes:
    """What is damaged must not be committed: it would take the place of a good checkpoint."""
    content = msgspec.msgpack.encode(said)
    return content + _END.pack(checksum(content), len(content), _MAGIC)


def plans(folder: Folder) -> list[Plan]:
    """Return the plans in a directory, the newest first."""
    found = []
    for name in _SLOTS:
        info = folder.info(name)
        with contextlib.suppress(FileNotFoundError):  # removed by whoever has committed it
            plan = _unsealed(info.size, partial(folder.read_part, name), Plan) if info else None
            if plan is not None:
                found.append(plan)
    return sorted(found, key=lambda plan: plan.sequence, reverse=True)


def notes(folder: Folder, names: list[str]) -> Iterator[tuple[str, Note]]:
    """Yield the notes of those of the files that have one."""
    for name in names:
        info = folder.info(name)
        note = _read_note(info.size, partial(folder.read_part, name)) if info else None
        if note is not None:
            yield name, note


def _read_note(size: int, read: Callable[[int, int], bytes]) -> Note | None:
    end = mark_offset(size, read)
    return None if end is None else _unsealed(end, read, Note)


def _unsealed(end: int, read: Callable[[int, int], bytes], kind: type[_Said]) -> _Said | None:
    """Return what stands before an offset; None: nothing of this kind, or it is damaged."""
    if end < _END.size:
        return None
    try:
        expected, length, magic = _END.unpack(read(end - _END.size, end))
        begin = end - _END.size - length
        if magic != _MAGIC or begin < 0:
            return None
        content = read(begin, begin + length)
        return msgspec.msgpack.decode(content, type=kind) if checksum(content) == expected else None
    except (struct.error, msgspec.MsgspecError):  # another file is there by now, or another writer's
        return None


def forget(folder: Folder, sequence: int) -> None:
    """Remove the plans of saves up to this one, which has been committed."""
    for plan in plans(folder):
        if plan.sequence <= sequence:
            folder.remove(encode_plan(plan)[0])


def remove_outdated(folder: Folder, names: list[str], committed: SaveId, *, is_first: bool) -> None:
    """Remove those of the files that saves have written which will never be committed.

    Args:
        committed: the save that has just been; what its session has saved before is outdated, and …
        is_first: … if it is the session's first in this directory, what ended sessions have left.
    """
    for name, note in notes(folder, names):
        is_own = note.save.session == committed.session
        if (note.save.number < committed.number) if is_own else is_first:
            folder.remove(name)
