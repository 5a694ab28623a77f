"""Open a file where somebody may have put something else: a directory, a link, a FIFO that nobody writes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, *, follow_link: bool = False) -> int:
    """Open a regular file for reading; nothing that is there instead makes the caller wait.

    Raises:
        OSError: it can't be opened, is no regular file, or without ``follow_link`` is a link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink() and not follow_link:
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd
