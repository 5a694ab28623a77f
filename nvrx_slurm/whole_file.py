"""Write a file so that a reader sees the old one or the new one, whole, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def temporary_file(target: Path, data: bytes = b"") -> Iterator[Path]:
    """Write a file beside ``target``, mode 0600, that is gone afterwards unless it was renamed.

    Raises:
        OSError: the directory can't be written.
    """
    with _draft(target) as (path, file):
        with file:
            _finish(file, data)
        yield path


@contextlib.contextmanager
def replacing(target: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of ``target`` when the context ends without an exception.

    Raises:
        OSError: the directory can't be written.
    """
    with _draft(target) as (path, file):
        with file:
            yield file
            os.fchmod(file.fileno(), mode)
            _finish(file, b"")
        os.replace(path, target)


def replace_file(target: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write ``target`` anew.

    Raises:
        OSError: the directory can't be written.
    """
    with replacing(target, mode=mode) as file:
        file.write(data)


def replace_link(link: Path, target: Path) -> None:
    """Turn the symbolic link ``link`` to ``target``.

    Raises:
        OSError: the directory can't be written.
    """
    with _free_name(link) as path:
        path.symlink_to(target)
        os.replace(path, link)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[tuple[Path, BinaryIO]]:
    with _free_name(target) as path:
        # Exclusive: what another user puts here in the meantime is neither followed nor written to.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        yield path, os.fdopen(fd, "wb")


@contextlib.contextmanager
def _free_name(target: Path) -> Iterator[Path]:
    # The same name each time, so that killed writers don't leave more and more; no other thread has it.
    path = target.with_name(f".{target.name}.{os.uname().nodename}.{threading.get_native_id()}")
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _finish(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
