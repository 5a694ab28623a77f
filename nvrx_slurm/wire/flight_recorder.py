"""How an agent gets the Flight Recorder of a rank: torch's own server there, on a socket near its page.

The server is C++ and needs no GIL, so a rank that hangs in Python, or in C with the GIL held, answers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def trace_socket_path(page: Path) -> Path:
    """Return the socket beside a rank's heartbeat page."""
    return page.with_suffix(".torch")


@contextlib.contextmanager
def short_address(socket: Path) -> Iterator[str]:
    """Yield an address of at most 107 bytes (unix(7)), however long the path is.

    Raises:
        OSError: its directory can't be opened.
    """
    folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{socket.name}"
    finally:
        os.close(folder)
