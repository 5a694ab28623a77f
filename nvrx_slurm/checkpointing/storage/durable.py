"""Files that appear under their name only when their content is on disk.

Content goes to a temporary name beside the final one, then fsync(2) of the file, rename(2), fsync of the
directory. While it is written the temporary file is locked (flock(2)), so that whoever cleans up can tell a
leftover of a killed writer from a file that is being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nvrx_slurm.checkpointing.storage.aligned_file import write_aligned
from nvrx_slurm.checkpointing.storage.objects import PendingObject, is_url, replacing_object

ALIGNMENT = 4096
"""Of memory, offsets and lengths in direct I/O, in bytes; every file system accepts it (open(2))."""

_MARK = ".nvrx-tmp-"


class PendingFile:
    """A file that is being written; see :func:`replacing`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        while True:
            self.temporary = path.with_name(f".{path.name}{_MARK}{secrets.token_hex(6)}")
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self.fd = os.open(self.temporary, flags, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks: then leftovers stay
                fcntl.flock(self.fd, fcntl.LOCK_EX)  # who looks for leftovers holds it for a moment
            if os.fstat(self.fd).st_nlink:
                break
            os.close(self.fd)  # removed as a leftover before it was locked

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(self.fd, rest) :]

    def write_aligned(
        self,
        chunks: Iterable[memoryview],
        size: int,
        *,
        at_once: int = 1,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """Write all of the file; see :func:`~.aligned_file.write_aligned`."""
        write_aligned(self.fd, chunks, size, at_once=at_once, pace=pace)


@contextlib.contextmanager
def replacing(path: Path | str, *, sync: bool = True) -> Iterator[PendingFile | PendingObject]:
    """Yield a file that takes the place of ``path``, durably, when the context ends without an exception.

    ``path`` may be a URL; then it is an object there, see :mod:`~.objects`.

    With an exception nothing is left, and what stood at ``path`` stays.

    Args:
        sync: False does without fsync: a crash of the whole machine may take the content, or the old file.

    Raises:
        OSError: the directory is missing or read-only, the disk is full, …
    """
    if is_url(path):
        with replacing_object(str(path)) as obj:
            yield obj
        return
    try:
        pending = PendingFile(_replaceable(Path(path)))
    except OSError as error:
        if _MARK in str(error.filename):
            error.filename = str(path)  # nobody has heard of the temporary name
        raise
    try:
        yield pending
        if sync:
            os.fsync(pending.fd)
        os.rename(pending.temporary, pending.path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(pending.temporary)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk, for instance: which one, the path tells
        raise
    finally:
        os.close(pending.fd)
    if sync:
        sync_directory(pending.path.parent)


def _replaceable(path: Path) -> Path:
    """Refuse at once a place where no file can appear, and never put one in the place of a device."""
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory, not a file", str(path))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a small file atomically and durably, for its owner only."""
    with replacing(path) as pending:
        pending.write(data)


def sync_directory(folder: Path) -> None:
    """Make names in ``folder`` durable (fsync(2) of a file does not)."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Let no other process be in this context with this directory, where its file system has locks.

    Raises:
        OSError: nothing can be written to the directory.
    """
    path = folder / f".commit{_MARK}lock"  # a leftover, if its owner is killed
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            break
        os.close(fd)  # its former owner has removed it
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(fd)


def make_directory(folder: Path | str) -> None:
    """Make a directory and what is missing above it, for its owner only, durably."""
    folder = Path(folder)
    missing = [folder, *folder.parents]
    missing = missing[: next(i for i, each in enumerate(missing) if each.exists())]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_directory(each.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def is_temporary(name: str) -> bool:
    """Whether a file name is one of an unfinished write."""
    return name.startswith(".") and _MARK in name


def leftovers(folder: Path | str) -> list[Path]:
    """Return the files in ``folder`` that a killed writer has left; those being written are none."""
    found = []
    for path in sorted(Path(folder).iterdir()):
        if is_temporary(path.name) and path.is_file() and not path.is_symlink():
            with _is_left(path) as is_left:
                if is_left:
                    found.append(path)
    return found


def remove_leftovers(folder: Path | str) -> list[Path]:
    """Remove what :func:`leftovers` returns; return what was removed."""
    removed = []
    for path in leftovers(folder):
        with _is_left(path) as is_left, contextlib.suppress(FileNotFoundError):
            if is_left:
                path.unlink()
                removed.append(path)
    return removed


@contextlib.contextmanager
def _is_left(path: Path) -> Iterator[bool]:
    """Yield whether nobody writes a file; meanwhile nobody can begin to."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield False  # gone by now, or not ours
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False  # locked, or no locks here: better a leftover than a lost checkpoint
        else:
            yield True
    finally:
        os.close(fd)
