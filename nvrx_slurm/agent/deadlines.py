"""Which deadlines a heartbeat page implies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.wire.page import PageReading


@dataclass(frozen=True)
class Deadline:
    """When a rank is late, by which time-out, and for what."""

    at_ns: int
    """CLOCK_MONOTONIC."""
    timeout_ns: int
    what: str
    """One clause to follow "rank 3 is late:"."""

    @property
    def timeout_s(self) -> float:
        return self.timeout_ns / 1e9


def deadlines_of(reading: PageReading, sections: Sequence[str]) -> list[Deadline]:
    """Return every deadline that runs, the earliest first.

    * The initial time-out until the first heartbeat or the first section.
    * The subsequent time-out after every heartbeat.
    * Each open section's own, whatever else is open.
    * The one outside of sections while none is open, from the start of monitoring on.
    """
    if not reading.monitored:
        return []
    found: list[Deadline] = []

    def add(since_ns: int, timeout_ns: int, what: str) -> None:
        if timeout_ns:
            found.append(Deadline(since_ns + timeout_ns, timeout_ns, what.format(timeout_ns / 1e9)))

    if reading.last_heartbeat_ns:
        add(reading.last_heartbeat_ns, reading.subsequent_timeout_ns, "no heartbeat for {:g} s")
    elif not reading.has_used_sections:
        add(
            reading.monitored_since_ns,
            reading.initial_timeout_ns,
            "no first heartbeat within {:g} s of init_workload_monitoring",
        )
    for section in reading.sections:
        name = sections[section.slot].replace("{", "{{").replace("}", "}}")
        add(section.opened_ns, section.timeout_ns, f"section '{name}' open for {{:g}} s")
    if not reading.sections and reading.out_of_section_since_ns:
        add(reading.out_of_section_since_ns, reading.out_of_section_timeout_ns, "no section open for {:g} s")
    return sorted(found, key=lambda deadline: deadline.at_ns)
