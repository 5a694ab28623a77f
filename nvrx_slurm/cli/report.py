"""``nvrx-report``: what happened in a job, and what happens now."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nvrx_slurm.report.follow import World
    from nvrx_slurm.report.model import JobReport
    from nvrx_slurm.report.source import JournalSource

_SLURM_TIMEOUT_S = 3.0
"""A report does without an answer that takes longer."""
_OVER_IN_SLURM = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)


class _Refused(click.ClickException):
    exit_code = 2

    def show(self, file: object = None) -> None:
        click.echo(f"nvrx-report: {self.message}", err=True)


def work_dir(job: str) -> Path | None:
    """Ask Slurm for a job's working directory."""
    from nvrx_slurm.slurm import HostlistError, ScontrolClient, SlurmUnavailableError, UnknownJobError

    try:
        return ScontrolClient(timeout_s=_SLURM_TIMEOUT_S).job(job).work_dir
    except (SlurmUnavailableError, UnknownJobError, HostlistError):
        return None


def in_slurm(job: str) -> bool | None:
    """Ask Slurm whether it still has a job that waits, runs or completes."""
    from nvrx_slurm.slurm import HostlistError, ScontrolClient, SlurmUnavailableError, UnknownJobError

    if not job.isdecimal():
        return None
    try:
        return ScontrolClient(timeout_s=_SLURM_TIMEOUT_S).job(job).state not in _OVER_IN_SLURM
    except UnknownJobError:
        return False
    except (SlurmUnavailableError, HostlistError):
        return None


class _Command(click.Command):
    """The whole report; with ``stragglers`` as its first word, the one on slow ranks."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] == "stragglers":
            from nvrx_slurm.cli.report_stragglers import stragglers

            return stragglers.make_context(f"{info_name} stragglers", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@contextlib.contextmanager
def reading(run: str) -> Iterator[None]:
    """Turn what goes wrong when a journal is read and shown into a sentence and exit code 2."""
    from nvrx_slurm.journal import JournalError
    from nvrx_slurm.report.source import NoSuchRunError

    try:
        yield
    except NoSuchRunError as error:
        raise _Refused(str(error)) from error
    except JournalError as error:
        raise _Refused(f"{run}: {error}") from error
    except BrokenPipeError:
        # Whoever read the report has seen enough; the interpreter must not stumble over it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise _Refused(f"{error.filename or run} cannot be read: {error.strerror or error}") from error


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", metavar="RUN_DIR|JOBID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document (nvrx.report.v1).")
@click.option("--follow", is_flag=True, help="Show the job live until it ends; Ctrl-C ends it sooner.")
@click.option("--full", is_flag=True, help="Every cycle and every line of the timeline.")
def main(run: str, as_json: bool, follow: bool, full: bool) -> None:
    """Show what failed in a job, where, when, and what it cost.

    RUN_DIR is the run directory of an nvrx-srun job. A JOBID is looked up in $NVRX_RUN_DIR, ./nvrx/JOBID,
    $SLURM_SUBMIT_DIR/nvrx/JOBID and in the job's working directory as Slurm tells it.

    With --follow, each event becomes a line when the output is no terminal, and the report comes at the end.
    With --json as well, only the document at the end is printed. A job that ended with code 75 is followed
    on while Slurm has it.

    nvrx-report stragglers RUN_DIR|JOBID shows which ranks are slow; it has options of its own. (A run
    directory of that name: ./stragglers.)
    """
    from nvrx_slurm.report.follow import World, report_now
    from nvrx_slurm.report.source import JournalSource, locate

    world = World(now=time.time, wait=time.sleep, in_slurm=in_slurm)
    with reading(run):
        path = locate(run, environ=os.environ, work_dir=work_dir, must_exist=not follow)
        source = JournalSource(path)
        if follow:
            _follow(source, world, quiet=as_json)
        source.update()
        _print(report_now(source, world), as_json=as_json, full=full)


def _follow(source: JournalSource, world: World, *, quiet: bool) -> None:
    """Show the journal until the job is over, or until Ctrl-C."""
    from nvrx_slurm.report.follow import follow
    from nvrx_slurm.report.views import LineView, LiveView, ReportConsole, SilentView

    console = ReportConsole(highlight=False)
    try:
        if quiet:
            follow(source, SilentView(source.path), world)
        elif sys.stdout.isatty() and not console.is_dumb_terminal:
            with LiveView(console, source.path) as view:
                follow(source, view, world)
        else:
            follow(source, LineView(console, source.path), world)
            console.print()
    except KeyboardInterrupt:
        pass


def _print(report: JobReport, *, as_json: bool, full: bool) -> None:
    from nvrx_slurm.report.document import encode
    from nvrx_slurm.report.render import SHORT_LINES, render
    from nvrx_slurm.report.views import ReportConsole

    if as_json:
        click.echo(encode(report), nl=False)
        return
    ReportConsole(highlight=False).print(render(report, lines=None if full else SHORT_LINES))
