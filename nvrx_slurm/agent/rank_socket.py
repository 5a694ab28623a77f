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

from nvrx_slurm.wire.flight_recorder import short_address
from nvrx_slurm.wire.rank_channel import MAX_REQUEST_BYTES, RankRequest, decode_request, is_acceptable

_log = logging.getLogger(__name__)
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


_MAX_CONNECTIONS = 512
"""A rank has one; more would take the descriptors that the agent needs."""


class RankSocket:
    """Listens at ``path`` and hands every request of this user's processes to ``on_request``.

    A connection on which something else comes is closed.
    """

    def __init__(self, path: Path, on_request: Callable[[RankRequest], None]) -> None:
        self.path = path
        self._on_request = on_request
        self._loop = asyncio.get_running_loop()
        self._connections: set[socket.socket] = set()
        self._warned_of_requests = False
        self._warned_of_values = False
        self._warned_of_number = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        # The directory is 0700 already; the mode of the socket itself is the second lock.
        try:
            path.unlink(missing_ok=True)
            with short_address(path) as address:
                self._listener.bind(address)
            os.chmod(path, 0o600)
            self._listener.listen(1024)
            self._inode = path.lstat().st_ino
        except OSError as error:
            self._listener.close()
            raise OSError(error.errno or 0, error.strerror or str(error), str(path)) from error
        self._loop.add_reader(self._listener, self._accept)

    @property
    def is_there(self) -> bool:
        """Whether ranks find it at its path."""
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= _MAX_CONNECTIONS:
            if not self._warned_of_number:
                self._warned_of_number = True
                _log.warning("refused a connection to the ranks' socket: it has %d", _MAX_CONNECTIONS)
            connection.close()
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
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                if not self._warned_of_requests:
                    self._warned_of_requests = True
                    _log.warning("a rank sent what is no request, its connection is closed: %s", error)
            else:
                self._take(request)
                return
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        connection.close()

    def _take(self, request: RankRequest) -> None:
        if is_acceptable(request):
            self._on_request(request)
        elif not self._warned_of_values:
            self._warned_of_values = True
            _log.warning(
                "dropped what rank %d reported, a value is out of range: %.200r", request.rank, request
            )

    def close(self) -> None:
        for opened in (self._listener, *self._connections):
            self._loop.remove_reader(opened)
            opened.close()
        self._connections.clear()
