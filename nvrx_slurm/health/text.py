"""A report as people, logs and Prometheus read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.health.report import HealthReport
from nvrx_slurm.health.result import NODE, CheckResult, Status
from nvrx_slurm.whole_file import replace_file

if TYPE_CHECKING:
    from rich.table import Table

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}
_WORST_FIRST = (Status.FAIL, Status.WARN, Status.OK, Status.SKIP)
_PROM_VALUES = {Status.OK: 0, Status.WARN: 1, Status.FAIL: 2, Status.SKIP: 3}


def printable(text: str) -> str:
    """Return one line, without what a terminal or a log would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def line(result: CheckResult) -> str:
    """Return one line: ``FAIL gpu-lost gpu 3: fallen off the bus [signal]; do: reboot``."""
    scope = "" if result.scope == NODE else f" {result.scope}"
    signal = f" [{result.signal}]" if result.signal else ""
    remedy = f"; do: {result.remedy}" if result.remedy else ""
    return printable(
        f"{result.status.value.upper()} {result.check}{scope}: {result.evidence}{signal}{remedy}"
    )


def lines(report: HealthReport) -> list[str]:
    """Return one line per result, the worst first, and one that sums up."""
    return [*map(line, _ordered(report)), summary(report)]


def _ordered(report: HealthReport) -> list[CheckResult]:
    """Return the worst first; checks that are skipped for the same reason as one."""
    skipped: dict[str, list[CheckResult]] = {}
    for result in report.results:
        if result.status is Status.SKIP:
            skipped.setdefault(result.evidence, []).append(result)
    together = [
        replace(group[0], check=" ".join(dict.fromkeys(result.check for result in group)), signal="")
        for group in skipped.values()
    ]
    others = [result for result in report.results if result.status is not Status.SKIP]
    return [*sorted(others, key=lambda result: _WORST_FIRST.index(result.status)), *together]


def summary(report: HealthReport) -> str:
    counts = {status: sum(r.status is status for r in report.results) for status in _WORST_FIRST}
    said = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    word = "UNKNOWN" if report.status is Status.SKIP else report.status.value.upper()
    return (
        f"{word}: {report.host}, {report.stage.value}: {said or 'no check was run'} in {report.seconds:.2f} s"
    )


def table(report: HealthReport) -> Table:
    """Return the same as a table."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "check", "scope", "found", "what to do"):
        made.add_column(column, overflow="fold")
    for result in _ordered(report):
        scope = "" if result.scope == NODE else result.scope
        cells = (result.check, scope, result.evidence, result.remedy)
        style = _STYLES[result.status]
        made.add_row(Text(result.status.value, style), *(Text(printable(cell)) for cell in cells))
    return made


def prometheus(report: HealthReport) -> str:
    """Return the text of a node_exporter textfile: the worst of every check and scope, and how long it
    took."""
    worst: dict[tuple[str, str], Status] = {}
    for result in report.results:
        key = (result.check, result.scope)
        before = worst.get(key, Status.SKIP)
        worst[key] = min(before, result.status, key=_WORST_FIRST.index)
    written = [
        "# HELP nvrx_check_status 0 ok, 1 warn, 2 fail, 3 skipped",
        "# TYPE nvrx_check_status gauge",
        *(
            f'nvrx_check_status{{check="{check}",scope="{_label(scope)}"}} {_PROM_VALUES[status]}'
            for (check, scope), status in worst.items()
        ),
        "# TYPE nvrx_check_duration_seconds gauge",
        *(
            f'nvrx_check_duration_seconds{{check="{check}"}} {seconds:g}'
            for check, seconds in report.durations.items()
        ),
        "# TYPE nvrx_check_timestamp_seconds gauge",
        f'nvrx_check_timestamp_seconds{{stage="{report.stage.value}"}} {report.ts:.3f}',
    ]
    return "\n".join(written) + "\n"


def _label(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def write_prometheus(report: HealthReport, path: Path) -> None:
    """Replace ``path`` as a whole: the exporter must never read half a file.

    Raises:
        OSError: it can't be written.
    """
    # The exporter is another user.
    replace_file(path, prometheus(report).encode(), mode=0o644)
