"""``nvrx-doctor``: what is wrong with a site, a batch script or a job, and what to do."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nvrx_slurm.cli import srun
from nvrx_slurm.cli.ft_options import fault_tolerance_options
from nvrx_slurm.cli.parameters import Duration

if TYPE_CHECKING:
    from nvrx_slurm.doctor.launch import Launcher
    from nvrx_slurm.doctor.machine import Machine
    from nvrx_slurm.doctor.render import Explained
    from nvrx_slurm.doctor.timeouts import OwnTimes
    from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
    from nvrx_slurm.slurm import DiagnosisClient

_LAUNCHER = srun.main
_BAD_INPUT = 2
_STOP_MARGIN_S = 15.0
"""What nvrx-srun adds to --workers-stop-timeout before it gives a node up."""


def _client() -> DiagnosisClient:
    from nvrx_slurm.slurm import ScontrolDiagnosis

    return ScontrolDiagnosis()


def _machine() -> Machine:
    from nvrx_slurm.doctor.machine import read_machine

    return read_machine()


@dataclass(frozen=True)
class World:
    """What the commands look at; tests give another one as Click's ``obj``."""

    client: Callable[[], DiagnosisClient] = _client
    machine: Callable[[], Machine] = _machine
    now: Callable[[], float] = time.time


class _Refused(click.ClickException):
    exit_code = _BAD_INPUT

    def show(self, file: object = None) -> None:
        click.echo(f"nvrx-doctor: {self.message}", err=True)


class _CheckByDefault(click.Group):
    """``nvrx-doctor`` and ``nvrx-doctor --json`` mean ``nvrx-doctor check``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["check", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_CheckByDefault, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def main(ctx: click.Context) -> None:
    """Say what is wrong with a site, a batch script or a job, and what to do about it.

    Without a command: check.

    Exit codes: 0 no problem; 1 problems, or Slurm could not be asked; 2 wrong usage.
    """
    ctx.ensure_object(World)


def _or_infinity(limit: float | None) -> float:
    return math.inf if limit is None else limit


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document (nvrx.doctor.v1).")


@main.command()
@fault_tolerance_options
@click.option(
    "--process-group-timeout",
    type=Duration(),
    help="What the script gives init_process_group.  [default: torch's 10m for NCCL]",
)
@click.option("--longest-step", type=Duration(), help="The longest training step, a checkpoint included.")
@click.option("--hard-timeout", type=Duration(), help="hard_timeout of in-process restart, if it is used.")
@click.option("--time-limit", type=Duration(), help="The job's time limit (sbatch --time).")
@_as_json
@click.pass_obj
def check(
    world: World,
    workers_stop_timeout: float,
    process_group_timeout: float | None,
    longest_step: float | None,
    hard_timeout: float | None,
    time_limit: float | None,
    as_json: bool,
    fault_tolerance: FaultToleranceConfig,
) -> None:
    """Check this site's Slurm, this machine, and the order of all time-outs.

    On a compute node: srun -N1 nvrx-doctor.
    """
    from nvrx_slurm.doctor.findings import exit_code
    from nvrx_slurm.doctor.machine import MACHINE
    from nvrx_slurm.doctor.site import CONFIG, SITE, read_site
    from nvrx_slurm.doctor.timeouts import JobTimes, ladders

    site = read_site(world.client())
    machine = world.machine()
    findings = SITE.apply(site)
    if site.config is not None:
        findings += CONFIG.apply(site.config)
    findings += MACHINE.apply(machine)
    times = JobTimes(
        heartbeat_s=_or_infinity(fault_tolerance.rank_heartbeat_timeout),
        initial_heartbeat_s=_or_infinity(fault_tolerance.initial_rank_heartbeat_timeout),
        workers_stop_s=workers_stop_timeout,
        process_group_s=process_group_timeout,
        longest_step_s=longest_step,
        hard_s=hard_timeout,
        time_limit_s=time_limit,
    )
    rungs = ladders(times, _own_times(), site.config)
    orders = [finding for ladder in rungs for finding in ladder.findings()]
    code = exit_code([*findings, *orders], blind=site.config is None)
    if as_json:
        from nvrx_slurm.doctor.document import document

        about = {"host": machine.host}
        click.echo(document("check", [*findings, *orders], code, ladders=rungs, about=about), nl=False)
    else:
        from nvrx_slurm.doctor import render

        console = render.console()
        console.print(f"this site and {machine.host}:", markup=False)
        console.print(render.findings_table(findings))
        console.print()
        console.print("time-outs; each must be below the next one of its group:", markup=False)
        console.print(render.timeouts_table(rungs))
        console.print()
        console.print(render.summary([*findings, *orders]))
    sys.exit(code)


# The same option as nvrx-srun's: same spelling, same default.
check.params.extend(option for option in _LAUNCHER.params if option.name == "workers_stop_timeout")


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@_as_json
@click.pass_obj
def lint(world: World, file: Path, as_json: bool) -> None:
    """Check a batch script before it waits in the queue.

    Reads the #SBATCH lines as sbatch does, and the nvrx-srun line. Options that you give to sbatch itself are
    not seen. Slurm is not asked.
    """
    from nvrx_slurm.doctor.batch_file import UnreadableScriptError, read_batch_file
    from nvrx_slurm.doctor.findings import exit_code
    from nvrx_slurm.doctor.lint import lint as run_lint

    try:
        script = read_batch_file(file, _launcher())
    except UnreadableScriptError as error:
        raise _Refused(str(error)) from error
    findings, rungs = run_lint(script, _own_times(), None)
    code = exit_code(findings)
    if as_json:
        from nvrx_slurm.doctor.document import document

        about = {"file": str(file)}
        click.echo(document("lint", findings, code, ladders=rungs, about=about), nl=False)
    else:
        from nvrx_slurm.doctor import render

        console = render.console()
        if findings:
            console.print(render.lint_list(str(file), findings), crop=False)
        said = render.summary(findings) if findings else f"{file}: nothing to complain about"
        console.print(said, markup=False, soft_wrap=True)
    sys.exit(code)


@main.command()
@click.argument("job_id", metavar="JOBID")
@_as_json
@click.pass_obj
def why(world: World, job_id: str, as_json: bool) -> None:
    """Explain why a job waits, is held, completes or has ended; who can do what about it."""
    from nvrx_slurm.doctor.findings import exit_code
    from nvrx_slurm.doctor.render import Explained
    from nvrx_slurm.doctor.why import explain, headline, is_job_id, read_cases
    from nvrx_slurm.slurm import HostlistError, SlurmUnavailableError, UnknownJobError

    if not is_job_id(job_id):
        raise _Refused(f"{job_id!r} is no job id; accepted: 41, 41_2 (of an array)")
    try:
        cases = read_cases(world.client(), job_id, world.now())
    except UnknownJobError as error:
        raise _Refused(f"{error} (any more): nvrx-report {job_id} reads its journal") from error
    except (SlurmUnavailableError, HostlistError) as error:
        _print_unknown(job_id, str(error), as_json=as_json)
        sys.exit(1)
    told = _journal_says(job_id, cases[0].job.work_dir)
    explained = [Explained(headline(case), explain(case), told if case is cases[0] else ()) for case in cases]
    findings = [finding for job in explained for finding in job.findings]
    code = exit_code(findings)
    _print_why(job_id, explained, code, as_json=as_json)
    sys.exit(code)


def _print_why(job_id: str, explained: Sequence[Explained], code: int, *, as_json: bool) -> None:
    findings = [finding for job in explained for finding in job.findings]
    if as_json:
        from nvrx_slurm.doctor.document import document, encode_finding

        jobs = [
            {
                "headline": job.headline,
                "findings": [encode_finding(finding) for finding in job.findings],
                "journal": list(job.told),
            }
            for job in explained
        ]
        click.echo(document("why", findings, code, about={"job": job_id, "jobs": jobs}), nl=False)
        return
    from nvrx_slurm.doctor import render

    console = render.console()
    for job in explained:
        console.print(render.explanation(job), crop=False)


def _print_unknown(job_id: str, why_not: str, *, as_json: bool) -> None:
    from nvrx_slurm.doctor.findings import Finding, unknown

    finding = Finding("W1", "Slurm", unknown("could not be asked", why_not, "nvrx-doctor check"))
    if as_json:
        from nvrx_slurm.doctor.document import document

        click.echo(document("why", [finding], 1, about={"job": job_id, "jobs": []}), nl=False)
        return
    from nvrx_slurm.doctor import render

    headline = f"job {job_id}: nothing is known"
    render.console().print(render.explanation(render.Explained(headline, [finding])), crop=False)


def _journal_says(job_id: str, work_dir: Path | None) -> Sequence[str]:
    """Return the first lines of the job's report; none without a journal that can be read."""
    import os

    from nvrx_slurm.journal import JournalError
    from nvrx_slurm.report.build import build_report
    from nvrx_slurm.report.headline import headline
    from nvrx_slurm.report.source import JournalSource, NoSuchRunError, locate

    if not job_id.isdecimal():
        return ()
    try:
        source = JournalSource(locate(job_id, environ=os.environ, work_dir=lambda _: work_dir))
        source.update()
        report = build_report(source.records, time.time(), read=source.read_state)
    except (NoSuchRunError, JournalError, OSError):
        return ()
    return (f"its journal, {source.path}:", *(f"  {line}" for line in headline(report)))


def _own_times() -> OwnTimes:
    from nvrx_slurm.doctor.timeouts import OwnTimes
    from nvrx_slurm.wire import rpc

    def silence_s(options: Iterable[tuple[str, object]]) -> float:
        found = dict(options)
        return sum(int(str(found[f"grpc.keepalive_{part}_ms"])) for part in ("time", "timeout")) / 1000

    return OwnTimes(
        keep_alive_s=silence_s(rpc.SERVER_OPTIONS),
        cut_off_s=silence_s(rpc.CLIENT_OPTIONS),
        stop_margin_s=_STOP_MARGIN_S,
    )


def _launcher() -> Launcher:
    """Return nvrx-srun's options as its own command declares them."""
    from nvrx_slurm.doctor.launch import Launcher, LauncherOption
    from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig

    config = FaultToleranceConfig()
    context = _LAUNCHER.make_context("nvrx-srun", ["script.py"])
    defaults = {
        **context.params,
        "heartbeat_timeout": config.rank_heartbeat_timeout,
        "initial_heartbeat_timeout": config.initial_rank_heartbeat_timeout,
    }
    options = {}
    for parameter in _LAUNCHER.params:
        if not isinstance(parameter, click.Option) or parameter.name is None:
            continue
        option = LauncherOption(parameter.name, not parameter.is_flag, _converter(parameter, context))
        options.update(dict.fromkeys((*parameter.opts, *parameter.secondary_opts), option))
    return Launcher(options, defaults)


def _converter(parameter: click.Option, context: click.Context) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            return parameter.type.convert(text, parameter, context)
        except click.BadParameter as error:
            raise ValueError(error.message) from error

    return convert
