"""The hub on the network: connections of members and of the store, and who has fallen silent."""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import time
from functools import partial

from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.hub import Hub
from nvrx_slurm.supervisor.hub_store import HubStore
from nvrx_slurm.supervisor.stream import Stream

_BACKLOG = 65535


class HubServer:
    """Serves one call of a wrapped function.

    Args:
        selector: of the loop.
        host: what the members say: token, number, and where to listen.
        silence_s: a member that is not heard of for so long is lost.

    Raises:
        OSError: can't listen there.
    """

    def __init__(self, selector: selectors.BaseSelector, host: msg.Host, silence_s: float) -> None:
        self._selector = selector
        self._token = host.token
        self._silence_s = silence_s
        self._hub = Hub(host.world_size, self._tell, host.rejoin)
        self._store = HubStore()
        self._members: dict[int, Stream] = {}
        self._heard: dict[int, float] = {}
        self._streams: set[Stream] = set()
        self._strangers: dict[Stream, float] = {}
        """Connections that have not said yet what they are for, and when they came, the oldest first."""
        self._checked = time.monotonic()
        self._listener = _listen(host.port)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def is_needed(self) -> bool:
        """Whether a member is still there, beside the rank that it was made for."""
        return self._hub.members > 0 or any(s.has_unsent for s in self._streams)

    def check_silence(self) -> float:
        """Lose the members that are not heard of; return when to look again (time.monotonic())."""
        now = time.monotonic()
        # Time in which this process itself stood still counts for nobody.
        stood_still = max(0.0, now - self._checked - self._silence_s / 2)
        self._checked = now
        for member, heard in list(self._heard.items()):
            if stood_still:
                self._heard[member] = heard + stood_still
            elif now - heard > self._silence_s:
                self._lose(member, "UNRESPONSIVE", f"nothing was heard of it for {self._silence_s:g} s")
        for stream, came in list(self._strangers.items()):
            if stood_still:
                self._strangers[stream] = came + stood_still
            elif now - came > self._silence_s:
                self._drop(stream)
        return now + self._silence_s / 4

    def close(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        for stream in list(self._streams):
            stream.close()
        self._streams.clear()

    # --- connections -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._strangers:
                    return
                # Somebody floods us; the listener would be ready for ever. Members say at once who they are.
                self._drop(next(iter(self._strangers)))
                continue
            stream = Stream(
                self._selector, connection, msg.ToHub, lambda message: None, lambda why: None,
                msg.MAX_STRANGER_BYTES,
            )  # fmt: skip
            self._strangers[stream] = time.monotonic()
            stream.on_message = partial(self._first, stream)
            stream.on_closed = partial(self._forget, stream)
            self._streams.add(stream)

    def _forget(self, stream: Stream, why: str) -> None:
        self._streams.discard(stream)
        self._strangers.pop(stream, None)

    def _first(self, stream: Stream, message: msg.ToHub) -> None:
        """Take a connection's first message, which says what it is for."""
        self._strangers.pop(stream, None)
        if isinstance(message, (msg.Join, msg.StoreJoin)) and hmac.compare_digest(
            message.token.encode(), self._token.encode()
        ):
            stream.trust()
            if isinstance(message, msg.Join):
                self._join(stream, message)
            else:
                self._open_store(stream)
            return
        self._drop(stream)

    def _drop(self, stream: Stream) -> None:
        stream.close()
        self._forget(stream, "")

    def _open_store(self, stream: Stream) -> None:
        stream.on_message = partial(self._store_request, stream)
        stream.on_closed = partial(self._store_closed, stream)

    def _store_closed(self, stream: Stream, why: str) -> None:
        self._store.forget(stream)
        self._streams.discard(stream)

    def _store_request(self, stream: Stream, message: msg.ToHub) -> None:
        if isinstance(message, msg.StoreRequest):
            try:
                self._store.handle(message, stream.send, stream)
            except (IndexError, ValueError) as error:
                # The hub outlives whatever one rank asks for.
                stream.send(msg.StoreReply(error=f"{message.operation}: {error}"))
        else:
            self._drop(stream)

    def _join(self, stream: Stream, join: msg.Join) -> None:
        if refusal := self._hub.refusal(join):
            stream.send(msg.Dismiss(refusal))
            stream.on_message = lambda message: None
            return
        member = self._hub.number(join.member)
        stream.on_message = partial(self._member_said, member)
        stream.on_closed = partial(self._member_gone, member, stream)
        self._members[member] = stream
        self._heard[member] = time.monotonic()
        self._hub.join(member, join.member)

    def _member_said(self, member: int, message: msg.ToHub) -> None:
        self._heard[member] = time.monotonic()
        if isinstance(message, (msg.Join, msg.StoreJoin, msg.StoreRequest)):
            return
        self._hub.handle(member, message)
        if isinstance(message, msg.Leave):
            self._heard.pop(member, None)

    def _member_gone(self, member: int, stream: Stream, why: str) -> None:
        self._streams.discard(stream)
        self._lose(member, "TERMINATED", f"its supervisor is gone: {why}")

    def _lose(self, member: int, kind: str, why: str) -> None:
        self._heard.pop(member, None)
        stream = self._members.pop(member, None)
        if stream is not None and stream.is_open:
            stream.send(msg.Dismiss(why))
            self._drop(stream)
        self._hub.lose(member, kind, why)

    def _tell(self, member: int, message: msg.Message) -> None:
        stream = self._members.get(member)
        if stream is not None:
            stream.send(message)


def _listen(port: int) -> socket.socket:
    try:
        listener = socket.create_server(
            ("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except (OSError, ValueError):
        # No IPv6 on this machine.
        listener = socket.create_server(("", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
