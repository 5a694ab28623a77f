"""``nvrx-srun``: run a training script on the nodes of this Slurm job, through faults."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.ft_options import fault_tolerance_options
from nvrx_slurm.cli.help_sections import SectionedCommand
from nvrx_slurm.cli.limit_options import limit_options
from nvrx_slurm.cli.parameters import Count, Duration
from nvrx_slurm.cli.program import check_module, check_nproc, check_text, find_program
from nvrx_slurm.interpreter import console_script
from nvrx_slurm.wire.messages import Program

_OUTSIDE = """not inside a Slurm allocation. Two ways to get one:

  a batch script:  sbatch --no-kill --requeue --open-mode=append -N {nodes} --wrap {wrapped}
  interactively:   salloc --no-kill -N {nodes} {command}"""
_AS_TYPED = f"{__name__}.as_typed"


class _Command(SectionedCommand):
    """Keeps the user's words, for messages that repeat them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_AS_TYPED] = list(args)
        return super().parse_args(ctx, args)


def _outside(context: click.Context) -> str:
    """Return the ways into an allocation with what the user typed, and a spare unless that says how many."""
    from nvrx_slurm.coordinator.preparation import NodeCountError, parse_nnodes

    words: list[str] = context.meta[_AS_TYPED]
    spares: int | None = context.params["spares"]
    nnodes: str | None = context.params["nnodes"]
    if nnodes is not None:
        try:
            nodes = parse_nnodes(nnodes)[1]
        except NodeCountError as error:
            return str(error)
    elif spares is not None:
        nodes = 4 + spares
    else:
        words, nodes = ["--spares", "1", *words], 5
    command = shlex.join(["nvrx-srun", *words])
    return _OUTSIDE.format(nodes=nodes, wrapped=shlex.quote(f"exec {command}"), command=command)


def _agent_command() -> str:
    agent = console_script("nvrx-agent")
    if not os.path.exists(agent):
        raise click.ClickException(f"{agent} is missing: install this package with pip again")
    return agent


@click.command(
    cls=_Command,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "allow_interspersed_args": False,
    },
)
@click.option(
    "--nproc-per-node",
    "--nproc_per_node",
    default="auto",
    show_default=True,
    metavar="N|auto|gpu|cpu",
    help="Ranks per node. auto: the job's GPUs on a node, 1 without GPUs.",
)
@click.option(
    "--spares",
    type=Count(0),
    help="Nodes of the allocation that are kept idle until another is lost.  [default: 0]",
)
@click.option(
    "--nnodes",
    metavar="MIN:MAX",
    help="The same, said as to torchrun: MIN nodes train, the rest of up to MAX are spares.",
)
@click.option(
    "--rejoin-timeout",
    type=Duration(or_zero=True),
    default="60s",
    show_default=True,
    help="Too few nodes are left: how long to wait for a lost one to come back; 0: lost nodes stay away.",
)
@click.option(
    "--ft-segment",
    "segment",
    type=Count(1),
    default=1,
    metavar="N",
    help="Each N nodes of the group, in order, are of one NVLink domain.",
)
@click.option(
    "--replacement-group-size",
    "group_size",
    type=Count(1),
    default=1,
    metavar="N",
    help="Nodes with the same NVRX_REPLACEMENT_GROUP_ID train only while N of them are there.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=Count(0),
    default=10,
    show_default=True,
    help="Restarts of all ranks within this allocation; after them the job fails.",
)
@fault_tolerance_options
@limit_options
@click.option(
    "--time-limit-margin",
    type=Duration(or_zero=True),
    default="120s",
    show_default=True,
    help="How long before the job's time limit ranks are asked to save and stop; 0: not at all.",
)
@click.option(
    "--workers-stop-timeout",
    type=Duration(),
    default="15s",
    show_default=True,
    help="Between SIGTERM and SIGKILL when ranks are stopped for a restart.",
)
@click.option(
    "--warm-start",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Fork ranks from a process that has imported torch already.",
)
@click.option(
    "--standby-coordinator",
    is_flag=True,
    help="When the batch host is lost, another node goes on with the job in the same allocation; otherwise "
    "the job is requeued without that host.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Journal and logs, on a shared file system."
    "  [default: $NVRX_RUN_DIR or $SLURM_SUBMIT_DIR/nvrx/$SLURM_JOB_ID]",
)
@click.option(
    "--srun-arg", "srun_args", multiple=True, metavar="ARG", help="Passed on to srun; may be repeated."
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program of any kind; no warm start.")
@click.option("--dry-run", is_flag=True, help="Print the exact srun line and exit.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(
    script: str, args: tuple[str, ...], module: bool, no_python: bool, dry_run: bool, **given: Any
) -> None:
    """Train SCRIPT on every node of this Slurm job, and go on when a rank or a node fails.

    Ranks get the environment that torchrun sets. A killed, crashed or hung rank restarts all ranks in the
    same allocation; a lost node is replaced by a spare. Everything after SCRIPT belongs to it.

    Exit codes: 0 all ranks succeeded, or one shut the workload down; 1 failed, restarts used up; 2 wrong
    usage; 75 too few nodes or asked to stop: requeue the job; 93 no progress: do not restart; 128 + N stopped
    by signal N.
    """
    from nvrx_slurm.cli.srun_job import (
        NoAddressError,
        NotInAllocationError,
        Options,
        StartError,
        find_allocation,
        run,
    )

    context = click.get_current_context()
    check_text(context)
    options = Options(**given)
    check_nproc(options.nproc_per_node)
    try:
        allocation = find_allocation(options)
        kind, target = find_program(script, module, no_python)
        if module:
            check_module(target)
        if options.standby_coordinator and not allocation.can_be_requeued:
            raise click.BadParameter(
                "only for a batch job that may be requeued (sbatch --requeue): a requeue is how Slurm learns "
                "the exit code when the batch script is gone",
                param_hint="--standby-coordinator",
            )
        step = allocation.step([_agent_command()], options.srun_args)
        if dry_run:
            click.echo(shlex.join(step.argv()))
            return
        program = Program(kind=kind, target=target, args=list(args), cwd=os.getcwd())
        sys.exit(run(options, allocation, step, program, lambda text: click.echo(text, err=True)))
    except NotInAllocationError as error:
        raise click.UsageError(_outside(context)) from error
    except StartError as error:
        raise click.UsageError(str(error)) from error
    except NoAddressError as error:
        raise click.ClickException(str(error)) from error
