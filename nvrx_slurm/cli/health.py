"""``nvrx-health``: is this node fit for a job, and if not, what is wrong and what to do."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvrx_slurm.cli import health_hooks
from nvrx_slurm.cli.health_parts import UNKNOWN, Refused, config_option, configured, make_node, state_option
from nvrx_slurm.cli.parameters import Duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nvrx_slurm.health.report import HealthReport

_STAGES = ("prolog", "epilog", "restart", "periodic", "manual")


class _Group(click.Group):
    """Wrong usage is UNKNOWN: no hook may take it for a bad node."""

    def main(
        self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        # Where a caller has it ignored, that is inherited, and nobody can wait for a child.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except click.exceptions.Abort:
            code = UNKNOWN
        except click.ClickException as error:
            error.show()
            code = UNKNOWN
        if standalone_mode:
            sys.exit(code)
        return code


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Say whether this node is fit for a job; if not, what is wrong and what to do.

    Exit codes: 0 ok, 1 warnings, 2 something has failed, 3 unknown or wrong usage.
    """


for _command in (
    health_hooks.hook,
    health_hooks.install_hooks,
    health_hooks.uninstall_hooks,
    health_hooks.nodes,
    health_hooks.resume,
):
    main.add_command(_command)

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document (nvrx.health.v1).")


@main.command()
@click.option(
    "--stage",
    type=click.Choice(_STAGES),
    default="manual",
    show_default=True,
    help="Which checks to run: those of a hook, of a job's restart, of HealthCheckProgram, or all.",
)
@click.option(
    "--only",
    "only",
    metavar="CHECK,…",
    multiple=True,
    help="Run these alone, whatever the stage; may be repeated.",
)
@click.option(
    "--budget", type=Duration(), help="All checks end within this.  [default: of the configuration, 10s]"
)
@click.option(
    "--prom",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a textfile for Prometheus' node_exporter.",
)
@_as_json
@config_option
@state_option
def check(
    stage: str,
    only: tuple[str, ...],
    budget: float | None,
    prom: Path | None,
    as_json: bool,
    config_path: Path | None,
    state_dir: Path | None,
) -> int:
    """Run the checks of a stage side by side, and say what each has found."""
    from nvrx_slurm.health.report import UnknownCheckError, examine, select

    checks, config = configured(config_path)
    node = make_node(stage, config, state_dir)
    try:
        chosen = select(checks, node.stage, config, [name for words in only for name in words.split(",")])
    except UnknownCheckError as error:
        raise Refused(str(error)) from error
    report = examine(chosen, node, config, budget)
    _print(report, as_json)
    if prom is not None:
        _write_prometheus(report, prom)
    return report.exit_code.value


@main.command()
@config_option
@state_option
def baseline(config_path: Path | None, state_dir: Path | None) -> None:
    """Remember what this node has now: later runs compare with it.

    GPUs, NVLinks, network ports and their counters, and how far the kernel log has been dealt with. Take one
    when the node is known to be good: after a repair, and at the end of a prolog that has found nothing.
    """
    from nvrx_slurm.health.take_baseline import take_baseline
    from nvrx_slurm.health.unavailable import UnavailableError

    _, config = configured(config_path)
    node = make_node("manual", config, state_dir)
    taken = take_baseline(node)
    try:
        taken.save(node.state)
    except UnavailableError as error:
        raise Refused(f"{error.signal}: {error.why}") from error
    gpus = "GPUs not known" if taken.gpus is None else f"{len(taken.gpus)} GPUs"
    log = "not readable" if taken.kernel_log_sequence is None else f"up to {taken.kernel_log_sequence}"
    click.echo(f"baseline in {node.state.path}: {gpus}, {len(taken.ports)} network ports, kernel log {log}")


@main.command()
@click.argument("check_name", metavar="CHECK", required=False)
@config_option
def explain(check_name: str | None, config_path: Path | None) -> None:
    """Tell what CHECK reads, how it decides, and its thresholds here; without CHECK, list all."""
    from nvrx_slurm.health.explain import explanation, overview

    checks, config = configured(config_path)
    if check_name is None:
        click.echo("\n".join(overview(checks, config)))
    elif check_name in checks:
        click.echo("\n".join(explanation(checks[check_name], config)))
    else:
        raise Refused(f"there is no check {check_name!r}; there are {', '.join(checks)}")


def _print(report: HealthReport, as_json: bool) -> None:
    from nvrx_slurm.health.text import lines, summary

    if as_json:
        click.echo(report.to_json(), nl=False)
    elif sys.stdout.isatty():
        from rich.console import Console

        from nvrx_slurm.health.text import table

        console = Console()
        console.print(table(report))
        console.print(summary(report), markup=False, highlight=False)
    else:
        click.echo("\n".join(lines(report)))


def _write_prometheus(report: HealthReport, path: Path) -> None:
    from nvrx_slurm.health.text import write_prometheus

    try:
        write_prometheus(report, path)
    except OSError as error:
        # A full disk of the exporter's says nothing of what was found.
        click.echo(f"nvrx-health: {path} cannot be written: {error.strerror}", err=True)
