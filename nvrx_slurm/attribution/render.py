"""A verdict as rich renderables, for a person on call: cause, culprit and next step come first."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvrx_slurm.attribution.flight_recorder import FlightReport
from nvrx_slurm.attribution.logs.finding import Finding
from nvrx_slurm.attribution.policy import Action
from nvrx_slurm.attribution.primary import Relation, Tier
from nvrx_slurm.attribution.verdict import Attribution

_LABEL = 11
_MAX_NAMED = 64
_SHOWN = 6
_ACTIONS = {
    Action.RESTART: ("restart", "bold green"),
    Action.RESTART_EXCLUDE: ("restart without", "bold yellow"),
    Action.HOLD: ("hold", "bold yellow"),
    Action.WAIT: ("wait", "bold yellow"),
    Action.STOP: ("stop", "bold red"),
}


def render(result: Attribution) -> Group:
    """Return the whole report."""
    parts: list[RenderableType] = [*_head(result), Text()]
    parts.extend(_quotes(result))
    parts.extend(_facts(result))
    return Group(*parts)


def render_flight(report: FlightReport) -> Group:
    """Return what the Flight Recorder dumps alone say."""
    parts: list[RenderableType] = []
    for culprit in report.culprits[:_MAX_NAMED]:
        at = f" on {culprit.node}" if culprit.node else ""
        parts.append(
            _line(
                "culprit",
                f"rank {culprit.rank}{at}: {culprit.kind.value} ({culprit.confidence:.0%})",
                "bold red",
            )
        )
        for found in culprit.evidence[:3]:
            behind = (
                f"others completed {found.peer_max_completed}"
                if found.peer_max_completed is not None
                else f"others launched {found.peer_max_enqueued}"
            )
            group = found.description or found.group or "the default group"
            what = f"{found.op or 'last operation'} {found.sequence} of {group}; {behind}"
            parts.append(_line("", what + (f"; {found.frame}" if found.frame else "")))
    if len(report.culprits) > _MAX_NAMED:
        parts.append(_line("", f"and {len(report.culprits) - _MAX_NAMED:,} more"))
    nobody = "none found: the ranks are not behind each other"
    if report.fabric or not report.culprits:
        parts.insert(0, _line("culprit", report.moving or report.fabric or nobody, "bold yellow"))
    parts += [_line("mismatch", f"ranks {ranks_text(m.ranks)}: {m.what}") for m in report.mismatches]
    if report.victims:
        parts.append(_line("victims", f"ranks {ranks_text(report.victims)} waited", "dim"))
    parts.append(_line("dumps", f"{report.present} of {report.world_size}" + _without(report.missing), "dim"))
    parts += [_line("note", caveat, "dim") for caveat in report.caveats[:_SHOWN]]
    return Group(*parts)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as ``0,2,4-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


def _without(missing: tuple[int, ...]) -> str:
    return f"; none of ranks {ranks_text(missing)}" if missing else ""


def _head(result: Attribution) -> list[RenderableType]:
    primary = result.choice.primary
    if primary is None:
        cause = Text("not found: no line of the evidence is known to be a failure", style="bold yellow")
    else:
        doubt = " (any program can print this: not verified)" if result.choice.tier is Tier.UNVERIFIED else ""
        cause = Text(f"{primary.family.says}{doubt}", style="bold red")
        cause.append(
            f"  [{primary.family.id}, {result.scope.value}, {result.confidence:.0%} sure]", style="dim"
        )
    action, style = _ACTIONS[result.decision.action]
    nodes = f" {', '.join(result.decision.exclude)}" if result.decision.exclude else ""
    after = f" in {result.decision.delay_s:.0f} s" if result.decision.delay_s else ""
    following = Text(f"{action}{nodes}{after}", style=style)
    following.append(f": {result.decision.why} [{result.decision.rule}]", style="none")
    return [_label("first cause", cause), _label("culprit", _culprits(result)), _label("next", following)]


def _culprits(result: Attribution) -> Text:
    if not result.culprits:
        return Text("nobody: nothing names a rank, GPU or node")
    text = Text()
    for culprit in result.culprits[:_SHOWN]:
        at = f" on {culprit.node}" if culprit.node and culprit.kind != "node" else ""
        text.append("\n" if text.plain else "")
        text.append(f"{culprit.kind} {culprit.id}{at}", style="bold")
        text.append(f" ({culprit.confidence:.0%}; {culprit.reasons[0]})" if culprit.reasons else "")
    if len(result.culprits) > _SHOWN:
        text.append(f"\nand {len(result.culprits) - _SHOWN} more")
    return text


def _quotes(result: Attribution) -> list[RenderableType]:
    parts: list[RenderableType] = []
    primary = result.choice.primary
    if primary is not None:
        parts.append(_quote("evidence", primary, "red"))
        if primary.frame:
            parts.append(_line("", f"{primary.exception} in {primary.frame}"))
    shown = [pair for pair in result.choice.secondary if pair[1] is not Relation.CASCADE_OF]
    parts += [_quote(relation.value, finding, "") for finding, relation in shown[:_SHOWN]]
    cascade = [finding for finding, relation in result.choice.secondary if relation is Relation.CASCADE_OF]
    if cascade:
        parts.append(_line("cascade", "follows from it, blames nobody:", "dim"))
        parts += [_quote("", finding, "dim") for finding in cascade[:_SHOWN]]
    parts += [_quote("got over", finding, "dim") for finding in result.choice.recovered[:3]]
    return parts


def _facts(result: Attribution) -> list[RenderableType]:
    parts: list[RenderableType] = [Text()]
    progress, coverage = result.progress, result.coverage
    steps = "not known" if progress.last_step is None else f"step {progress.last_step}"
    if progress.trained is False:
        steps = "never came to train"
    saved = "" if progress.saved_step is None else f", checkpoint {progress.saved_step}"
    parts.append(_line("progress", steps + saved))
    if result.counts.same_root_no_advance:
        parts.append(
            _line(
                "repeats",
                f"the same cause {result.counts.same_root_no_advance} times before, without progress",
            )
        )
    if result.decision.rejected:
        parts.append(_line("not done", result.decision.rejected))
    read = f"{len(coverage.files)} files, {coverage.lines:,} lines"
    parts.append(
        _line(
            "looked at", read + (f", {coverage.flight_dumps} dumps" if coverage.flight_dumps else ""), "dim"
        )
    )
    if coverage.missing:
        parts.append(_line("not seen", "; ".join(coverage.missing), "dim"))
    if result.model is not None:
        parts.append(
            _line("model says", str(result.model.get("summary", "")) or str(result.model.get("error", "")))
        )
    return parts


def _quote(label: str, finding: Finding, style: str) -> RenderableType:
    ranks = f" ranks {ranks_text(finding.ranks)}" if len(finding.ranks) > 1 else ""
    times = f" ({finding.count} times{ranks})" if finding.count > 1 else ""
    text = Text(f"{finding.where}{times}\n", style="dim")
    text.append("".join(c if c.isprintable() else "·" for c in finding.excerpt[:200]), style=style or "none")
    return _label(label, text)


def _line(label: str, text: str, style: str = "") -> RenderableType:
    return _label(label, Text(text, style=style))


def _label(label: str, text: Text) -> RenderableType:
    """Return a text that hangs beside its label."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style="bold"), text)
    return grid
