"""Open a log, which may be a file or a pipe, where something else may stand that would never end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_log(path: Path, *, follow_link: bool = True) -> BinaryIO:
    """Open a log for reading: a regular file, or a pipe, as a shell makes it of ``<(zcat job.log.gz)``.

    A pipe that nobody writes to is empty; nothing waits for a writer.

    Raises:
        OSError: it cannot be read, is neither, or without ``follow_link`` is a link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    fd = os.open(path, flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        os.set_blocking(fd, True)
    elif not stat.S_ISREG(mode):
        os.close(fd)
        raise _not_a_log(mode, path)
    return os.fdopen(fd, "rb")


_OTHER_FORMATS = {
    b"\x1f\x8b": ("compressed", "zcat"),
    b"\x28\xb5\x2f\xfd": ("compressed", "zstdcat"),
    b"\xfd7zXZ": ("compressed", "xzcat"),
    b"BZh": ("compressed", "bzcat"),
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
}
"""By their first bytes: what it is, and what makes text of it."""


def check_log(path: Path) -> None:
    """See that a log can be read as it is; a pipe is left alone, since its writer would lose its reader.

    Raises:
        OSError: as :func:`open_log`, or it is compressed or UTF-16.
    """
    if stat.S_ISFIFO(path.stat().st_mode):
        return
    with open_log(path) as file:
        begin = file.read(8)
    for magic, (what, command) in _OTHER_FORMATS.items():
        if begin.startswith(magic):
            raise OSError(errno.EINVAL, f"it is {what}: give it as <({command} {path})", str(path))


def _not_a_log(mode: int, path: Path) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, "neither a file nor a pipe", str(path))
