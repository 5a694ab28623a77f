"""How a followed report is shown: drawn again and again on a terminal, line by line in a pipe."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from nvrx_slurm.report.model import JobReport, Moment
from nvrx_slurm.report.render import moment_line, render

_LINES_AROUND = 20
"""What a report has, roughly, besides its facts, its table of cycles and its timeline."""
_FACT_LINES = 9


class ReportConsole(Console):
    """A console on standard output; a reader that goes away (``| head``) ends the command quietly."""

    def on_broken_pipe(self) -> NoReturn:
        try:
            super().on_broken_pipe()
        finally:
            raise SystemExit(0)


class SilentView:
    """Shows nothing; for a document at the end."""

    redraws = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def waiting(self) -> None:
        _say_waiting(self._path)

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        pass


class LineView:
    """Prints each new moment as one line."""

    redraws = False

    def __init__(self, console: Console, path: Path) -> None:
        self._console = console
        self._path = path

    def waiting(self) -> None:
        _say_waiting(self._path)

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        assert report.started_at is not None
        for moment in new:
            self._console.print(moment_line(moment, report.started_at), soft_wrap=True)


def frame(report: JobReport, height: int) -> RenderableType:
    """Return the report so that it fits a terminal of ``height`` lines; the facts give way first."""
    room = height - _LINES_AROUND
    facts = room - _FACT_LINES >= 8
    return render(report, lines=max(2, (room - _FACT_LINES * facts) // 2), facts=facts)


class LiveView:
    """Keeps the report on the terminal up to date; a context manager."""

    redraws = True

    def __init__(self, console: Console, path: Path) -> None:
        self._console = console
        self._path = path
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def waiting(self) -> None:
        self._live.update(Text(f"waiting for the first event in {self._path} (Ctrl-C ends)"), refresh=True)

    def show(self, report: JobReport, new: tuple[Moment, ...]) -> None:
        self._live.update(frame(report, self._console.height), refresh=True)


def _say_waiting(path: Path) -> None:
    print(f"nvrx-report: waiting for the first event in {path} (Ctrl-C ends)", file=sys.stderr, flush=True)
