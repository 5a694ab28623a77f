"""Which files make a checkpoint of torch.distributed.checkpoint, as JSON; needs no torch, unpickles nothing.

The manifest is named after the checksum of the ``.metadata`` that it belongs to and is written before it. So
the one rename that puts ``.metadata`` in place commits both, and after an overwrite the old
``.metadata`` has its old manifest until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from nvrx_slurm.checkpointing.storage.checksums import checksum
from nvrx_slurm.checkpointing.storage.durable import remove_leftovers, write_bytes
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.regular_file import open_regular

METADATA = ".metadata"
_PREFIX = "nvrx-manifest-"


class Manifest(msgspec.Struct, frozen=True):
    """The files of a checkpoint."""

    files: dict[str, int]
    """Their names in the directory, and their sizes in bytes."""
    v: int = 1


def commit(folder: Path, metadata: bytes, names: Iterable[str]) -> None:
    """Make a checkpoint of files that are on disk already, in place of the one that may be there.

    Raises:
        OSError: a file is missing, or the directory takes no more; the former checkpoint still counts.
    """
    former = None
    with contextlib.suppress(CorruptCheckpointError):
        former = _read_manifest(folder)
    manifest = Manifest({name: (folder / name).stat().st_size for name in sorted(set(names))})
    write_bytes(_path(folder, metadata), msgspec.json.encode(manifest))
    write_bytes(folder / METADATA, metadata)
    if former is not None:
        for name in former.files.keys() - manifest.files.keys():
            (folder / name).unlink(missing_ok=True)
    for path in folder.glob(_PREFIX + "*.json"):
        if path != _path(folder, metadata):
            path.unlink(missing_ok=True)
    remove_leftovers(folder)


def is_committed(folder: Path) -> bool:
    """Whether there is a checkpoint in a directory."""
    return (folder / METADATA).is_file()


def read(folder: Path) -> Manifest | None:
    """Return the manifest of the checkpoint in a directory, None if another writer made it without one.

    Raises:
        CorruptCheckpointError: there is no checkpoint, or its manifest is damaged.
    """
    if not is_committed(folder):
        raise CorruptCheckpointError(folder, "no checkpoint: its writer has not finished")
    return _read_manifest(folder)


def sizes_are_right(folder: Path, manifest: Manifest) -> None:
    """Look whether all files are there, whole as far as their size tells.

    Raises:
        CorruptCheckpointError: one is not.
    """
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise CorruptCheckpointError(path, "the file is missing")
        if path.stat().st_size != size:
            raise CorruptCheckpointError(path, f"it has {path.stat().st_size} bytes, {size} were written")


def _read_manifest(folder: Path) -> Manifest | None:
    if not is_committed(folder):
        return None
    path = _path(folder, _content(folder / METADATA))
    if not path.is_file():
        if any(folder.glob(_PREFIX + "*.json")):
            raise CorruptCheckpointError(folder / METADATA, "it is not the one that its writer has committed")
        return None
    try:
        manifest = msgspec.json.decode(_content(path), type=Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptCheckpointError(path, str(error)) from None
    if any(Path(name).name != name for name in manifest.files):
        raise CorruptCheckpointError(path, "it names files elsewhere")
    return manifest


def _path(folder: Path, metadata: bytes) -> Path:
    return folder / f"{_PREFIX}{checksum(metadata):016x}.json"


def _content(path: Path) -> bytes:
    with open(open_regular(path), "rb") as file:
        return file.read()
