"""Findings as rich renderables; readable at 80 columns, without colour, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.timeouts import Ladder, say
from nvrx_slurm.doctor.words import clean, count

_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.PROBLEM: "bold red", Status.UNKNOWN: "magenta"}
_NARROWEST = 80


def _status(status: Status) -> Text:
    return Text(status.value, style=_STYLES[status])


def _line(*parts: str | Text) -> Text:
    """Return a line that is never broken, whatever the width, so that tools can read it."""
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", expand=False)


def findings_table(findings: Sequence[Finding]) -> RenderableType:
    """Return one row a finding; what follows from it, and what to do, stands below what was read."""
    table = _table()
    table.add_column("rule", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("read, what follows, → what to do", ratio=1, overflow="fold")
    for finding in findings:
        answer = finding.answer
        said = Text(clean(answer.read))
        if answer.why or answer.fix:
            said = Text("\n").join([said, _advice(answer.why, answer.fix)])
        table.add_row(finding.rule, _status(finding.status), Text(finding.about), said)
    return table


def _advice(why: str, fix: str) -> Text:
    text = Text(clean(why))
    if fix:
        text.append("\n" if why else "")
        text.append(f"→ {clean(fix)}", style="bold")
    return text


def timeouts_table(ladders: Sequence[Ladder]) -> RenderableType:
    """Return every time-out, each ladder from small to large, and where the order is broken."""
    table = _table()
    table.add_column("rule", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("time-out", no_wrap=True)
    table.add_column("is", justify="right", no_wrap=True)
    table.add_column("from; what is broken, → what to do", ratio=1, overflow="fold")
    for ladder in ladders:
        table.add_row("", "", Text(f"{ladder.title}:", style="italic"), "", "")
        found = ladder.findings()
        for position, rung in enumerate(ladder.rungs):
            said = Text(rung.origin)
            if position == len(found):
                table.add_row("", "", Text(f"  {rung.name}"), say(rung), said)
                continue
            answer = found[position].answer
            if answer.why or answer.fix:
                said = Text("\n").join([said, _advice(answer.why, answer.fix)])
            table.add_row(rung.rule, _status(answer.status), Text(f"  {rung.name}"), say(rung), said)
    return table


def lint_list(name: str, findings: Iterable[Finding]) -> RenderableType:
    """Return findings as a compiler prints its own: place, what, the line, why, fix."""
    blocks: list[RenderableType] = []
    for finding in findings:
        answer = finding.answer
        place = f"{name}:{answer.line}" if answer.line is not None else name
        head = _line(
            f"{clean(place)}: ",
            _status(finding.status),
            f" {finding.rule} {finding.about}: {clean(answer.read)}",
        )
        blocks.append(head)
        if answer.text:
            blocks.append(
                Padding(
                    Text(clean(answer.text), style="dim", no_wrap=True, overflow="ellipsis"), (0, 0, 0, 4)
                )
            )
        blocks.append(Padding(_advice(answer.why, answer.fix), (0, 0, 0, 2)))
    return Group(*blocks)


@dataclass(frozen=True)
class Explained:
    """One job of ``why``: a sentence, what there is to say, and what its journal tells."""

    headline: str
    findings: Sequence[Finding]
    told: Sequence[str] = ()


def explanation(job: Explained) -> RenderableType:
    """Return what there is to say about one job."""
    blocks: list[RenderableType] = [_line(Text(clean(job.headline), style="bold"))]
    for finding in job.findings:
        answer = finding.answer
        head = _line("  ", _status(finding.status), f" {finding.about}: {clean(answer.read)}")
        blocks.append(head)
        if answer.why or answer.fix:
            blocks.append(Padding(_advice(answer.why, answer.fix), (0, 0, 0, 4)))
    blocks.extend(Padding(Text(clean(line)), (0, 0, 0, 2)) for line in job.told)
    return Group(*blocks)


def summary(findings: Sequence[Finding]) -> Text:
    """Return ``2 problems, 1 warning, 14 ok``."""
    numbers = {status: sum(f.status is status for f in findings) for status in Status}
    parts = []
    if numbers[Status.PROBLEM]:
        parts.append(count(numbers[Status.PROBLEM], "problem"))
    if numbers[Status.WARN]:
        parts.append(count(numbers[Status.WARN], "warning"))
    if numbers[Status.UNKNOWN]:
        parts.append(f"{numbers[Status.UNKNOWN]} unknown")
    if numbers[Status.OK]:
        parts.append(f"{numbers[Status.OK]} ok")
    return Text(", ".join(parts) or "nothing found")


def console() -> Console:
    """Return a console on standard output that is never too narrow for the tables."""
    found = Console(highlight=False)
    if found.width < _NARROWEST:
        found.width = _NARROWEST
    return found
