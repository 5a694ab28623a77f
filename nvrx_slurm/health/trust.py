"""What root may obey, run and believe: only what nobody else can change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_untrusted(status: os.stat_result) -> str:
    """Return why root must not obey a file; empty if it may."""
    if status.st_uid != 0:
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return "others than its owner can write it"
    return ""


def why_untrusted_directory(directory: Path) -> str:
    """Return why others may exchange the files of this user in a directory; empty if they can't.

    Raises:
        OSError: it can't be looked at.
    """
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    # In a sticky one, as /tmp, nobody exchanges the files of others.
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        return "others than its owner can write it"
    return ""
