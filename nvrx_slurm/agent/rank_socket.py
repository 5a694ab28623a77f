"""The Unix socket on which this node's ranks report; see :mod:`nvrx_slurm.wire.rank_channel`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec

from nvrx_slurm.wire.rank_channel import MAX_REQUEST_BYTES, RankRequest, decode_request

_log = logging.getLogger(__name__)
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


class RankSocket:
    """Listens at ``path`` and hands every request of this user's processes to ``on_request``."""

    def __init__(self, path: Path, on_request: Callable[[RankRequest], None]) -> None:
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        # The directory is 0700 already; the mode of the socket itself is the second lock.
        self._listener.bind(str(path))
        os.chmod(path, 0o600)
        self._listener.listen(1024)
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        _, uid, _ = _UCRED.unpack(credentials)
        if uid != os.geteuid():
            _log.warning("refused a connection of uid %d to the ranks' socket", uid)
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._readable, connection)

    def _readable(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            try:
                request = decode_request.decode(data)
            except msgspec.DecodeError as error:
                _log.warning("a rank sent something that is no request: %s", error)
                return
            self._on_request(request)
            return
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()

    def close(self) -> None:
        for opened in (self._listener, *self._connections):
            self._loop.remove_reader(opened)
            opened.close()
        self._connections.clear()
