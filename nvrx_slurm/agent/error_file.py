"""What a rank says of its own end: the file that torch's ``record`` writes (torch.distributed.elastic)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

_MAX_BYTES = 1024 * 1024
_MAX_TEXT = 500


class _Message(msgspec.Struct):
    message: str


class _Error(msgspec.Struct):
    """``ErrorHandler`` writes a message with the traceback; older ones, and other writers, only a text."""

    message: _Message | str


_decode = msgspec.json.Decoder(_Error).decode


def error_path(page: Path) -> Path:
    """Return where the rank with that heartbeat page writes it."""
    return page.with_suffix(".error.json")


def read_error(path: Path) -> str:
    """Return the error as one line, empty if the rank has left none that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        try:
            said = _decode(file.read(_MAX_BYTES)).message
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ""
    text = said if isinstance(said, str) else said.message
    return " ".join(text.split())[:_MAX_TEXT]
