"""What a rank, its supervisor and the hub tell each other.

A rank talks to its supervisor over a socket pair, a supervisor to the hub over TCP; the messages are the
same, for a supervisor passes on what it does not answer itself. MessagePack, each message behind its length.

A *member* is a rank for the whole of a call, by its initial rank; its *rank* may change with every iteration.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_FRAME_BYTES = 64 * 2**20
"""Of one message. A value of the hub's store may be as large."""
MAX_STRANGER_BYTES = 4096
"""Of a connection's first message, before its token is known."""
MAX_WHY = 500
"""Characters of a record's reason."""
_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


# --- from a member to the hub ---------------------------------------------------------------------------


class Join(Message, frozen=True):
    """First on a connection: who this is."""

    token: str
    member: int
    world_size: int
    """How many members there are."""


class Enter(Message, frozen=True):
    """The member begins an iteration."""

    iteration: int
    rank: int
    world_size: int
    """Ranks of the iteration, spares included."""


class Fault(Message, frozen=True):
    """Something is wrong with the member in this iteration; it stays if it can."""

    iteration: int
    kind: str
    """Name of an ``Interruption``."""
    why: str = ""


class Stuck(Message, frozen=True):
    """The member's main thread is blocked past its soft time-out, and nothing has unblocked it."""

    iteration: int


class Arrive(Message, frozen=True):
    """The member is ready for the next iteration."""

    iteration: int


class Complete(Message, frozen=True):
    """The member's function has returned, or it is a spare and another's has."""

    iteration: int


class Leave(Message, frozen=True):
    """The member takes part no more; it says nothing after that."""

    iteration: int
    kind: str = ""
    """Name of an ``Interruption``; empty: in good order."""
    why: str = ""


class Beat(Message, frozen=True):
    """The connection lives; the hub answers with the same."""


# --- from the hub to members ----------------------------------------------------------------------------


class Joined(Message, frozen=True):
    """All members are there."""


class Queued(Message, frozen=True):
    """The call has begun: the member takes part from the next iteration on that begins."""


class Record(Message, frozen=True):
    """What happened to one rank."""

    rank: int
    kind: str
    why: str = ""


class Interrupt(Message, frozen=True):
    """The iteration has failed: stop, clean up, arrive."""

    iteration: int
    records: tuple[Record, ...]
    """Those known by now."""


class OthersWait(Message, frozen=True):
    """All members have arrived but those that are stuck."""

    iteration: int


class Release(Message, frozen=True):
    """All have arrived: the next iteration can begin."""

    iteration: int
    """The one that is over."""
    terminated: tuple[int, ...]
    """Ranks that are no more."""
    records: tuple[Record, ...]
    joined: int = 0
    """How many take part from the next iteration on; numbered after all ranks of this one."""


class Admitted(Message, frozen=True):
    """To one of those: the release, and its own number."""

    rank: int
    world_size: int
    """With the terminated and all that have joined."""
    release: Release


class AnyCompleted(Message, frozen=True):
    """A member's function has returned."""

    iteration: int


class Done(Message, frozen=True):
    """All members have completed."""

    iteration: int


class Dismiss(Message, frozen=True):
    """The hub does not count on this member any more; the connection ends."""

    why: str


# --- between a rank and its own supervisor --------------------------------------------------------------


class Host(Message, frozen=True):
    """Run the hub; answered with :class:`Hosting`."""

    token: str
    world_size: int
    port: int = 0
    """0: any."""
    rejoin: bool = False
    """Members may join later in place of lost ones."""


class Hosting(Message, frozen=True):
    port: int


class Connect(Message, frozen=True):
    """Go to the hub at one of these addresses and join."""

    addresses: tuple[tuple[str, int], ...]
    join: Join


class HubLost(Message, frozen=True):
    """There is no hub any more."""

    why: str


class Goodbye(Message, frozen=True):
    """The rank needs its supervisor no more."""


# --- the hub's store ------------------------------------------------------------------------------------


class StoreJoin(Message, frozen=True):
    """First on a connection that is for the store."""

    token: str


class StoreRequest(Message, frozen=True):
    operation: str
    """set, get, add, append, compare_set, check, wait, delete, count or keys."""
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0


class StoreReply(Message, frozen=True):
    values: tuple[bytes, ...] = ()
    number: int = 0
    error: str = ""


MemberMessage = Enter | Fault | Arrive | Stuck | Complete | Leave | Beat
ToHub = Join | Enter | Fault | Arrive | Stuck | Complete | Leave | Beat | StoreJoin | StoreRequest
FromHub = (
    Joined | Queued | Admitted | Interrupt | OthersWait | Release | AnyCompleted | Done | Dismiss
    | Beat | StoreReply
)  # fmt: skip
ToSupervisor = Host | Connect | Enter | Fault | Arrive | Complete | Leave | Goodbye
FromSupervisor = (
    Hosting | HubLost | Joined | Queued | Admitted | Interrupt | OthersWait | Release | AnyCompleted
    | Done | Dismiss | Beat
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T")


class BadFrameError(ValueError):
    """The other side doesn't speak this protocol."""


def frame(message: Message) -> bytes:
    """Return ``message`` as it is sent.

    Raises:
        BadFrameError: it is larger than the other side takes.
    """
    body = _encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrameError(_too_large(len(body), MAX_FRAME_BYTES))
    return _LENGTH.pack(len(body)) + body


def _too_large(length: int, most: int) -> str:
    return f"a message of {length} bytes; {most} are accepted"


class FrameReader(Generic[_T]):
    """Cuts what arrives on a stream into messages of one union of types.

    Args:
        kinds: the union.
        most_bytes: of one message.
    """

    def __init__(self, kinds: Any, most_bytes: int = MAX_FRAME_BYTES) -> None:
        self.most_bytes = most_bytes
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[_T]:
        """Yield the messages that are whole with ``data``.

        Raises:
            BadFrameError: this is no message, or not of these types.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > self.most_bytes:
                    raise BadFrameError(_too_large(length, self.most_bytes))
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                try:
                    message: _T = self._decode(body)
                except (msgspec.DecodeError, RecursionError) as error:  # the second: nested too deep
                    raise BadFrameError(str(error)) from None
                yield message
        finally:
            del self._buffer[:start]
