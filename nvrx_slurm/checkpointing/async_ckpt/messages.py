"""What trainer and worker say to each other, over a socket pair that only the two of them have."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import msgspec

from nvrx_slurm.checkpointing.storage.image import ImageSpec

_LENGTH = struct.Struct("<Q")


class CallWorld(msgspec.Struct, frozen=True):
    """What a worker needs to import what a call mentions."""

    import_path: tuple[str, ...]
    main_path: str | None
    """The user's script, if the call mentions it."""


class Task(msgspec.Struct, frozen=True, tag=True):
    """Something for the worker to do with what lies in an arena, or will."""

    number: int
    arena: int
    """Its key; its descriptor comes with the message when the worker does not have it yet."""
    images: tuple[ImageSpec, ...]
    """Files to write; or the only one is a pickled call, with tensors in it, and …"""
    call: CallWorld | None = None
    """… this says where it finds its modules."""
    dropped: tuple[int, ...] = ()
    """Arenas that are not used any more."""


class Copied(msgspec.Struct, frozen=True, tag=True):
    """How far the snapshot of a task has come."""

    task: int
    up_to: int = 0
    """Everything in the arena before this offset is there."""
    is_whole: bool = False
    """Nothing more comes, and what is there counts; or …"""
    failure: str | None = None
    """… the snapshot has failed, and so has the task."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The trainer wants nothing more, and goes on without this worker; without this it has ended."""


class Result(msgspec.Struct, frozen=True):
    """What came of a task."""

    number: int
    error: str | None = None
    """One line, and the worker's traceback below it."""
    seconds: float = 0.0


def send(sock: socket.socket, message: msgspec.Struct, fd: int | None = None) -> None:
    """Send a message, and a file descriptor with it."""
    content = msgspec.json.encode(message)
    length = _LENGTH.pack(len(content))
    if fd is None:
        sock.sendall(length + content)  # one call: each gives the GIL away, and training has it next
    else:
        socket.send_fds(sock, [length], [fd])
        sock.sendall(content)


def receive(sock: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """Wait for a message of a class, or of several; return it with the descriptor that came along.

    Raises:
        EOFError: the other side is gone.
    """
    try:
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC | socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            raise EOFError
        content = _exactly(sock, _LENGTH.unpack(head)[0])
    except OSError:
        raise EOFError from None
    for fd in fds[1:]:
        os.close(fd)
    return msgspec.json.decode(content, type=kind), fds[0] if fds else None


def _exactly(sock: socket.socket, count: int) -> bytes:
    content = bytearray()
    while len(content) < count:
        part = sock.recv(min(count - len(content), 1 << 20))
        if not part:
            raise EOFError
        content += part
    return bytes(content)
