"""The kernel's log, ``/dev/kmsg`` (Documentation/ABI/testing/dev-kmsg of the kernel).

A record is ``prefix,sequence,microseconds since boot,flags[,…];text``. Only the kernel's own are looked at:
what programs write there has another facility, which the kernel sets.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.health.unavailable import UnavailableError

_KMSG = "/dev/kmsg"
_RECORD_BYTES = 8192
_MOST_RECORDS = 200_000


@dataclass(frozen=True)
class KernelRecord:
    """One message of the kernel."""

    sequence: int
    seconds: float
    """Since boot."""
    text: str


class KernelLog(Protocol):
    def records(self) -> Sequence[KernelRecord]:
        """Return what the ring still holds, oldest first.

        Raises:
            UnavailableError: it can't be read: no such device, or ``kernel.dmesg_restrict`` forbids it.
        """
        ...


@dataclass(frozen=True)
class KernelLogFile:
    path: str = _KMSG

    def records(self) -> Sequence[KernelRecord]:
        """See :meth:`KernelLog.records`."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"cannot be read: {error.strerror}", self.path) from error
        try:
            return parse(_chunks(descriptor, self.path))
        finally:
            os.close(descriptor)


def _chunks(descriptor: int, path: str) -> Iterable[bytes]:
    for _ in range(_MOST_RECORDS):
        try:
            chunk = os.read(descriptor, _RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EPIPE:
                # Overwritten while we read: the next read goes on behind the gap.
                continue
            raise UnavailableError(f"cannot be read: {error.strerror}", path) from error
        if not chunk:
            return
        yield chunk


def parse(chunks: Iterable[bytes]) -> list[KernelRecord]:
    """Return the kernel's own records; what is no record is left out."""
    # One read gives one record from the device, any number of bytes from a recording of it.
    lines = b"".join(chunks).decode(errors="replace").split("\n")
    return [record for record in map(_record, lines) if record is not None]


def _record(line: str) -> KernelRecord | None:
    head, semicolon, text = line.partition(";")
    fields = head.split(",")
    if not semicolon or len(fields) < 3 or not all(f.isascii() and f.isdigit() for f in fields[:3]):
        return None
    if any(len(f) > 20 for f in fields[:3]) or int(fields[0]) >> 3 != 0:
        return None
    return KernelRecord(int(fields[1]), int(fields[2]) / 1e6, text)
