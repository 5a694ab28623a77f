"""What travels of a rank's times: from the rank to its agent, from there to the Coordinator, and back.

Names travel once; a period then has numbers only. Little is kept: :data:`MOST_SECTIONS` sections and
:data:`MOST_KERNELS` kernels of a rank and period, those in which it spends most time.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

import msgspec

MOST_SECTIONS = 64
MOST_KERNELS = 64
MOST_CHARACTERS = 200
"""Of a name; of a longer one the rest is a hash."""
_MOST_COUNT = 2**31
_LONGEST = 1e15
"""Milliseconds, or microseconds: what is made of a time must be a number, too."""
_Time = TypeVar("_Time", "SectionTime", "KernelSum")


class Name(msgspec.Struct, frozen=True, array_like=True):
    """Of a section, or of a kernel that is launched in it."""

    section: str
    kernel: str = ""
    """Empty: the section itself."""


class SectionTime(msgspec.Struct, frozen=True, array_like=True):
    """One section on one rank."""

    number: int
    """Of its name, by the order in which the sender's names were told."""
    median_ms: float
    passages: int
    individual: float | None
    """0 to 1: this rank's best period over this one; None: nobody wants to know."""


class KernelSum(msgspec.Struct, frozen=True, array_like=True):
    """One kernel on one rank."""

    number: int
    median_us: float
    total_us: float


class Period(msgspec.Struct, frozen=True, array_like=True):
    """What one rank measured since its last report."""

    iterations: int
    """0: they are not counted."""
    sections: list[SectionTime]
    kernels: list[KernelSum]
    gpu_individual: float | None = None
    gpu: str = ""
    """UUID."""
    gathers: bool = True
    """Rank 0 gets the scores of all ranks; otherwise each gets its own."""


class NodePeriod(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of one node measured, numbered by the node's names."""

    first: int
    """The number of the first of :attr:`names`."""
    names: list[Name]
    """Those that were not told before."""
    ranks: dict[int, Period]
    context: dict[int, list[str]]
    """By rank: what the hardware says of itself, a line each."""


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """What a rank is told of a report: a column of each rank, NaN where there is nothing to compare."""

    report: int
    """How many there have been in this cycle, this one among them."""
    ranks: list[int]
    nodes: list[str]
    sections: list[str]
    relative: list[list[float]]
    """By section."""
    individual: list[list[float]]
    medians_ms: list[list[float]]
    gpu_relative: list[float]
    gpu_individual: list[float]


def is_name(name: Name) -> bool:
    """Tell whether it can be passed on and shown."""
    return all(
        len(text) <= MOST_CHARACTERS and text.isprintable() for text in (name.section, name.kernel)
    ) and bool(name.section or name.kernel)


def printable(text: str) -> str:
    """Return ``text`` as :func:`is_name` accepts it.

    What must be changed for that ends in a hash: names of kernels are long, and many begin alike.
    """
    if len(text) <= MOST_CHARACTERS and text.isprintable():
        return text
    digest = f"~{sha256(text.encode(errors='surrogatepass')).hexdigest()[:12]}"
    shown = "".join(char if char.isprintable() else "?" for char in text[: MOST_CHARACTERS - len(digest)])
    return shown + digest


def is_period(period: Period) -> bool:
    """Tell whether its values can be true."""
    return (
        len(period.sections) <= MOST_SECTIONS
        and len(period.kernels) <= MOST_KERNELS
        and 0 <= period.iterations < _MOST_COUNT
        and len(period.gpu) <= MOST_CHARACTERS
        and period.gpu.isprintable()
        and all(
            time.number >= 0
            and 0 < time.passages < _MOST_COUNT
            and _are_times(time.median_ms)
            and _is_score(time.individual)
            for time in period.sections
        )
        and all(time.number >= 0 and _are_times(time.median_us, time.total_us) for time in period.kernels)
        and _is_score(period.gpu_individual)
    )


def _are_times(*values: float) -> bool:
    return all(0 <= value <= _LONGEST for value in values)


def _is_score(value: float | None) -> bool:
    return value is None or 0 <= value <= 1


def renumbered(period: Period, numbers: Sequence[int]) -> Period:
    """Return ``period`` with other numbers for its names; what has none, or one below 0, is left out."""
    return msgspec.structs.replace(
        period,
        sections=_renumbered(period.sections, numbers),
        kernels=_renumbered(period.kernels, numbers),
    )


def _renumbered(times: Sequence[_Time], numbers: Sequence[int]) -> list[_Time]:
    known = len(numbers)
    return [
        msgspec.structs.replace(time, number=numbers[time.number])
        for time in times
        if time.number < known and numbers[time.number] >= 0
    ]
