"""``nvrx-report stragglers``: which ranks are slow, since when, and how sure that is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli.parameters import Count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

    from nvrx_slurm.report.follow import World
    from nvrx_slurm.report.model import JobReport, Moment
    from nvrx_slurm.report.source import JournalSource
    from nvrx_slurm.report.views import LineView

_EXPORT_COLUMNS = 120


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", metavar="RUN_DIR|JOBID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (nvrx.stragglers.v1).")
@click.option("--follow", is_flag=True, help="Show it live until the job ends; Ctrl-C ends it sooner.")
@click.option("--top", type=Count(1), default=16, show_default=True, help="Ranks and nodes, the worst first.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the view as an image.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the view as a page.")
@click.pass_context
def stragglers(
    context: click.Context,
    run: str,
    as_json: bool,
    follow: bool,
    top: int,
    svg: Path | None,
    html: Path | None,
) -> None:
    """Show which ranks of a job are slow: a heat map of ranks over time, the worst ranks, and their nodes.

    A score is the median of comparable ranks over a rank's own time, in the section where it is worst: 1 is
    as fast as the others, 0.5 takes twice as long.
    """
    from nvrx_slurm.cli.report import in_slurm, reading, work_dir
    from nvrx_slurm.report.follow import World
    from nvrx_slurm.report.source import JournalSource, locate
    from nvrx_slurm.report.stragglers import build_stragglers, encode
    from nvrx_slurm.report.stragglers_render import render
    from nvrx_slurm.report.views import ReportConsole

    with reading(run):
        path = locate(run, environ=os.environ, work_dir=work_dir, must_exist=not follow)
        source = JournalSource(path)
        if follow:
            _follow(source, World(now=time.time, wait=time.sleep, in_slurm=in_slurm), top, quiet=as_json)
        source.update()
        found = build_stragglers(source.records)
        if as_json:
            click.echo(encode(found, top), nl=False)
        else:
            ReportConsole(highlight=False).print(render(found, top))
        for file, save in ((svg, _save_svg), (html, _save_html)):
            if file is not None:
                try:
                    save(_recorded(lambda console: console.print(render(found, top))), file)
                except OSError as error:
                    raise click.FileError(str(file), f"it cannot be written: {error.strerror}") from error


def _recorded(draw: Callable[[Console], None]) -> Console:
    from rich.console import Console

    with open(os.devnull, "w") as nowhere:
        console = Console(
            record=True, width=_EXPORT_COLUMNS, file=nowhere, force_terminal=True, highlight=False
        )
        draw(console)
    return console


def _save_svg(console: Console, file: Path) -> None:
    console.save_svg(str(file), title="nvrx-report stragglers", clear=False)


def _save_html(console: Console, file: Path) -> None:
    console.save_html(str(file), clear=False)


def _follow(source: JournalSource, world: World, top: int, *, quiet: bool) -> None:
    from nvrx_slurm.report.follow import follow
    from nvrx_slurm.report.views import LineView, ReportConsole, SilentView

    console = ReportConsole(highlight=False)
    try:
        if quiet:
            follow(source, SilentView(source.path), world)
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            from rich.live import Live

            with Live(console=console, auto_refresh=False, transient=True) as live:
                follow(source, _LiveStragglers(source, live, top), world)
        else:
            follow(source, _SlowLines(LineView(console, source.path)), world)
            console.print()
    except KeyboardInterrupt:
        pass


class _LiveStragglers:
    """Draws the whole view anew."""

    redraws = True

    def __init__(self, source: JournalSource, live: Live, top: int) -> None:
        self._source = source
        self._live = live
        self._top = top

    def waiting(self) -> None:
        from rich.text import Text

        self._live.update(Text(f"waiting for the first event in {self._source.path}"), refresh=True)

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        from nvrx_slurm.report.stragglers import build_stragglers
        from nvrx_slurm.report.stragglers_render import ranks_that_fit, render

        shown = ranks_that_fit(self._live.console.height, self._top)
        view = render(build_stragglers(self._source.records), shown)
        self._live.update(view, refresh=True)


class _SlowLines:
    """Prints what is new of slow ranks, a line each."""

    redraws = False

    def __init__(self, lines: LineView) -> None:
        self._lines = lines

    def waiting(self) -> None:
        self._lines.waiting()

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        from nvrx_slurm.report.model import MomentKind

        slow = tuple(moment for moment in new if moment.kind is MomentKind.STRAGGLER)
        self._lines.show(report, slow)
