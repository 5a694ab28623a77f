"""Which files make a checkpoint of torch.distributed.checkpoint, as JSON; needs no torch, unpickles nothing.

The manifest is named after the checksum of the ``.metadata`` that it belongs to and is written before it. So
the one rename that puts ``.metadata`` in place commits both, and after an overwrite the old
``.metadata`` has its old manifest until then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import msgspec

from nvrx_slurm.checkpointing.storage import pending
from nvrx_slurm.checkpointing.storage.checksums import checksum, read_mark
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.folders import Folder, folder_at
from nvrx_slurm.checkpointing.storage.pending import SaveId

METADATA = ".metadata"
DATA_SUFFIX = ".distcp"
_PREFIX = "nvrx-manifest-"
_CHECKSUM = re.compile(rb',"checksum":"([0-9a-f]{16})"\}$')


class Manifest(msgspec.Struct, frozen=True):
    """The files of a checkpoint."""

    files: dict[str, int]
    """Their names in the directory, and their sizes in bytes."""
    marks: dict[str, str] = {}
    """What each file says it is, so that none stands for another; older checkpoints have none."""
    v: int = 1
    committed: float = 0.0
    """Unix time: that of the file lies after a copy. 0: an older checkpoint."""
    save: SaveId | None = None
    sequence: int = 0
    """See :class:`~.pending.Plan`; 0: it had none."""

    def is_at_least(self, save: SaveId | None, sequence: int) -> bool:
        """Whether this is that save, or one that was planned later."""
        return save is not None and (self.save == save or self.sequence > sequence)


def commit(
    folder: Path | str,
    metadata: bytes,
    marks: Mapping[str, str],
    save: SaveId | None = None,
    sequence: int = 0,
) -> None:
    """Make a checkpoint of files that are durable already, in place of the one that may be there.

    Without effect if it is committed already, or a newer one is.

    Args:
        folder: a directory, or the URL of one.
        marks: of each file, by its name.
        save: None: it has no plan.
        sequence: of its plan.

    Raises:
        CorruptCheckpointError: a file is not the one that was written; the former checkpoint still counts.
        OSError: a file is missing, or the directory takes no more; the former checkpoint still counts.
    """
    there = folder_at(folder)
    with there.locked():
        former = None
        with contextlib.suppress(CorruptCheckpointError):
            former = _read_manifest(there)
        if former is not None and former.is_at_least(save, sequence):
            return
        files = {name: _size(there, name) for name in sorted(marks)}
        marks = dict(sorted(marks.items()))
        manifest = Manifest(files, marks, committed=time.time(), save=save, sequence=sequence)
        files_are_own(folder, manifest, manifest.files, "another save has written here meanwhile")
        own = _name(metadata)
        there.write(own, _with_checksum(msgspec.json.encode(manifest)))
        there.write(METADATA, metadata)
        with contextlib.suppress(OSError):  # it is committed: what can't be removed now stays
            _clean_up(there, manifest, own, former)


def _clean_up(there: Folder, manifest: Manifest, own: str, former: Manifest | None) -> None:
    if former is not None:
        for name in former.files.keys() - manifest.files.keys():
            there.remove(name)
    for name in _manifests(there):
        if name != own:
            there.remove(name)
    if manifest.save is not None:
        pending.forget(there, manifest.sequence)
        others = [n for n in there.files() if n.endswith(DATA_SUFFIX) and n not in manifest.files]
        is_first = former is None or former.save is None or former.save.session != manifest.save.session
        pending.remove_outdated(there, others, manifest.save, is_first=is_first)
    there.remove_leftovers()


def unfinished(folder: Path) -> list[tuple[pending.Plan, dict[str, pending.Note]]]:
    """Return saves that have been written and are newer than what is committed, the newest first.

    There are as many pieces as there must be; whether they are the right ones tells the metadata.

    Raises:
        CorruptCheckpointError: what is committed is damaged.
        OSError: the directory can't be read.
    """
    there = folder_at(folder)
    planned = pending.plans(there)
    if not planned:
        return []
    committed = _read_manifest(there)
    if committed is None and there.info(METADATA) is not None:
        return []  # another writer's: it can't be told which is newer
    found = []
    names = [name for name in there.files() if name.endswith(DATA_SUFFIX)]
    for plan in planned:
        if committed is not None and committed.is_at_least(plan.save, plan.sequence):
            continue
        own = {name: note for name, note in pending.notes(there, names) if note.save == plan.save}
        if sum(note.pieces for note in own.values()) >= plan.pieces:
            found.append((plan, own))
    return found


def marks_of(there: Folder, names: Iterable[str]) -> dict[str, str]:
    """Return what the files are by themselves.

    Raises:
        CorruptCheckpointError: one is missing, or none of a checkpoint.
    """
    marks = {}
    for name in names:
        info = there.info(name)
        mark = read_mark(info.size, partial(there.read_part, name)) if info else None
        if mark is None:
            raise CorruptCheckpointError(there.where(name), "the file is missing")
        marks[name] = mark
    return marks


def next_sequence(folder: Path) -> int:
    """Return what no save into a directory has had.

    Raises:
        OSError: it can't be read.
    """
    there = folder_at(folder)
    known = [plan.sequence for plan in pending.plans(there)]
    with contextlib.suppress(CorruptCheckpointError):
        committed = _read_manifest(there)
        known.append(committed.sequence if committed else 0)
    return max(known, default=0) + 1


def is_committed(folder: Path | str) -> bool:
    """Whether there is a checkpoint in a directory."""
    return folder_at(folder).info(METADATA) is not None


def read(folder: Path | str) -> Manifest | None:
    """Return the manifest of the checkpoint in a directory, None if another writer made it without one.

    Raises:
        CorruptCheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not is_committed(folder):
        raise CorruptCheckpointError(folder, "no checkpoint: its writer has not finished")
    return _read_manifest(folder_at(folder))


def sizes_are_right(folder: Path | str, manifest: Manifest) -> None:
    """Look whether all files are there, whole as far as their size tells.

    Raises:
        CorruptCheckpointError: one is not.
    """
    there = folder_at(folder)
    found = there.files()
    for name, size in manifest.files.items():
        if name not in found:
            raise CorruptCheckpointError(there.where(name), "the file is missing")
        if found[name].size != size:
            why = f"it has {found[name].size} bytes, {size} were written"
            raise CorruptCheckpointError(there.where(name), why)


def files_are_own(
    folder: Path | str,
    manifest: Manifest,
    names: Iterable[str],
    why: str = "it belongs to another rank or save",
) -> None:
    """Look whether files are those that were written under their names; reads 32 bytes of each.

    Raises:
        CorruptCheckpointError: one is not, or is missing.
    """
    there = folder_at(folder)
    for name in sorted(set(names) & manifest.marks.keys()):
        info = there.info(name)
        if info is None:
            raise CorruptCheckpointError(there.where(name), "the file is missing")
        if read_mark(info.size, partial(there.read_part, name)) != manifest.marks[name]:
            raise CorruptCheckpointError(there.where(name), f"it is not what was written: {why}")


def _read_manifest(there: Folder) -> Manifest | None:
    if there.info(METADATA) is None:
        return None
    name = _name(there.read(METADATA))
    if there.info(name) is None:
        if _manifests(there):
            why = "it is not the one that its writer has committed"
            raise CorruptCheckpointError(there.where(METADATA), why)
        return None
    try:
        manifest = msgspec.json.decode(_checked(there.where(name), there.read(name)), type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptCheckpointError(there.where(name), str(error)) from None
    if any(Path(each).name != each or not each.endswith(DATA_SUFFIX) for each in manifest.files):
        # The next save removes what is named here.
        raise CorruptCheckpointError(there.where(name), "it names other files than those of a checkpoint")
    return manifest


def _with_checksum(content: bytes) -> bytes:
    """Append the checksum of a JSON object to it, as its last member."""
    return content[:-1] + b',"checksum":"%016x"}' % checksum(content)


def _checked(where: Path | str, content: bytes) -> bytes:
    found = _CHECKSUM.search(content)  # older manifests have none
    if found is not None and checksum(content[: found.start()] + b"}") != int(found[1], 16):
        raise CorruptCheckpointError(where, "it is not what was written")
    return content


def _size(there: Folder, name: str) -> int:
    info = there.info(name)
    if info is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(there.where(name)))
    return info.size


def _name(metadata: bytes) -> str:
    return f"{_PREFIX}{checksum(metadata):016x}.json"


def _manifests(there: Folder) -> list[str]:
    return [name for name in there.files() if name.startswith(_PREFIX) and name.endswith(".json")]
