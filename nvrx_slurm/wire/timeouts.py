"""What a rank's monitor enforces, as every process of a job passes it on, and its saved form.

Field names are those that users of NVIDIA's extension read and save; all values are seconds, None switches a
time-out off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

MAX_SECTIONS = 64
"""Slots on a heartbeat page."""
MAX_NAME_BYTES = 64
MONITORING_VARIABLE = "NVRX_MONITORING"
"""Environment variable of a rank: :class:`Monitoring` as JSON."""


class HeartbeatTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    initial: float | None = None
    """From ``init_workload_monitoring`` to the first heartbeat, or to the first section."""
    subsequent: float | None = None
    """Between heartbeats."""
    were_calculated: bool = False


class SectionTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    section: dict[str, float | None] = {}
    """How long each section may stay open; a section that is not here is not monitored."""
    out_of_section: float | None = None
    """How long no section may be open."""
    calculated_sections: list[str] = []
    is_out_of_section_calculated: bool = False


class Monitoring(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a rank and its monitor must agree on; the position of a section is its slot on the page."""

    heartbeat: HeartbeatTimeouts
    section: SectionTimeouts
    warmup: dict[str, float] = {}
    """Instead of the section's time-out while the section is opened for the first times."""
    warmup_iterations: int = 0
    safety_factor: float = 5.0

    def smallest(self) -> float | None:
        """Return the shortest time-out that can ever run; None when none does."""
        values = [self.heartbeat.initial, self.heartbeat.subsequent, self.section.out_of_section]
        values += [*self.section.section.values(), *self.warmup.values()]
        return min((value for value in values if value is not None), default=None)


def check_section_names(names: list[str]) -> None:
    """Refuse what does not fit a heartbeat page.

    Raises:
        ValueError: too many sections, an empty or too long name, or one with control characters.
    """
    if len(names) > MAX_SECTIONS:
        raise ValueError(f"{len(names)} sections have time-outs; {MAX_SECTIONS} are possible")
    for name in names:
        if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
            raise ValueError(
                f"{name!r} is no name of a section: 1 to {MAX_NAME_BYTES} bytes without control characters"
            )


class _SavedTimeouts(msgspec.Struct, frozen=True):
    heartbeat: HeartbeatTimeouts | None = None
    section: SectionTimeouts | None = None


class _Saved(msgspec.Struct, frozen=True):
    current_timeouts: _SavedTimeouts


def to_state(heartbeat: HeartbeatTimeouts, section: SectionTimeouts) -> dict[str, Any]:
    """Return the calculated time-outs, and only those, as plain values (``RankMonitorClient.state_dict``)."""
    saved: dict[str, Any] = {}
    if heartbeat.were_calculated:
        saved["heartbeat"] = msgspec.to_builtins(heartbeat)
    if section.calculated_sections or section.is_out_of_section_calculated:
        calculated = sorted(section.calculated_sections)
        saved["section"] = {
            "section": {name: section.section[name] for name in calculated},
            "out_of_section": section.out_of_section if section.is_out_of_section_calculated else None,
            "calculated_sections": calculated,
            "is_out_of_section_calculated": section.is_out_of_section_calculated,
        }
    return {"current_timeouts": saved}


def with_state(monitoring: Monitoring, state: Mapping[str, Any]) -> Monitoring:
    """Return ``monitoring`` with the calculated time-outs of ``state`` in place of its own.

    A section that is not monitored any more is left out.

    Raises:
        ValueError: ``state`` is not what :func:`to_state` returns.
    """
    try:
        saved = msgspec.convert(dict(state), _Saved).current_timeouts
    except msgspec.ValidationError as error:
        raise ValueError(f"not saved time-outs: {error}") from error
    heartbeat, section = monitoring.heartbeat, monitoring.section
    if saved.heartbeat is not None and saved.heartbeat.were_calculated:
        _require(saved.heartbeat.initial, "initial")
        _require(saved.heartbeat.subsequent, "subsequent")
        heartbeat = saved.heartbeat
    if saved.section is not None:
        section = _with_saved_sections(section, saved.section)
    return msgspec.structs.replace(monitoring, heartbeat=heartbeat, section=section)


def _with_saved_sections(section: SectionTimeouts, saved: SectionTimeouts) -> SectionTimeouts:
    values = dict(section.section)
    calculated = set(section.calculated_sections)
    for name in saved.calculated_sections:
        _require(saved.section.get(name), name)
        if name in values:
            values[name] = saved.section[name]
            calculated.add(name)
    out_of_section, is_calculated = section.out_of_section, section.is_out_of_section_calculated
    if saved.is_out_of_section_calculated:
        _require(saved.out_of_section, "out_of_section")
        out_of_section, is_calculated = saved.out_of_section, True
    return SectionTimeouts(
        section=values,
        out_of_section=out_of_section,
        calculated_sections=sorted(calculated),
        is_out_of_section_calculated=is_calculated,
    )


def _require(value: float | None, what: str) -> None:
    if value is None or not math.isfinite(value) or value <= 0:
        raise ValueError(f"not saved time-outs: {what!r} is {value}, not a number of seconds above 0")
