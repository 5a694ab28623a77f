"""Nodes that get no jobs: why, who says so, since when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from nvrx_slurm.health.reasons import Reason
from nvrx_slurm.health.text import printable
from nvrx_slurm.hooks.brake import our_reason
from nvrx_slurm.slurm.administration import ExcludingJob, NodeRecord

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA = "nvrx.nodes.v1"


@dataclass(frozen=True)
class OutOfService:
    """One node, and one cause why it gets no jobs, or not those of one job."""

    node: str
    state: str
    """Slurm's; ``excluded`` where only one job leaves the node out."""
    reason: str
    who: str
    """Who set the reason, or whose job it is."""
    since: int | None
    """Unix seconds; None: not known."""
    ours: Reason | None = None
    """The reason taken apart, where we have set it."""


def out_of_service(nodes: Sequence[NodeRecord], jobs: Sequence[ExcludingJob]) -> list[OutOfService]:
    """Return nodes that are drained or down, then those that jobs exclude."""
    found = []
    for record in nodes:
        if record.out_of_service:
            ours = our_reason(record)
            since = ours.since if ours else record.since
            found.append(OutOfService(record.name, record.state, record.reason, record.set_by, since, ours))
    for job in jobs:
        found += [
            OutOfService(node, "excluded", f"job {job.job_id} excludes it", job.user, None)
            for node in job.excluded
        ]
    return found


def as_document(found: Sequence[OutOfService]) -> bytes:
    """Return one JSON document."""
    document = {"schema": SCHEMA, "nodes": msgspec.to_builtins(list(found))}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def lines(found: Sequence[OutOfService], now: float | None = None) -> list[str]:
    """Return one line per node, for a pipe."""
    return [" ".join(filter(None, _cells(entry, now))) for entry in found] or ["every node is in service"]


def table(found: Sequence[OutOfService], now: float | None = None) -> Table:
    """Return the same as a table."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "state", "age", "who", "why"):
        made.add_column(column, overflow="fold")
    for entry in found:
        made.add_row(*(Text(cell, "bold" if entry.ours else "") for cell in _cells(entry, now)))
    return made


def _cells(entry: OutOfService, now: float | None) -> tuple[str, ...]:
    age = "" if entry.since is None else _age((time.time() if now is None else now) - entry.since)
    return entry.node, entry.state, age, entry.who, printable(entry.reason) or "(no reason)"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"
