"""Output on its way to the Coordinator: some in memory, more in a file on local disk, in order, in bounds.

While the Coordinator or the shared file system can't keep up, ranks go on until all of it is full; then they
wait in write(2), and nothing is lost. The file has no name (open(2), O_TMPFILE): nobody else can open it, and
nothing is left of it when the agent ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import tempfile
from collections import deque
from pathlib import Path

import msgspec

from nvrx_slurm.wire.messages import LogMessage

_log = logging.getLogger(__name__)

MEMORY_MESSAGES = 256
"""Of at most 64 KiB: 16 MiB a node."""
STAGED_BYTES = 1024 * 1024 * 1024

_LENGTH = struct.Struct("I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(LogMessage).decode


class StagedQueue:
    """First in, first out: what is in memory, then what is in the file, then what had no room in either."""

    def __init__(self, place: Path | None, staged_bytes: int = STAGED_BYTES) -> None:
        """``place``: a directory of this user alone, on local disk; None: memory only."""
        self._file = None if place is None else _StagingFile(place, staged_bytes)
        self._memory: deque[LogMessage] = deque()
        self._overflow: deque[LogMessage] = deque()
        self._arrived = asyncio.Event()
        self._finished = False

    @property
    def is_full(self) -> bool:
        """Nothing more should be put in until there is room."""
        return bool(self._overflow)

    @property
    def has_room(self) -> bool:
        """Much has been taken out since it was full."""
        return not self._overflow and len(self._memory) < MEMORY_MESSAGES // 2

    def put(self, message: LogMessage) -> None:
        """Take ``message``, even when full."""
        staged = self._file is not None and not self._file.is_empty
        if not self._overflow and not staged and len(self._memory) < MEMORY_MESSAGES:
            self._memory.append(message)
        elif self._overflow or self._file is None or not self._file.append(_encode(message)):
            self._overflow.append(message)
        self._arrived.set()

    def finish(self) -> None:
        """Nothing more comes."""
        self._finished = True
        self._arrived.set()

    async def get(self) -> LogMessage | None:
        """Return the oldest message as soon as there is one; None after the last."""
        while True:
            if self._memory:
                return self._memory.popleft()
            if self._file is not None and not self._file.is_empty:
                return _decode(self._file.take())
            if self._overflow:
                self._memory, self._overflow = self._overflow, self._memory
            elif self._finished:
                return None
            else:
                self._arrived.clear()
                await self._arrived.wait()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _StagingFile:
    """Records one after the other; empty again when the last has been taken."""

    def __init__(self, place: Path, max_bytes: int) -> None:
        self._place = place
        self._max_bytes = max_bytes
        self._fd: int | None = None
        self._taken = 0
        self._end = 0
        self._complained = False

    @property
    def is_empty(self) -> bool:
        return self._taken == self._end

    def append(self, record: bytes) -> bool:
        """Append ``record`` if there is room."""
        framed = _LENGTH.pack(len(record)) + record
        if self._end + len(framed) > self._max_bytes:
            return False
        try:
            if self._fd is None:
                self._fd = _open_unnamed(self._place)
            # What a write that failed has left is written over by the next.
            if os.pwrite(self._fd, framed, self._end) < len(framed):
                return False
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("output cannot be staged in %s: %s", self._place, error)
            return False
        self._end += len(framed)
        return True

    def take(self) -> bytes:
        """Return the oldest record."""
        assert self._fd is not None
        (length,) = _LENGTH.unpack(os.pread(self._fd, _LENGTH.size, self._taken))
        record = os.pread(self._fd, length, self._taken + _LENGTH.size)
        self._taken += _LENGTH.size + length
        if self.is_empty:
            os.ftruncate(self._fd, 0)
            self._taken = self._end = 0
        return record

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _open_unnamed(place: Path) -> int:
    with contextlib.suppress(OSError):
        return os.open(place, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # A file system that does not know unnamed files: it has a name for a moment.
    fd, name = tempfile.mkstemp(dir=place)
    os.unlink(name)
    return fd
