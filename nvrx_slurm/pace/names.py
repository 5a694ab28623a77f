"""Names that are told once, and numbers for them afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvrx_slurm.pace.exchange import Name

MOST_NAMES = 16_384
"""Of one sender: kernels of ever new shapes must not fill its agent's memory."""


class ToldNames:
    """A sender's side: which number a name has, and which names are still to be told."""

    def __init__(self) -> None:
        self._numbers: dict[Name, int] = {}
        self._told = 0

    def number(self, name: Name) -> int | None:
        """Return its number, a new one if need be; None: there are too many names."""
        known = self._numbers.get(name)
        if known is None and len(self._numbers) < MOST_NAMES:
            known = self._numbers[name] = len(self._numbers)
        return known

    @property
    def untold(self) -> tuple[int, list[Name]]:
        """The number of the first name to be told, and all from there."""
        return self._told, list(self._numbers)[self._told :]

    def told(self, count: int) -> None:
        """Note that the next ``count`` names are with the receiver."""
        self._told += count


class HeardNames:
    """The receiver's side."""

    def __init__(self) -> None:
        self._names: list[Name] = []

    def take(self, first: int, names: Sequence[Name]) -> bool:
        """Add names, the first of which has the number ``first``; False: some are missing before it.

        Numbers that are told again begin anew: the sender is another one.
        """
        if not 0 <= first <= len(self._names) or first + len(names) > MOST_NAMES:
            return False
        if first < len(self._names):
            # Whoever has the old list goes on with it.
            self._names = self._names[:first]
        self._names.extend(names)
        return True

    @property
    def names(self) -> Sequence[Name]:
        """By number; what stands there does not change, more is added."""
        return self._names


def numbers_of(names: Iterable[Name], told: ToldNames) -> list[int]:
    """Return the numbers that ``names`` have with another sender; -1: there are too many."""
    return [-1 if (number := told.number(name)) is None else number for name in names]
