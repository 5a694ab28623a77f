"""Read a journal: whole, or line by line while it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from nvrx_slurm.journal.events import JOURNAL_VERSION, AnyEvent, Event, Record


class JournalError(ValueError):
    """The journal cannot be used; the message says which file and line, and why."""


class JournalVersionError(JournalError):
    """The journal was written by a newer version of this package."""


# What a damaged line may hold and no clock or counter ever shows: readers then need not guard every sum.
_Time = Annotated[float, msgspec.Meta(ge=0, lt=2**37)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class _Envelope(msgspec.Struct, frozen=True):
    v: int
    ts: _Time
    job: str
    attempt: _Count
    cycle: _Count
    event: str


_envelopes = msgspec.json.Decoder(_Envelope)
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_known = frozenset(cls.__struct_config__.tag for cls in Event.__subclasses__())


def decode_line(line: bytes) -> Record | None:
    """Return the record of one line, or None for an event that this version does not know.

    Raises:
        JournalError: the line is not a journal line.
    """
    try:
        envelope = _envelopes.decode(line)
        if envelope.v > JOURNAL_VERSION:
            raise JournalVersionError(
                f"journal version {envelope.v} is newer than {JOURNAL_VERSION}: upgrade nvrx-slurm"
            )
        if envelope.event not in _known:
            return None
        event = _events.decode(line)
    except msgspec.DecodeError as error:
        raise JournalError(f"not a journal line: {error}") from error
    return Record(
        ts=envelope.ts, job=envelope.job, attempt=envelope.attempt, cycle=envelope.cycle, event=event
    )


class JournalFollower:
    """Reads the complete lines that were added since the last call.

    A line that a crash has torn is skipped and counted, for the file goes on after it; so is an event that
    this version does not know.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.torn = 0
        """Lines that are not whole."""
        self.unknown = 0
        """Events of a newer version."""

    def read(self) -> Iterator[Record]:
        """Yield new records.

        Raises:
            OSError: the file cannot be read.
            JournalVersionError: the journal was written by a newer version.
        """
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                try:
                    record = decode_line(line)
                except JournalVersionError:
                    raise
                except JournalError:
                    if line.strip():
                        self.torn += 1
                    continue
                if record is None:
                    self.unknown += 1
                else:
                    yield record


def iterate_journal(path: Path) -> Iterator[Record]:
    """Yield every record of a journal, which need not fit into memory.

    Raises:
        OSError: the file cannot be read.
        JournalVersionError: the journal was written by a newer version.
    """
    return JournalFollower(path).read()


def read_journal(path: Path) -> list[Record]:
    """Return every record of a journal; raises as :func:`iterate_journal` does."""
    return list(iterate_journal(path))
