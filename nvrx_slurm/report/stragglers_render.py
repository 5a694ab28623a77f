"""The view of slow ranks for people: a heat map of ranks over time, and tables; readable without colour."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from nvrx_slurm.report.stragglers import SLOW, RankHistory, Stragglers, buckets
from nvrx_slurm.report.words import clean, count

_MOST_LABEL = 22
_LONGEST_NAME = 60
"""Of a kernel, a section or a node within a sentence."""
_NARROWEST_NAME = 8
_WIDTH_OF_NUMBERS = 54
"""Of the table of ranks, what is between its columns among it."""
_LINES_PER_RANK, _LINES_AROUND = 3, 16
"""Of the whole view: a rank is in the heat map and in a table, a node in another."""
_FINE = 0.95
_STYLES = ((0.5, "white on red"), (SLOW, "black on yellow"), (0.9, "black on green"), (_FINE, "green"))
_ARROW = 0.03
"""A trend that is less is none."""


class HeatMap:
    """A row of each rank, a column of each report or of several; as wide as its console.

    A digit is the worst score in tenths: 5 for 0.5 to 0.6. A dot: 0.95 or more, or not among the worst.
    """

    def __init__(self, ranks: Sequence[RankHistory], reports: int) -> None:
        self._ranks = ranks
        self._reports = reports

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        labels = [f"rank {own.rank} {clean(own.node)}"[:_MOST_LABEL] for own in self._ranks]
        width = max(map(len, labels), default=0) + 1
        columns = buckets(self._reports, max(1, options.max_width - width))
        for label, own in zip(labels, self._ranks, strict=True):
            line = Text(label.ljust(width), no_wrap=True)
            for column in columns:
                line.append(*_cell(min((own.scores.get(report, 1.0) for report in column), default=1.0)))
            yield line


def _cell(score: float) -> tuple[str, str]:
    if score >= _FINE:
        return "·", "dim"
    style = next((style for limit, style in _STYLES if score < limit), "")
    return str(min(9, int(score * 10))), style


def render(found: Stragglers, top: int) -> RenderableType:
    """Return the whole view; ``top``: ranks and nodes that are shown."""
    if not (found.reports or found.ranks or found.slowed):
        return Text(
            "no report on slow ranks in this journal: the script measures no sections "
            "(nvrx_slurm.straggler), or has not reported yet"
        )
    shown = found.ranks[:top]
    parts: list[RenderableType] = [Text(_headline(found), style="bold")]
    if found.reports:
        first, last = found.reports[0], found.reports[-1]
        span = f"{_clock(first.at)} to {_clock(last.at, since=first.at)}"
        parts += [
            Text(),
            Text(f"score of each rank, {count(len(found.reports), 'report')}, {span}"),
            Text("digits are tenths, · is 0.95 or more", style="dim"),
            HeatMap(shown, len(found.reports)),
        ]
    if shown:
        parts.append(_Worst(found, shown))
    if found.nodes:
        parts.append(_nodes(found, top))
    parts += [Text(f"• {line}") for line in _notes(found)]
    hidden = len(found.ranks) - len(shown)
    if hidden > 0:
        parts.append(Text(f"• {hidden} more ranks: --top shows them", style="dim"))
    return Group(*parts)


def ranks_that_fit(lines: int, top: int) -> int:
    """Return of how many ranks a terminal of so many lines can show the whole view, ``top`` at the most."""
    return max(1, min(top, (lines - _LINES_AROUND) // _LINES_PER_RANK))


def _headline(found: Stragglers) -> str:
    named = [own for own in found.ranks if own.verdict is not None]
    who = ", ".join(f"{own.rank} on {_name(own.node)}" for own in named[:4])
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    said = f"slow: rank {who}{more}" if named else "no rank is slow for good"
    return f"job {clean(found.job)}: {said}"


class _Worst:
    """A table of ranks. Numbers keep their room, names give way to it."""

    def __init__(self, found: Stragglers, ranks: Sequence[RankHistory]) -> None:
        self._found = found
        self._ranks = ranks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(_NARROWEST_NAME, (options.max_width - _WIDTH_OF_NUMBERS) // 2)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
        for title in ("rank", "node", "mean", "worst", "trend", "section", "lost ms", "sure"):
            if title in ("node", "section"):
                table.add_column(title, max_width=room, overflow="ellipsis", no_wrap=True)
            else:
                table.add_column(title, justify="right", no_wrap=True)
        for own in self._ranks:
            verdict = own.verdict
            table.add_row(
                Text(str(own.rank)),
                Text(clean(own.node)),
                Text(f"{own.mean:.2f}", style="red" if own.mean < SLOW else ""),
                Text(f"{own.worst:.2f}"),
                Text(_trend(self._found.trend(own))),
                Text(clean(verdict.section if verdict else own.section)),
                Text(_ms(verdict.lost_ms) if verdict else ""),
                Text(f"{verdict.reports} of {verdict.of_reports}" if verdict else ""),
            )
        yield table


def _trend(change: float) -> str:
    if abs(change) < _ARROW:
        return "="
    return f"{change:+.2f}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if 1000 <= value < 1e7 else f"{value:.3g}"


def _nodes(found: Stragglers, top: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
    table.add_column("node", overflow="ellipsis", no_wrap=True)
    table.add_column("mean", justify="right")
    table.add_column("slow ranks", justify="right")
    slow: dict[str, int] = {}
    for own in found.ranks:
        slow[own.node] = slow.get(own.node, 0) + (own.verdict is not None)
    for node, mean in list(found.nodes.items())[:top]:
        table.add_row(Text(clean(node)), Text(f"{mean:.2f}"), Text(str(slow.get(node, 0))))
    return table


def _notes(found: Stragglers) -> list[str]:
    notes = []
    for own in found.ranks:
        verdict = own.verdict
        if verdict is None:
            continue
        details = [verdict.gpu] if verdict.gpu else []
        details += [f"{_name(loss.kernel)} loses {_ms(loss.lost_ms)} ms" for loss in verdict.kernels]
        details += verdict.context
        if verdict.told_by is not None:
            details.append(f"as rank {verdict.told_by} says")
        if details:
            notes.append(f"rank {own.rank}: {clean('; '.join(details))}")
    notes += _slowed(found)
    notes += [f"{_clock(at)} {_name(event.node)} stays: {clean(event.why)}" for at, event in found.kept]
    notes += [f"{_clock(at)} {_name(node)} left: {clean(why)}" for at, node, why in found.excluded]
    if found.reports and (missing := found.reports[-1].missing):
        notes.append(f"{count(missing, 'rank')} not in the last report")
    return notes


def _slowed(found: Stragglers) -> list[str]:
    """Say once of each section how much slower all ranks have been in it, and when."""
    notes = []
    for section in dict.fromkeys(event.section for _, event in found.slowed):
        own = [(at, event) for at, event in found.slowed if event.section == section]
        times = 1 / max(1e-4, min(event.score for _, event in own))
        since, until = _clock(own[0][0]), _clock(own[-1][0], since=own[0][0])
        when = since if since == until else f"{since} to {until}"
        notes.append(f"{when} all ranks: {_name(section)} took up to {times:.2g} times as long as before")
    return notes


def _name(text: str) -> str:
    """Return a name that may be a mangled one of a thousand characters."""
    shown = clean(text)
    return shown if len(shown) <= _LONGEST_NAME else f"{shown[: _LONGEST_NAME - 1]}…"


def _clock(at: float, since: float | None = None) -> str:
    """Say the time of day; and which day, where that is not the day of ``since``."""
    then = time.localtime(at)
    another_day = since is not None and time.localtime(since)[:3] != then[:3]
    return time.strftime("%b %d %H:%M:%S" if another_day else "%H:%M:%S", then)
