"""Which rank ended an iteration, and how: the records that ranks leave, and their words for people."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

_SHOWN = 8
"""Ranks of a set that are all written out; of larger ones half of these at each end."""


class Interruption(enum.Enum):
    """Why an iteration ended."""

    EXCEPTION = enum.auto()
    """The function raised an exception."""
    BASE_EXCEPTION = enum.auto()
    """This rank leaves: ``SystemExit``, ``KeyboardInterrupt``, a failed health check …"""
    SOFT_TIMEOUT = enum.auto()
    """No progress; the function is interrupted."""
    HARD_TIMEOUT = enum.auto()
    """No progress; the process is killed."""
    TERMINATED = enum.auto()
    """The process has ended."""
    UNRESPONSIVE = enum.auto()
    """Nothing has been heard from the process or its node."""
    MONITOR_PROCESS_EXCEPTION = enum.auto()
    """What watches the process has failed."""


_RECORD = re.compile(r"InterruptionRecord\(rank=(\d+), interruption=Interruption\.(\w+)\);")


@dataclass(frozen=True)
class InterruptionRecord:
    """One rank's reason to end an iteration; as a text it can be appended to others."""

    rank: int
    """In the numbering of that iteration."""
    interruption: Interruption

    def __str__(self) -> str:
        return f"InterruptionRecord(rank={self.rank}, interruption=Interruption.{self.interruption.name});"

    @classmethod
    def from_str(cls, text: str) -> list[InterruptionRecord]:
        """Return all records of a text, in its order.

        Raises:
            ValueError: it holds something else, too.
        """
        records, end = [], 0
        for found in _RECORD.finditer(text):
            if found.start() != end or found[2] not in Interruption.__members__:
                break
            records.append(cls(int(found[1]), Interruption[found[2]]))
            end = found.end()
        if end != len(text):
            raise ValueError(f"holds no interruption record at character {end}: {text[end : end + 60]!r}")
        return records


def format_interruption_records(records: Iterable[InterruptionRecord]) -> str:
    """Return ``Interruption.TERMINATED affecting ranks {3, 5}``, one clause for each kind, comma between."""
    by_kind: dict[Interruption, set[int]] = {}
    for record in records:
        by_kind.setdefault(record.interruption, set()).add(record.rank)
    return ", ".join(f"{kind} affecting ranks {format_ranks(ranks)}" for kind, ranks in by_kind.items())


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ``{1, 2, 5}``; of more than 8 ranks the first and last 4, and how many they are."""
    ordered = sorted(set(ranks))
    if len(ordered) <= _SHOWN:
        return "{" + ", ".join(map(str, ordered)) + "}"
    half = _SHOWN // 2
    first, last = (", ".join(map(str, part)) for part in (ordered[:half], ordered[-half:]))
    return f"{{{first} ... {last}}} (total: {len(ordered)})"
