"""The wall time as one line of characters, with a mark under every fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nvrx_slurm.report.model import Phase, Span


@dataclass(frozen=True)
class Glyph:
    """How a phase is shown."""

    name: str
    block: str
    """Where the terminal can show Unicode."""
    ascii: str
    style: str


GLYPHS: Mapping[Phase, Glyph] = {
    Phase.TRAINING: Glyph("training", "█", "#", "green"),
    Phase.REDOING: Glyph("steps done again", "▒", "=", "yellow"),
    Phase.RECOVERING: Glyph("recovering", "x", "x", "red"),
    Phase.STARTING: Glyph("starting", ".", ".", "cyan"),
    Phase.STOPPING: Glyph("stopping", "-", "-", "magenta"),
    Phase.QUEUED: Glyph("between attempts", "_", "_", "blue"),
}


def bar(spans: Sequence[Span], width: int) -> tuple[Phase, ...]:
    """Return for each of ``width`` equal pieces of the wall time the phase that fills most of it."""
    if not spans or width <= 0:
        return ()
    start, end = spans[0].start, spans[-1].end
    cell = (end - start) / width
    pieces = []
    first = 0
    for index in range(width):
        left, right = start + index * cell, start + (index + 1) * cell
        while first + 1 < len(spans) and spans[first].end <= left:
            first += 1
        filled: dict[Phase, float] = {}
        for span in spans[first:]:
            if span.start >= right:
                break
            overlap = min(span.end, right) - max(span.start, left)
            filled[span.phase] = filled.get(span.phase, 0.0) + overlap
        pieces.append(max(filled, key=lambda phase: filled[phase]) if filled else spans[first].phase)
    return tuple(pieces)


def marks(faults: Sequence[tuple[float, int]], start: float, end: float, width: int) -> str:
    """Return the line under the bar: ``^2`` under the fault that ended cycle 2.

    The number is left out where it would run into the next mark.

    Args:
        faults: when, and which cycle, in order.
    """
    if end <= start or width <= 0:
        return ""
    places: dict[int, int] = {}
    for at, cycle in faults:
        place = min(width - 1, max(0, int((at - start) / (end - start) * width)))
        places.setdefault(place, cycle)
    line = [" "] * width
    taken = [*sorted(places), width]
    for place, following in pairwise(taken):
        label = f"^{places[place]}"
        fits = place + len(label) + (following < width) <= following
        for offset, letter in enumerate(label if fits else "^"):
            line[place + offset] = letter
    return "".join(line).rstrip()
