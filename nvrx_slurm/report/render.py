"""A report as rich renderables; readable at 80 columns, without colour, and in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, tzinfo

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvrx_slurm.report.bar import GLYPHS, bar, marks
from nvrx_slurm.report.headline import closing, headline
from nvrx_slurm.report.model import (
    CycleEnd,
    CycleReport,
    JobReport,
    JobState,
    Moment,
    MomentKind,
    Phase,
    Recovery,
    RecoveryEnd,
)
from nvrx_slurm.report.words import (
    clean,
    count,
    elapsed,
    node_set,
    plain_seconds,
    say_end,
    say_out,
    seconds,
)

SHORT_LINES = 40
"""Lines of the table and of the timeline, each, unless the full report is asked for."""
LABEL_WIDTH = 9
_STATE_STYLES = {
    JobState.RUNNING: "bold green",
    JobState.FINISHED: "bold green",
    JobState.FAILED: "bold red",
    JobState.STOPPED: "bold yellow",
    JobState.REQUEUE: "bold yellow",
    JobState.NO_END: "bold yellow",
    JobState.EMPTY: "bold yellow",
}
_MOMENT_NAMES = {
    MomentKind.JOB_STARTED: "job",
    MomentKind.NODE_JOINED: "joined",
    MomentKind.NODE_LOST: "node lost",
    MomentKind.NODES_AWAITED: "waits",
    MomentKind.NODE_GIVEN_UP: "given up",
    MomentKind.NODE_EXCLUDED: "excluded",
    MomentKind.NODE_SUSPECTED: "suspect",
    MomentKind.TOPOLOGY_IGNORED: "topology",
    MomentKind.HEALTH: "health",
    MomentKind.CYCLE_STARTED: "start",
    MomentKind.COLD_START: "cold",
    MomentKind.TRACES_KEPT: "traces",
    MomentKind.GPU_MEMORY_LEFT: "gpu memory",
    MomentKind.FIRST_STEP: "training",
    MomentKind.CHECKPOINT_LOADED: "resumes",
    MomentKind.STRAGGLER: "slow",
    MomentKind.INPROCESS_RESTART: "in-process",
    MomentKind.FAULT: "FAULT",
    MomentKind.CASCADE: "cascade",
    MomentKind.WORKERS_STOPPED: "stopped",
    MomentKind.HANG_EVIDENCE: "stacks",
    MomentKind.VERDICT: "verdict",
    MomentKind.ATTRIBUTED: "cause",
    MomentKind.TIMEOUTS: "time-outs",
    MomentKind.STOP_REQUESTED: "stop",
    MomentKind.CONTROL_REQUESTED: "request",
    MomentKind.NO_PROGRESS: "stuck",
    MomentKind.JOB_ENDED: "ended",
    MomentKind.RESTART_DELAYED: "wait",
    MomentKind.REQUEUED: "requeue",
    MomentKind.NOT_REQUEUED: "requeue",
    MomentKind.NO_END: "no end",
}
_MOMENT_STYLES = {
    MomentKind.FAULT: "bold red",
    MomentKind.NODE_LOST: "red",
    MomentKind.NODE_EXCLUDED: "red",
    MomentKind.HEALTH: "yellow",
    MomentKind.CASCADE: "dim",
    MomentKind.FIRST_STEP: "green",
    MomentKind.STOP_REQUESTED: "yellow",
    MomentKind.CONTROL_REQUESTED: "bold yellow",
    MomentKind.NODE_SUSPECTED: "yellow",
    MomentKind.NO_PROGRESS: "yellow",
    MomentKind.NO_END: "yellow",
    MomentKind.JOB_ENDED: "bold",
    MomentKind.NOT_REQUEUED: "bold red",
}


def render(
    report: JobReport,
    *,
    zone: tzinfo | None = None,
    lines: int | None = SHORT_LINES,
    facts: bool = True,
) -> Group:
    """Return the whole report.

    Args:
        zone: time zone of the dates; None is the machine's own.
        lines: limit of table rows and of timeline lines, the newest are kept; None shows all.
        facts: False leaves out what does not change: program, start, nodes.
    """
    parts: list[RenderableType] = [*_head(report)]
    if report.state is JobState.EMPTY:
        parts.extend(_notes(report))
        return Group(*parts)
    if facts:
        parts += [Text(), *_facts(report, zone), *_notes(report)]
    if report.cycles:
        parts += [Text(), *_cycle_table(report, lines)]
    parts += [Text(), *_timeline(report, lines)]
    if report.time is not None:
        parts += [Text(), _Bar(report)]
    parts += [Text(), Text(closing(report), style=_STATE_STYLES[report.state])]
    return Group(*parts)


def moment_line(moment: Moment, started_at: float) -> Text:
    """Return one line of the timeline."""
    label = _moment_label(moment, started_at)
    return label.append(moment.text)


def _moment_label(moment: Moment, started_at: float) -> Text:
    text = Text(f"{'+' + elapsed(moment.at - started_at, tenths=True):>9} ")
    return text.append(f"{_MOMENT_NAMES[moment.kind]:<9} ", style=_MOMENT_STYLES.get(moment.kind, ""))


class _Hanging:
    """A label and a text beside it that is wrapped within its own column; no trailing blanks."""

    def __init__(self, label: Text, text: str) -> None:
        self._label = label
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        indent = len(self._label)
        style = self._label.style if not indent else ""
        lines = Text(self._text, style=style).wrap(console, max(20, options.max_width - indent))
        for number, line in enumerate(lines):
            line.rstrip()
            start = self._label.copy() if number == 0 else Text(" " * indent)
            yield start.append_text(line)


def _head(report: JobReport) -> Iterator[RenderableType]:
    state, failed, now = headline(report)
    yield _Hanging(Text(style=_STATE_STYLES[report.state]), state)
    yield _Hanging(Text(), failed)
    yield _Hanging(Text(), now)


def _facts(report: JobReport, zone: tzinfo | None) -> Iterator[_Hanging]:
    for label, value in _fact_lines(report, zone):
        yield _Hanging(Text(f"{label:<{LABEL_WIDTH}} "), value)


def _fact_lines(report: JobReport, zone: tzinfo | None) -> Iterator[tuple[str, str]]:
    assert report.started_at is not None
    assert report.until is not None
    attempt = report.attempts[-1]
    if report.argv:
        yield "program", " ".join(map(clean, report.argv))
    started = datetime.fromtimestamp(report.started_at, zone).astimezone(zone)
    host = f" on {clean(attempt.host)}" if attempt.host else ""
    yield (
        "started",
        f"{started:%Y-%m-%d %H:%M:%S %Z}{host}, {seconds(report.until - report.started_at)} in all",
    )
    if len(report.attempts) > 1:
        gaps = sum(a.queue_s for a in report.attempts if a.queue_s is not None)
        yield "attempts", f"{len(report.attempts)}, with {plain_seconds(gaps)} between them"
    if attempt.max_restarts is not None:
        here = " in this attempt" if len(report.attempts) > 1 else ""
        yield "restarts", f"{attempt.restarts} of {attempt.max_restarts} used{here}"
    cycle = next((c for c in reversed(report.cycles) if c.world_size is not None), None)
    if cycle is not None:
        spare = f" + spare {node_set(cycle.spares)}" if cycle.spares else ", no spare"
        yield "world", f"{count(cycle.world_size or 0, 'rank')} on {node_set(cycle.nodes)}{spare}"
    elif attempt.nodes:
        yield "nodes", node_set(attempt.nodes)
    for out in report.lost:
        back = f" (back at +{elapsed(out.back_at - report.started_at)})" if out.back_at is not None else ""
        yield "lost", say_out(out, f"at +{elapsed(out.at - report.started_at)}") + back
    for out in report.excluded:
        if out.back_at is None:
            yield "excluded", say_out(out, f"at +{elapsed(out.at - report.started_at)}")
    yield "steps", _step_facts(report)


def _step_facts(report: JobReport) -> str:
    if report.last_step is None:
        return "none reported, so steps lost are not known"
    saved: dict[str, int] = {}
    for cycle in report.cycles:
        for layer, step in cycle.saved.items():
            saved[layer] = max(step, saved.get(layer, step))
    newest = ", ".join(f"{step} ({clean(layer)})" for layer, step in sorted(saved.items(), key=_newest_first))
    lost = sum(c.recovery.steps_lost or 0 for c in report.cycles if c.recovery is not None)
    parts = [
        f"last {report.last_step}",
        f"checkpoint {newest}" if saved else "no checkpoint reported",
    ]
    return ", ".join([*parts, f"{lost} lost to restarts"])


def _newest_first(saved: tuple[str, int]) -> tuple[int, str]:
    layer, step = saved
    return -step, layer


def _notes(report: JobReport) -> Iterator[Text]:
    """Say what is odd about the journal itself."""
    if report.read.torn:
        yield Text(f"note: {count(report.read.torn, 'torn line')} skipped (a writer was killed in mid-line)")
    if report.read.unfinished:
        yield Text("note: the journal's last line is unfinished, it is left out")
    if report.read.fenced:
        yield Text(
            f"note: {count(report.read.fenced, 'event')} skipped that a replaced Coordinator still wrote"
        )
    if report.read.unknown:
        yield Text(f"note: {count(report.read.unknown, 'event')} of a newer version skipped")


def _cycle_table(report: JobReport, lines: int | None) -> Iterator[RenderableType]:
    queued = any(c.recovery is not None and c.recovery.queue_s is not None for c in report.cycles)
    detected = any(c.recovery is not None and c.recovery.detect_s is not None for c in report.cycles)
    columns = [
        *(["det"] if detected else []),
        "stop",
        *(["queue"] if queued else []),
        *("form", "ready", "step", "lost", "steps"),
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("cycle", justify="right", no_wrap=True)
    table.add_column("what ended it", ratio=1, overflow="fold")
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("seen by", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    hidden = 0 if lines is None else max(0, len(report.cycles) - lines)
    for cycle in report.cycles[hidden:]:
        table.add_row(*_cycle_row(report, cycle, columns))
    yield Text("cycles (seconds that a fault cost, by phase; steps lost)", style="bold")
    if hidden:
        yield Text(f"  ... {hidden} earlier, --full shows them")
    yield table
    for cycle in report.cycles[hidden:]:
        if cycle.recovery is not None and cycle.recovery.end is RecoveryEnd.FAILED_AGAIN:
            yield Text("* the next cycle failed before its first step; the time after that is in its row")
            break


def _cycle_row(report: JobReport, cycle: CycleReport, columns: list[str]) -> list[Text]:
    assert report.started_at is not None
    what = Text(say_end(cycle), style="red" if cycle.end is CycleEnd.FAULT else "")
    at = "" if cycle.ended_at is None else elapsed(cycle.ended_at - report.started_at)
    seen = clean(cycle.cause.detector or "?") if cycle.cause is not None else ""
    recovery = cycle.recovery
    rest: list[str] = []
    if recovery is not None:
        cells = {
            "det": _number(recovery.detect_s),
            "stop": _number(recovery.stop_s),
            "queue": _number(recovery.queue_s),
            "form": _number(recovery.form_s),
            "ready": _number(recovery.ready_s),
            "step": _number(recovery.first_step_s),
            "lost": _lost(recovery),
            "steps": "?" if recovery.steps_lost is None else str(recovery.steps_lost),
        }
        rest = [cells[column] for column in columns]
    return [Text(str(cycle.number)), what, *map(Text, [at, seen, *rest])]


def _lost(recovery: Recovery) -> str:
    match recovery.end:
        case RecoveryEnd.RESUMED:
            return _number(recovery.lost_s)
        case RecoveryEnd.FAILED_AGAIN:
            return f"{_number(recovery.lost_s)}*"
        case RecoveryEnd.ONGOING:
            return f"{_number(recovery.lost_s)}+"
        case RecoveryEnd.ENDED:
            return "-"


def _number(value: float | None) -> str:
    """Seconds without their unit; longer ones with minutes or hours."""
    return "-" if value is None else seconds(value).removesuffix("s") if value < 59.95 else seconds(value)


def _timeline(report: JobReport, lines: int | None) -> Iterator[RenderableType]:
    assert report.started_at is not None
    yield Text("timeline", style="bold")
    hidden = 0 if lines is None else max(0, len(report.timeline) - lines)
    if hidden:
        yield Text(f"  ... {hidden} earlier, --full shows them")
    for moment in report.timeline[hidden:]:
        yield _Hanging(_moment_label(moment, report.started_at), moment.text)


class _Bar:
    """The bar, the faults under it and the shares."""

    def __init__(self, report: JobReport) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        report = self._report
        assert report.time is not None
        width = options.max_width
        line = Text()
        for phase in bar(report.spans, width):
            line.append(_glyph(phase, options), style=GLYPHS[phase].style)
        yield line
        faults = [(c.ended_at, c.number) for c in report.cycles if c.end is CycleEnd.FAULT and c.ended_at]
        under = marks(faults, report.spans[0].start, report.spans[-1].end, width)
        if under:
            yield Text(under, style="red")
        shares = [
            (
                f"{_glyph(phase, options)} {GLYPHS[phase].name} {100 * report.time.share(phase):.1f}%",
                GLYPHS[phase].style,
            )
            for phase in Phase
            if report.time.seconds[phase] > 0
        ]
        yield from _flow(shares, width)
        new = 100 * report.time.share(Phase.TRAINING)
        said = f"{new:.1f}% of {seconds(report.time.wall_s)} spent on new steps"
        if not report.time.redone_known:
            said += "; lost steps done again are not told apart (no steps reported)"
        yield Text(said)


def _glyph(phase: Phase, options: ConsoleOptions) -> str:
    return GLYPHS[phase].ascii if options.ascii_only else GLYPHS[phase].block


def _flow(items: Iterable[tuple[str, str]], width: int) -> Iterator[Text]:
    """Set items side by side, none broken over two lines."""
    line = Text()
    for item, style in items:
        if line and len(line) + 2 + len(item) > width:
            yield line
            line = Text()
        line.append("  " if line else "").append(item, style=style)
    if line:
        yield line
