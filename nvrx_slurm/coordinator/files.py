"""Write a file of the run directory so that a reader sees the old one or the new one, whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_file(target: Path, data: bytes) -> Iterator[Path]:
    """Write a file beside ``target``, mode 0600, that is gone afterwards unless it was renamed.

    Raises:
        OSError: the directory can't be written.
    """
    path = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
        yield path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def replace_file(target: Path, data: bytes) -> None:
    """Write ``target`` anew, mode 0600.

    Raises:
        OSError: the directory can't be written.
    """
    with temporary_file(target, data) as path:
        os.replace(path, target)
