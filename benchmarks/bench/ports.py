"""A port for a store of ranks on this machine."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Return one that nobody has, below those that the kernel gives to others' outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
