"""What checkpoints there are in a directory, and whether they are whole. Needs no torch, no unpickling."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from stat import S_ISDIR

from nvrx_slurm.checkpointing import local_parts
from nvrx_slurm.checkpointing.local_parts import LocalSave
from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.checksums import Verification, opened, verify_content, verify_file
from nvrx_slurm.checkpointing.storage.durable import is_temporary, leftovers
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.folders import FileInfo, RemoteFolder, folder_at
from nvrx_slurm.checkpointing.storage.objects import read_object

_UNFINISHED = "no .metadata: its writer has not finished"
_FILE_SUFFIXES = (".pt", ".pth", ".ckpt")


class Kind(Enum):
    """What stands in a directory."""

    FILE = "file"
    """One file, as torch.save writes it."""
    DIRECTORY = "directory"
    """Of torch.distributed.checkpoint."""
    LOCAL = "local"
    """The parts of one save on this node."""


class State(Enum):
    """What is known of a checkpoint."""

    COMMITTED = "committed"
    """Its writer has finished; its bits have not been looked at."""
    INTACT = "intact"
    NO_CHECKSUMS = "no checksums"
    """Whole as far as can be told: another writer made it."""
    TORN = "torn"
    """Its writer has not finished; or still writes."""
    DAMAGED = "damaged"
    UNREADABLE = "unreadable"
    """For this user: it can't be told what it is, or whether it is whole."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk."""

    path: Path | str
    """A string: a URL."""
    kind: Kind
    state: State
    size: int
    """In bytes."""
    modified: float
    """Unix time of its commit; where that is written nowhere, of the last change."""
    why: str = ""
    """What is wrong, or missing, in words."""
    local: LocalSave | None = None
    """Of which ``path`` is a name, and no file."""

    @property
    def name(self) -> str:
        return str(self.path).rstrip("/").rpartition("/")[2]


def find(folder: Path | str) -> list[Checkpoint]:
    """Return the checkpoints in a directory, or the one that it is, oldest first; their bits are not read.

    Args:
        folder: may be a URL.

    Returns them in the order of :func:`~.retention.age`.

    Raises:
        OSError: it can't be read.
    """
    from nvrx_slurm.checkpointing.retention import age

    if isinstance(folder, str):
        return sorted(_find_at(folder), key=age)
    if _is_one(folder):
        return [_look(folder)]
    found = []
    for path in folder.iterdir():
        try:
            if _is_checkpoint(path):
                found.append(_look(path))
        except (FileNotFoundError, NotADirectoryError):
            pass  # training removes and replaces checkpoints meanwhile
        except PermissionError as error:
            found.append(_unreadable(path, error))
    found += [_look_local(folder, save) for save in local_parts.find(folder)]
    return sorted(found, key=age)


def verify(checkpoint: Checkpoint, read: Callable[[int], None] = lambda count: None) -> Checkpoint:
    """Read a checkpoint and compare every bit with its checksums.

    Args:
        read: is told of the bytes of each file when they have been read.
    """
    if checkpoint.state in (State.TORN, State.DAMAGED, State.UNREADABLE):
        return checkpoint
    if checkpoint.local is not None:
        try:
            why = local_parts.verify(checkpoint.local, read)
        except PermissionError as error:
            return replace(checkpoint, state=State.UNREADABLE, why=_text_of(error))
        return replace(checkpoint, state=State.DAMAGED if why else State.INTACT, why=why or checkpoint.why)
    try:
        found = set()
        for path in _data_files(checkpoint):
            found.add(_verify_one(path, read))
        intact = found <= {Verification.INTACT} and _has_own_record(checkpoint)
    except PermissionError as error:
        return replace(checkpoint, state=State.UNREADABLE, why=_text_of(error))
    except (CorruptCheckpointError, OSError) as error:
        return replace(checkpoint, state=State.DAMAGED, why=str(error))
    return replace(checkpoint, state=State.INTACT if intact else State.NO_CHECKSUMS)


def torn_files(folder: Path) -> list[Path]:
    """Return files that killed writers have left, here and in checkpoint directories one level below."""
    below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    found = []
    for each in (folder, *sorted(below)):
        # Another may remove it meanwhile; what is not ours to read is not ours to clean.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            found += leftovers(each)
    return found


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether what says it is committed is so, as far as can be told without reading it.

    torch.save writes a file under its final name: it may be half of one.
    """
    if checkpoint.kind is not Kind.FILE or isinstance(checkpoint.path, str):
        return checkpoint.state is State.COMMITTED
    try:
        with opened(checkpoint.path) as fd, open(fd, "rb", closefd=False) as file, zipfile.ZipFile(file):
            return True
    except (OSError, zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError, struct.error):
        return False


def _verify_one(path: Path | str, read: Callable[[int], None]) -> Verification:
    if isinstance(path, str):
        content = read_object(path)
        read(len(content))
        return verify_content(path, content)
    found = verify_file(path)
    read(path.stat().st_size)
    return found


def remove(checkpoint: Checkpoint, *, dry_run: bool = False) -> bool:
    """Remove a checkpoint; of a directory ``.metadata`` first, so that nobody takes the rest for whole.

    Args:
        dry_run: only say whether it would be.

    Returns:
        False: it stays, or is gone already: another has taken its place since it was looked at, one is being
        written there, or a newer one that all ranks have written waits there for its commit.

    Raises:
        OSError: it can't be removed.
    """
    if checkpoint.local is not None:
        return _remove_parts(checkpoint.local, dry_run=dry_run)
    try:
        if isinstance(checkpoint.path, str):
            return _remove_at(checkpoint, checkpoint.path, dry_run=dry_run)
        path = checkpoint.path
        if _look(path) != checkpoint or _is_being_written(path) or _holds_a_newer_one(checkpoint):
            return False
        if dry_run:
            return True
        if checkpoint.kind is Kind.FILE:
            path.unlink()
        else:
            (path / manifest.METADATA).unlink(missing_ok=True)
            shutil.rmtree(path)
    except FileNotFoundError:
        return False
    return True


def _remove_parts(save: LocalSave, *, dry_run: bool) -> bool:
    is_removed = False
    for part in save.files:
        with contextlib.suppress(FileNotFoundError):
            if part.stat().st_mtime <= save.modified:
                is_removed = True
                if not dry_run:
                    part.unlink()
    return is_removed


def _remove_at(checkpoint: Checkpoint, url: str, *, dry_run: bool) -> bool:
    above, _, name = url.rstrip("/").rpartition("/")
    if checkpoint.kind is Kind.FILE:
        info = RemoteFolder(above).info(name)
        if info is None or _object(url, info) != checkpoint:
            return False
        if not dry_run:
            RemoteFolder(above).remove(name)
        return True
    if _look_into(url) != checkpoint:
        return False
    if not dry_run:
        RemoteFolder(url).remove(manifest.METADATA)
        RemoteFolder(above).remove_folder(name)
    return True


def _is_being_written(path: Path) -> bool:
    if not path.is_dir():
        return False
    return {name for name in os.listdir(path) if is_temporary(name)} > {each.name for each in leftovers(path)}


def _holds_a_newer_one(checkpoint: Checkpoint) -> bool:
    """Whether whoever loads a committed directory next finds something newer than what it was judged by."""
    is_committed = checkpoint.kind is Kind.DIRECTORY and checkpoint.state is State.COMMITTED
    return is_committed and bool(manifest.unfinished(Path(checkpoint.path)))


def _is_one(path: Path) -> bool:
    """Whether a path is a checkpoint itself, rather than where some are."""
    return path.is_file() or (path.is_dir() and _is_checkpoint_directory(path))


def _unreadable(path: Path, error: OSError) -> Checkpoint:
    try:
        stat = path.lstat()
        size, modified = stat.st_size, stat.st_mtime
        kind = Kind.DIRECTORY if S_ISDIR(stat.st_mode) else Kind.FILE
    except OSError:
        size, modified, kind = 0, 0.0, Kind.FILE
    return Checkpoint(
        path, kind, State.UNREADABLE, 0 if kind is Kind.DIRECTORY else size, modified, _text_of(error)
    )


def _text_of(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def _is_checkpoint(path: Path) -> bool:
    if path.is_symlink() or is_temporary(path.name) or local_parts.is_part(path):
        return False
    return _is_checkpoint_directory(path) or (path.is_file() and path.suffix in _FILE_SUFFIXES)


def _is_checkpoint_directory(path: Path) -> bool:
    if not path.is_dir():
        return False
    return manifest.is_committed(path) or any(path.glob("*" + manifest.DATA_SUFFIX)) or _half_written(path)


def _half_written(path: Path) -> bool:
    return any(is_temporary(name) and manifest.DATA_SUFFIX in name for name in os.listdir(path))


def _look_local(folder: Path, save: LocalSave) -> Checkpoint:
    name = save.files[0] if save.damaged else folder / f"iteration {save.iteration}"
    state = State.DAMAGED if save.damaged else State.COMMITTED
    if save.is_unreadable:
        state = State.UNREADABLE
    why = save.damaged or save.what_is_here
    return Checkpoint(name, Kind.LOCAL, state, save.size, save.modified, why, save)


def _look(path: Path) -> Checkpoint:
    if local_parts.is_part(path):
        (save,) = [each for each in local_parts.find(path.parent) if path in each.files]
        alone = replace(save, files=(path,), size=path.stat().st_size)
        return replace(_look_local(path.parent, alone), path=path)
    if path.is_file():
        stat = path.stat()
        state = State.COMMITTED if stat.st_size else State.DAMAGED
        return Checkpoint(
            path, Kind.FILE, state, stat.st_size, stat.st_mtime, "" if stat.st_size else "empty"
        )
    if not path.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return _look_into(path)


def _look_into(path: Path | str) -> Checkpoint:
    files = folder_at(path).files()
    size = sum(each.size for each in files.values())
    if manifest.METADATA not in files:
        is_written = isinstance(path, Path) and manifest.unfinished(path)
        why = "all is written: whoever loads it commits it" if is_written else _UNFINISHED
        modified = max((each.modified for each in files.values()), default=0.0)
        return Checkpoint(path, Kind.DIRECTORY, State.TORN, size, modified, why)
    found = Checkpoint(path, Kind.DIRECTORY, State.COMMITTED, size, files[manifest.METADATA].modified)
    try:
        listed = manifest.read(path)
        if listed is not None:
            found = replace(found, modified=listed.committed or found.modified)
            manifest.sizes_are_right(path, listed)
    except CorruptCheckpointError as error:
        return replace(found, state=State.DAMAGED, why=str(error))
    return found


def _find_at(url: str) -> list[Checkpoint]:
    """What stands at a URL, whose store knows names and sizes of objects, and nothing half written."""
    folder = RemoteFolder(url)
    names = folder.files()
    if any(_is_of_a_directory(name) for name in names):
        return [_look_into(folder.url)]
    itself = RemoteFolder(url.rstrip("/").rpartition("/")[0]).info(url.rstrip("/").rpartition("/")[2])
    if itself is not None:
        return [_object(folder.url, itself)]
    found = [_object(folder.where(n), each) for n, each in names.items() if n.endswith(_FILE_SUFFIXES)]
    for entry in folder.entries():
        below = folder.where(entry["name"].rstrip("/").rpartition("/")[2])
        if entry["type"] == "directory" and any(map(_is_of_a_directory, RemoteFolder(below).files())):
            found.append(_look_into(below))
    return found


def _is_of_a_directory(name: str) -> bool:
    return name == manifest.METADATA or name.endswith(manifest.DATA_SUFFIX)


def _object(url: str, info: FileInfo) -> Checkpoint:
    state, why = (State.COMMITTED, "") if info.size else (State.DAMAGED, "empty")
    return Checkpoint(url, Kind.FILE, state, info.size, info.modified, why)


def _data_files(checkpoint: Checkpoint) -> Iterator[Path | str]:
    if checkpoint.kind is Kind.FILE:
        yield checkpoint.path
        return
    listed = manifest.read(checkpoint.path)
    if listed is not None:
        manifest.files_are_own(checkpoint.path, listed, listed.files)
        yield from (folder_at(checkpoint.path).where(name) for name in listed.files)


def _has_own_record(checkpoint: Checkpoint) -> bool:
    return checkpoint.kind is Kind.FILE or manifest.read(checkpoint.path) is not None
