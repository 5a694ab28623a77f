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


def check_log(path: Path) -> None:
    """See that a log can be opened; a pipe is left as it is, since its writer would lose its reader.

    Raises:
        OSError: as :func:`open_log`.
    """
    mode = path.stat().st_mode
    if not stat.S_ISFIFO(mode):
        open_log(path).close()


def _not_a_log(mode: int, path: Path) -> OSError:
    if stat.S_ISDIR(mode):
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, "neither a file nor a pipe", str(path))
