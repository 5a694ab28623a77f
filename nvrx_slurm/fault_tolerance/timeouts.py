"""Time-outs calculated from what a run has shown: measured maxima, over all ranks, times a safety factor.

Pure: times come in as CLOCK_MONOTONIC nanoseconds, results go out as seconds. The formulas stand in
``docs/hang_detection.md``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, SectionTimeouts

_UNKNOWN = -1.0
_NEW_SHARE = 0.5
"""Weight of a new value where the current one was itself calculated."""


class NotEnoughDataError(ValueError):
    """Something that is needed has not happened yet on any rank; the message says what."""


@dataclass(frozen=True)
class Maxima:
    """The longest intervals, in seconds; negative: none was seen."""

    initial: float
    """From the start to the first heartbeat."""
    subsequent: float
    """Between heartbeats."""
    out_of_section: float
    """With no section open."""
    sections: tuple[float, ...]
    """Of each section, in the order of the configuration."""

    def to_list(self) -> list[float]:
        """Return one number after the other, for one reduction over all ranks."""
        return [self.initial, self.subsequent, self.out_of_section, *self.sections]

    @classmethod
    def from_list(cls, values: Sequence[float]) -> Maxima:
        return cls(values[0], values[1], values[2], tuple(values[3:]))


class IntervalMeter:
    """Measures one rank. Sections are numbered in the order of the configuration; none may be open twice."""

    def __init__(self, sections: int, now_ns: int) -> None:
        self._start = now_ns
        self._initial = 0
        self._last_heartbeat = 0
        self._subsequent = 0
        self._longest = [0] * sections
        self._opened = [0] * sections
        self._open = 0
        self._out_since = now_ns
        self._out_of_section = 0

    def heartbeat(self, now_ns: int) -> None:
        last = self._last_heartbeat
        if last:
            gap = now_ns - last
            if gap > self._subsequent:
                self._subsequent = gap
        else:
            self._initial = now_ns - self._start
        self._last_heartbeat = now_ns

    def is_open(self, section: int) -> bool:
        return self._opened[section] != 0

    def open(self, section: int, now_ns: int) -> bool:
        """Return True if no other section was open."""
        self._opened[section] = now_ns
        self._open += 1
        if self._open > 1:
            return False
        out = now_ns - self._out_since
        if out > self._out_of_section:
            self._out_of_section = out
        return True

    def close(self, section: int, now_ns: int) -> bool:
        """Return True if no section is open now."""
        duration = now_ns - self._opened[section]
        self._opened[section] = 0
        if duration > self._longest[section]:
            self._longest[section] = duration
        self._open -= 1
        if self._open:
            return False
        self._out_since = now_ns
        return True

    def maxima(self, now_ns: int) -> Maxima:
        """Return the maxima so far; the stretch without a section that runs at ``now_ns`` counts."""
        out = self._out_of_section
        if not self._open:
            out = max(out, now_ns - self._out_since)
        return Maxima(
            initial=_seconds(self._initial),
            subsequent=_seconds(self._subsequent),
            out_of_section=_seconds(out),
            sections=tuple(_seconds(longest) for longest in self._longest),
        )


def _seconds(ns: int) -> float:
    return ns / 1e9 if ns > 0 else _UNKNOWN


def calculate_heartbeat(
    merged: Maxima, current: HeartbeatTimeouts, safety_factor: float
) -> HeartbeatTimeouts:
    """Return the new time-outs from the maxima of all ranks.

    Raises:
        NotEnoughDataError: no rank has sent two heartbeats.
    """
    if merged.initial <= 0 or merged.subsequent <= 0:
        raise NotEnoughDataError("two heartbeats are needed on at least one rank")
    was = current.were_calculated
    return HeartbeatTimeouts(
        initial=_blend(safety_factor * merged.initial, current.initial, was),
        subsequent=_blend(safety_factor * merged.subsequent, current.subsequent, was),
        were_calculated=True,
    )


def calculate_sections(
    merged: Maxima,
    current: SectionTimeouts,
    safety_factor: float,
    selected: Collection[str] | None = None,
    out_of_section: bool = True,
) -> SectionTimeouts:
    """Return ``current`` with new time-outs for the ``selected`` sections, by default all.

    Raises:
        NotEnoughDataError: no rank has ended one of the sections, or was outside of all.
        ValueError: a selected section is not monitored.
    """
    names = list(current.section)
    wanted = set(names if selected is None else selected)
    unknown = sorted(wanted.difference(names))
    if unknown:
        raise ValueError(f"section {unknown[0]!r} is not monitored; monitored: {', '.join(names) or 'none'}")
    missing = [
        name for name, longest in zip(names, merged.sections, strict=True) if name in wanted and longest <= 0
    ]
    if missing:
        raise NotEnoughDataError(f"no rank has ended section {missing[0]!r} yet")
    if out_of_section and merged.out_of_section <= 0:
        raise NotEnoughDataError("no rank has been outside of all sections yet")
    values = dict(current.section)
    for name, longest in zip(names, merged.sections, strict=True):
        if name in wanted:
            values[name] = _blend(safety_factor * longest, values[name], name in current.calculated_sections)
    outside, outside_calculated = current.out_of_section, current.is_out_of_section_calculated
    if out_of_section:
        outside = _blend(safety_factor * merged.out_of_section, outside, outside_calculated)
        outside_calculated = True
    return SectionTimeouts(
        section=values,
        out_of_section=outside,
        calculated_sections=sorted(wanted.union(current.calculated_sections)),
        is_out_of_section_calculated=outside_calculated,
    )


def _blend(new: float, current: float | None, was_calculated: bool) -> float:
    if not was_calculated or current is None:
        return new
    return _NEW_SHARE * new + (1 - _NEW_SHARE) * current
