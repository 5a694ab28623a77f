"""The socket on which a rank tells its agent the rare things, under nvrx-srun and nvrx-launch."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.wire.flight_recorder import short_address
from nvrx_slurm.wire.rank_channel import MAX_DESCRIPTION, SOCKET_VARIABLE


def connect(environ: Mapping[str, str] = os.environ) -> socket.socket:
    """Return the socket that the environment names.

    Raises:
        KeyError: it names none.
        OSError: nobody listens there.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        with short_address(Path(environ[SOCKET_VARIABLE])) as address:
            channel.connect(address)
    except BaseException:
        channel.close()
        raise
    return channel


def one_line(text: object) -> str:
    """Return ``text`` as the journal takes it: printable, in one line, not too long."""
    words = " ".join(str(text).split())[:MAX_DESCRIPTION]
    return "".join(char if char.isprintable() else "?" for char in words)
