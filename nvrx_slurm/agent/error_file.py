"""What a rank says of its own end: the file that torch's ``record`` writes (torch.distributed.elastic)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nvrx_slurm.regular_file import open_regular

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
        with open(open_regular(path), "rb") as file:
            said = _decode(file.read(_MAX_BYTES)).message
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    text = said if isinstance(said, str) else said.message
    line = " ".join(text.split())[:_MAX_TEXT]
    # It goes to terminals, which would take what a rank makes of it for commands.
    return "".join(char if char.isprintable() else "\ufffd" for char in line)
