"""The one document that every benchmark prints with ``--json``, and its table for people."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

OURS = "ours"


@dataclass(frozen=True)
class Row:
    """One metric of one contender in one case, over the runs of this document."""

    case: str
    who: str
    metric: str
    unit: str
    p50: float
    p90: float
    n: int


@dataclass(frozen=True)
class Document:
    """Everything that was measured in one run on one machine."""

    name: str
    machine: str
    date: str
    """ISO 8601, UTC: when the run began."""
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def summarize(case: str, who: str, metric: str, unit: str, values: Sequence[float]) -> Row:
    """Return median and 90th percentile of ``values``, with linear interpolation between two of them.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError(f"no {metric} of {who} in {case} was measured")
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return Row(case, who, metric, unit, round(statistics.median(values), 4), round(tenths[8], 4), len(values))


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")


def describe_machine(*versions: str) -> str:
    """This machine in one line, without its name: what a reader needs to judge the numbers."""
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    parts = [
        f"{os.cpu_count()} cores {_cpu_model() or platform.machine()}",
        f"{memory_gib:.0f} GiB",
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
        *versions,
        f"load {os.getloadavg()[0]:.1f} at the start",
    ]
    return ", ".join(parts)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def render(document: Document, titles: Mapping[str, str], notes: Sequence[str] = ()) -> RenderableType:
    """Return one table per case, a column per contender, and how many times ours fits into the others'.

    Args:
        titles: of the cases, in the order in which they are shown.
        notes: shown below, one line each.
    """
    parts: list[RenderableType] = [Text(f"{document.name}  {document.date}", style="bold")]
    parts.append(Text(document.machine, style="dim"))
    for case, title in titles.items():
        rows = [row for row in document.rows if row.case == case]
        if rows:
            parts += [Text(), Text(title, style="bold"), _case_table(rows)]
    if notes:
        parts += [Text(), *(Text(f"• {note}") for note in notes)]
    return Group(*parts)


def _case_table(rows: Sequence[Row]) -> Table:
    whos = list(dict.fromkeys(row.who for row in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("p50 (p90)")
    for who in whos:
        table.add_column(who, justify="right")
        if who != OURS and OURS in whos:
            table.add_column("ratio", justify="right", style="dim")
    by_key = {(row.metric, row.who): row for row in rows}
    for metric in dict.fromkeys(row.metric for row in rows):
        ours = by_key.get((metric, OURS))
        unit = next(row.unit for row in rows if row.metric == metric)
        cells = [f"{metric.replace('_', ' ')} [{unit}]".replace("[runs]", "")]
        for who in whos:
            row = by_key.get((metric, who))
            cells.append(_cell(row))
            if who != OURS and OURS in whos:
                cells.append(_ratio(row, ours))
        table.add_row(*(Text(cell.rstrip()) for cell in cells))
    return table


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.unit == "runs":
        return f"{row.p50:g} of {row.n}"
    return f"{row.p50:.2f} ({row.p90:.2f})"


def _ratio(row: Row | None, ours: Row | None) -> str:
    if row is None or ours is None or row.unit == "runs" or ours.p50 < 0.005:
        return ""
    ratio = row.p50 / ours.p50
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
