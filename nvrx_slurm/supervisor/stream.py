"""Streams of messages on one event loop; nothing here waits."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from nvrx_slurm.supervisor.messages import MAX_FRAME_BYTES, BadFrameError, FrameReader, Message, frame

_READ_BYTES = 256 * 1024
MAX_UNSENT_BYTES = 256 * 2**20
"""Of one connection; whoever does not read so much is given up."""


class Stream:
    """One connected socket on a selector.

    Args:
        selector: of the loop; its keys' data is called without arguments when there is something to do.
        connection: connected; belongs to the stream from here on.
        kinds: union of the messages that may come.
        on_message: called with each.
        on_closed: called once, with why, when the other side is gone or speaks something else.
        most_bytes: of one message that comes; see :meth:`trust`.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        connection: socket.socket,
        kinds: Any,
        on_message: Callable[[Any], None],
        on_closed: Callable[[str], None],
        most_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        connection.setblocking(False)
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector = selector
        self._socket = connection
        self._reader: FrameReader[Any] = FrameReader(kinds, most_bytes)
        self.on_message = on_message
        self.on_closed = on_closed
        self._unsent = bytearray()
        self.is_open = True
        selector.register(connection, selectors.EVENT_READ, self._ready)

    def send(self, message: Message) -> None:
        """Send ``message``, at once as far as the other side takes it."""
        if not self.is_open:
            return
        data = frame(message)
        if not self._unsent:
            try:
                data = data[self._socket.send(data) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                # The read side reports it, with what is still to be read before.
                return
        if data:
            self._unsent += data
            self._watch()

    @property
    def has_unsent(self) -> bool:
        return self.is_open and bool(self._unsent)

    def trust(self) -> None:
        """Take messages of any size that is allowed at all."""
        self._reader.most_bytes = MAX_FRAME_BYTES

    def close(self) -> None:
        """Close; nobody is told."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._socket)
            self._socket.close()

    def _watch(self) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._socket, events, self._ready)

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        if self.is_open:
            self._read()

    def _flush(self) -> None:
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._end("it does not read what it is sent")
            return
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The read side reports it.
            self._unsent.clear()
        self._watch()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if not data:
            self._end("the connection was closed")
            return
        try:
            for message in self._reader.feed(data):
                self.on_message(message)
                if not self.is_open:
                    return
        except BadFrameError as error:
            self._end(f"it does not speak this protocol: {error}")

    def _end(self, why: str) -> None:
        if self.is_open:
            self.close()
            self.on_closed(why)
