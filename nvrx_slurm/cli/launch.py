"""``nvrx-launch``: run a training script on nodes of any kind, through faults, with torchrun's options."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.ft_options import fault_tolerance_options
from nvrx_slurm.cli.help_sections import SectionedCommand
from nvrx_slurm.cli.launch_flags import foreign_flags
from nvrx_slurm.cli.limit_options import limit_options
from nvrx_slurm.cli.parameters import Count, Duration
from nvrx_slurm.cli.program import check_module, check_nproc, check_text, find_program
from nvrx_slurm.wire.messages import Program, ProgramKind


def _option(*names: str, **keywords: Any) -> Callable[..., Any]:
    """An option that ``PET_…`` sets too, as torchrun's."""
    longest = max(names, key=len)
    return click.option(
        *names, envvar=f"PET_{longest.removeprefix('--').replace('-', '_').upper()}", **keywords
    )


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


@click.command(
    cls=SectionedCommand,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
        "token_normalize_func": _with_dashes,
    },
)
@_option(
    "--nnodes", default="1:1", show_default=True, metavar="N|MIN:MAX", help="MIN nodes train, others wait."
)
@_option("--nproc-per-node", default="1", show_default=True, metavar="N|auto|gpu|cpu", help="Ranks per node.")
@_option(
    "--rdzv-endpoint", default="", metavar="HOST[:PORT]", help="The node that coordinates.  [port: 29400]"
)
@_option("--rdzv-id", default="none", show_default=True, help="Name of the job, the same on every node.")
@_option(
    "--rdzv-backend",
    default="",
    help="c10d or static.  [default: c10d with --rdzv-endpoint and no --node-rank, else static]",
)
@_option("--rdzv-conf", default="", metavar="KEY=VALUE,…", help="is_host, join_timeout and others.")
@_option("--standalone", is_flag=True, help="One node: everything about the rendezvous is chosen.")
@_option("--node-rank", type=Count(0), help="Static rendezvous: 0 coordinates.  [default: 0]")
@_option(
    "--master-addr", default="127.0.0.1", show_default=True, help="Static rendezvous: address of node 0."
)
@_option(
    "--master-port", type=click.IntRange(1, 65535), help="Static rendezvous: its port.  [default: 29500]"
)
@_option("--local-addr", help="This node's name and, where it coordinates, its address.  [default: its FQDN]")
@_option("--max-restarts", type=Count(0), default=0, show_default=True, help="Restarts of all ranks.")
@_option("--workers-stop-timeout", type=Duration(), help="SIGTERM to SIGKILL for a restart.  [default: 15s]")
@_option(
    "--term-timeout",
    type=Duration(),
    help="The same when the launcher itself gets a signal, which the ranks get too.  [default: 30m]",
)
@_option("--shutdown-timeout", type=Duration(), help="Both of these, where they are not given.")
@_option(
    "--signals-to-handle",
    default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    show_default=True,
    help="Signals that are passed on to the ranks and end the job.",
)
@click.option(
    "--rejoin-timeout",
    type=Duration(or_zero=True),
    default="0",
    show_default=True,
    help="Too few nodes are left: how long to wait for launchers that are started again; 0: not at all.",
)
@click.option(
    "--ft-segment",
    "segment",
    type=Count(1),
    default=1,
    metavar="N",
    help="Each N nodes of the group, in order, are of one NVLink domain.",
)
@_option("--role", default="default", show_default=True, help="ROLE_NAME of the ranks.")
@_option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@_option("--no-python", is_flag=True, help="SCRIPT is a program of any kind; no warm start.")
@_option("--run-path", is_flag=True, help="As without: a script runs in a fork of an interpreter anyway.")
@_option(
    "--log-dir", type=click.Path(path_type=Path), help="The run directory is made in it, named by the job."
)
@_option("-r", "--redirects", default="0", show_default=True, help="3: output in the run directory only.")
@_option("-t", "--tee", default="0", show_default=True, help="3: output here too, each line with its rank.")
@_option("--local-ranks-filter", default="", help="Show the output of these local ranks only.")
@_option("--virtual-local-rank", is_flag=True, help="Each rank sees its own GPU only, as LOCAL_RANK 0.")
@click.option(
    "--warm-start",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Fork ranks from a process that has imported torch already.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    envvar="NVRX_RUN_DIR",
    help="Journal and logs.  [default: ./nvrx/RDZV_ID]",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="NVRX_TOKEN_FILE",
    help="The secret that the nodes share.  [default: token in the run directory]",
)
@fault_tolerance_options
@limit_options
@foreign_flags
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(
    script: str, args: tuple[str, ...], module: bool, no_python: bool, run_path: bool, **given: Any
) -> None:
    """Train SCRIPT on every node on which this is started, and go on when a rank or a node fails.

    Takes torchrun's and ft_launcher's options, with dashes or underscores, and PET_* variables. Start it on
    each node, or once with --standalone. Inside a Slurm job nvrx-srun does more.

    Exit codes: 0 all ranks succeeded, or one shut the workload down; 1 failed, restarts used up; 2 wrong
    usage; 75 too few nodes: start the job again; 93 no progress: do not; 128 + N stopped by signal N.
    """
    from nvrx_slurm.coordinator.run_dir import RunDirError
    from nvrx_slurm.coordinator.terminal import open_standard_streams
    from nvrx_slurm.launch.job import LaunchError, run_launch
    from nvrx_slurm.launch.plan import Options, plan_launch
    from nvrx_slurm.launch.processes import CannotCoordinateError
    from nvrx_slurm.launch.token_file import TokenFileError

    open_standard_streams()
    check_text(click.get_current_context())
    check_nproc(given["nproc_per_node"])
    program = _program(script, args, module=module, no_python=no_python and not run_path)
    try:
        launch, notes = plan_launch(Options(**given), program, dict(os.environ))
        for note in notes:
            click.echo(f"nvrx-launch: note: {note}", err=True)
        code = run_launch(launch)
    except (ValueError, OSError, LaunchError, RunDirError, TokenFileError, CannotCoordinateError) as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


def _program(script: str, args: tuple[str, ...], *, module: bool, no_python: bool) -> Program:
    """Return what a rank runs; with another interpreter in ``PYTHON_EXEC``, that one."""
    kind, target = find_program(script, module, no_python)
    cwd, python = os.getcwd(), os.environ.get("PYTHON_EXEC")
    if not python and kind is ProgramKind.MODULE:
        check_module(target)
    if not python or kind is ProgramKind.EXECUTABLE:
        return Program(kind=kind, target=target, args=list(args), cwd=cwd)
    _, interpreter = find_program(python, module=False, no_python=True)
    words = ["-u", "-m", target] if kind is ProgramKind.MODULE else ["-u", target]
    return Program(kind=ProgramKind.EXECUTABLE, target=interpreter, args=[*words, *args], cwd=cwd)
