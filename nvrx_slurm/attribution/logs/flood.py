"""Many lines that differ from each other in numbers alone: all are counted, few are looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvrx_slurm.attribution.logs.finding import Finding

DIGITS_DECIDE = re.compile(
    rb"xid|status|exit|errno|signal|code|http|completion|returned|error \(|error-?\s*\W? ?$"
)
"""In a skeleton: the numbers that were taken out may decide what the line is."""
_DECISIVE = re.compile(
    rb"(?:(?:status|exit|errno|signal|code|http|error|completion|returned)\D{0,24}"
    rb"|xid \([^)]{0,40}\)\D{0,3}|xid\D{0,16})(\d{1,6})",
    re.I,
)
_NUMBER = re.compile(rb"([0-9]+)")
_DECIDING, _ANY_NUMBER = rb"([0-9]{1,6})[0-9]*", rb"[0-9]+"
_MAX_LAYOUTS = 40_000
_MAX_SIGNATURES = 256
_LOOK = 64
_LONG = 256


class Signatures:
    """The numbers of a line that may decide what it is.

    Which of a line's numbers those are follows from what stands between them, and is looked for once.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, ...], tuple[int, ...]] = {}

    def of(self, raw: bytes) -> tuple[bytes, ...]:
        """Return the first six digits of at most four numbers."""
        parts = _NUMBER.split(raw)
        return tuple([parts[place][:6] for place in self._places_in(parts, raw)])

    def layout(self, raw: bytes) -> re.Pattern[bytes]:
        """Return what matches lines that differ from this one in numbers alone; its groups are :meth:`of`."""
        parts = _NUMBER.split(raw)
        places = self._places_in(parts, raw)
        return re.compile(
            b"".join(
                re.escape(part) if at % 2 == 0 else _DECIDING if at in places else _ANY_NUMBER
                for at, part in enumerate(parts)
            )
        )

    def _places_in(self, parts: list[bytes], raw: bytes) -> tuple[int, ...]:
        between = tuple(parts[::2])
        places = self._places.get(between)
        if places is None:
            if len(self._places) >= _MAX_LAYOUTS:
                self._places.clear()
            places = self._places[between] = self._find(raw)
        return places

    @staticmethod
    def _find(raw: bytes) -> tuple[int, ...]:
        starts = {number.start(): 2 * at + 1 for at, number in enumerate(_NUMBER.finditer(raw))}
        found = (starts.get(decisive.start(1)) for decisive in _DECISIVE.finditer(raw))
        return tuple(place for place in found if place is not None)[:4]


@dataclass
class Flood:
    """Lines of one skeleton that are of one finding."""

    finding: Finding
    signatures: set[tuple[bytes, ...]] | None
    """Numbers that decide, as they were seen to lead to this finding; None: none can."""
    layout: re.Pattern[bytes] | None
    """Of most of these lines."""
    seen: int = 0

    def learn(self, raw: bytes, signatures: Signatures) -> None:
        """Take a line that was looked at and is of the finding."""
        if self.signatures is not None and len(self.signatures) < _MAX_SIGNATURES:
            self.signatures.add(signatures.of(raw))

    def takes(self, raw: bytes, epoch: int, signatures: Signatures) -> bool:
        """Tell whether a line of the skeleton can only lead to the finding, and need not be looked at.

        Now and then one is looked at all the same, and so is the first after training went on.
        """
        if self.finding.epoch != epoch:
            return False
        self.seen += 1
        if not self.seen % (_LOOK if self.seen < _LOOK * _LONG else _LOOK * 16):
            return False
        if self.signatures is None:
            return True
        match = self.layout.fullmatch(raw) if self.layout else None
        return (signatures.of(raw) if match is None else match.groups()) in self.signatures


def flood_of(finding: Finding, raw: bytes, skeleton: bytes, signatures: Signatures) -> Flood:
    """Return what takes further lines like ``raw``, which is of the finding."""
    decides = DIGITS_DECIDE.search(skeleton) is not None
    flood = Flood(finding, set() if decides else None, signatures.layout(raw) if decides else None)
    flood.learn(raw, signatures)
    return flood
