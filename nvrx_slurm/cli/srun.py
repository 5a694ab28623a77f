"""``nvrx-srun``: run a training script on the nodes of this Slurm job, through faults."""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import sys
from pathlib import Path

import click

from nvrx_slurm.cli.ft_options import fault_tolerance_options
from nvrx_slurm.cli.help_sections import SectionedCommand
from nvrx_slurm.cli.limit_options import limit_options
from nvrx_slurm.cli.parameters import Count, Duration
from nvrx_slurm.cli.program import check_module, check_nproc, check_text, find_program
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.interpreter import console_script
from nvrx_slurm.slurm import SlurmClient

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


def _max_batch_requeue(client: SlurmClient) -> int | None:
    from nvrx_slurm.slurm import SlurmUnavailableError

    try:
        return client.config().max_batch_requeue
    except SlurmUnavailableError:
        return None


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
    nproc_per_node: str,
    spares: int | None,
    nnodes: str | None,
    rejoin_timeout: float,
    segment: int,
    group_size: int,
    max_restarts: int,
    workers_stop_timeout: float,
    warm_start: str,
    standby_coordinator: bool,
    run_dir: Path | None,
    srun_args: tuple[str, ...],
    module: bool,
    no_python: bool,
    dry_run: bool,
    script: str,
    args: tuple[str, ...],
    fault_tolerance: FaultToleranceConfig,
    limits: Limits,
    time_limit_margin: float,
) -> None:
    """Train SCRIPT on every node of this Slurm job, and go on when a rank or a node fails.

    Ranks get the environment that torchrun sets. A killed, crashed or hung rank restarts all ranks in the
    same allocation; a lost node is replaced by a spare. Everything after SCRIPT belongs to it.

    Exit codes: 0 all ranks succeeded, or one shut the workload down; 1 failed, restarts used up; 2 wrong
    usage; 75 too few nodes or asked to stop: requeue the job; 93 no progress: do not restart; 128 + N stopped
    by signal N.
    """
    from nvrx_slurm.coordinator.address import NoAddressError, address_toward
    from nvrx_slurm.coordinator.cycle_info import current_path
    from nvrx_slurm.coordinator.deferred_exit import deferred_code, report_exit
    from nvrx_slurm.coordinator.job_lock import JobInUseError, claim_job
    from nvrx_slurm.coordinator.lease import Fence
    from nvrx_slurm.coordinator.past import past_of_job
    from nvrx_slurm.coordinator.policy import Policy
    from nvrx_slurm.coordinator.preparation import NodeCountError, claim_own, count_active, first_cycle
    from nvrx_slurm.coordinator.run_dir import RunDir, RunDirError
    from nvrx_slurm.coordinator.terminal import open_standard_streams
    from nvrx_slurm.journal import JournalVersionError
    from nvrx_slurm.slurm import (
        AgentStep,
        JobEnvironment,
        NotInAllocationError,
        ScontrolClient,
        SlurmUnavailableError,
        UnknownJobError,
        ancestor_titles,
        scrubbed_environment,
        surrounding_step,
    )

    open_standard_streams()
    check_text(click.get_current_context())
    check_nproc(nproc_per_node)
    try:
        job = JobEnvironment.from_environ(os.environ, Path.cwd())
    except NotInAllocationError as error:
        raise click.UsageError(_outside(click.get_current_context())) from error
    if (inside := surrounding_step(os.environ, ancestor_titles())) is not None:
        raise click.UsageError(
            f"this is a task of job step {inside}, but nvrx-srun starts srun itself: call it without srun, in"
            " the batch script or from salloc"
        )
    kind, target = find_program(script, module, no_python)
    if module:
        check_module(target)
    client = ScontrolClient()
    try:
        in_slurm = client.job(job.job_id)
    except (SlurmUnavailableError, UnknownJobError) as error:
        raise click.UsageError(f"cannot find out the nodes of job {job.job_id}: {error}") from error
    nodes = in_slurm.nodes
    try:
        active_nodes = count_active(len(nodes), spares, nnodes, segment)
    except NodeCountError as error:
        raise click.UsageError(str(error)) from error
    if in_slurm.restarts > job.restart_count:
        raise click.UsageError(
            f"Slurm has started job {job.job_id} again since: this is restart {job.restart_count}, and the "
            f"newest is {in_slurm.restarts}"
        )
    if standby_coordinator and not (in_slurm.batch and in_slurm.requeue):
        raise click.BadParameter(
            "only for a batch job that may be requeued (sbatch --requeue): a requeue is how Slurm learns the "
            "exit code when the batch script is gone",
            param_hint="--standby-coordinator",
        )
    step = AgentStep(nodes=nodes, command=[_agent_command()], extra=srun_args)
    if dry_run:
        click.echo(shlex.join(step.argv()))
        return

    chosen = run_dir or os.environ.get("NVRX_RUN_DIR")
    directory = RunDir(Path(chosen or job.submit_dir / "nvrx" / job.job_id).absolute())
    try:
        held = claim_job(job.job_id, in_slurm.submitted)
        if held is not None:
            click.get_current_context().call_on_close(held.close)
        if chosen:
            lock = directory.claim(Fence(job.job_id, job.restart_count, 0))
        else:
            lock, aside = claim_own(directory, job.job_id, job.restart_count, in_slurm.submitted)
            if aside is not None:
                click.echo(
                    f"an earlier job had the id {job.job_id}: {aside} is its run directory now", err=True
                )
        deferred = deferred_code(directory.journal, job.job_id)
        if deferred is not None:
            report_exit(directory.journal, job.job_id, job.restart_count, deferred)
            click.echo(
                f"nvrx-srun: the job has ended with {deferred} already, when its batch host was gone: "
                "this start only tells Slurm",
                err=True,
            )
            sys.exit(deferred)
    except (JobInUseError, RunDirError) as error:
        raise click.UsageError(str(error)) from error
    except (OSError, JournalVersionError) as error:
        raise click.UsageError(f"run directory {directory.path}: {error}") from error

    from nvrx_slurm.coordinator.ft_state import FtStateError, load_ft_state
    from nvrx_slurm.coordinator.job import run_job
    from nvrx_slurm.coordinator.job_spec import JobSpec
    from nvrx_slurm.wire import messages as msg

    others = [node for node in nodes if node != job.node_name] or list(nodes)
    try:
        address = address_toward(others, client.node_address)
        cycle = first_cycle(directory)
        past = past_of_job(directory.journal, job.job_id, job.restart_count, [target, *args])
        monitoring = fault_tolerance.monitoring()
        if fault_tolerance.calc_ft_timeouts:
            monitoring = load_ft_state(directory.ft_state, monitoring)
    except FtStateError as error:
        raise click.UsageError(str(error)) from error
    except NoAddressError as error:
        raise click.ClickException(str(error)) from error
    except JournalVersionError as error:
        raise click.UsageError(f"{directory.journal}: {error}") from error
    spec = JobSpec(
        job_id=job.job_id,
        restart_count=job.restart_count,
        submitted=in_slurm.submitted,
        host=job.node_name or socket.gethostname(),
        address=address,
        policy=Policy(
            nodes=nodes,
            active_nodes=active_nodes,
            max_restarts=max_restarts,
            first_cycle=cycle,
            limits=limits,
            past=past,
            host=job.node_name or socket.gethostname(),
            has_iteration_file=fault_tolerance.checkpoint_iteration_file is not None,
            stop_timeout_s=workers_stop_timeout + fault_tolerance.gpu_memory_reclaim_timeout + 15.0,
            # Losing it loses the Coordinator: training load should not be what takes it down.
            last_choice=job.node_name if active_nodes < len(nodes) else None,
            segment=segment,
            group_size=group_size,
            rejoin_timeout_s=rejoin_timeout,
        ),
        welcome=msg.Welcome(
            program=msg.Program(kind=kind, target=target, args=list(args), cwd=os.getcwd()),
            job_id=job.job_id,
            run_dir=str(directory.path),
            nproc_per_node=nproc_per_node,
            warm_start=warm_start == "on",
            max_restarts=max_restarts,
            stop_timeout_s=workers_stop_timeout,
            node=fault_tolerance.node_options(),
            segment=segment,
            cycle_info=current_path(fault_tolerance.cycle_info_dir, job.job_id),
        ),
        monitoring=monitoring,
        keep_timeouts=fault_tolerance.calc_ft_timeouts,
        run_dir=directory,
        slurm=client,
        step_argv=step.argv(),
        rejoin_argv=lambda node: dataclasses.replace(step, nodes=[node], overlap=True).argv(),
        step_environ=scrubbed_environment(os.environ),
        cycle_info_dir=fault_tolerance.cycle_info_dir,
        applog_prefix=fault_tolerance.per_cycle_applog_prefix,
        iteration_file=fault_tolerance.checkpoint_iteration_file,
        attribution=fault_tolerance.attribution,
        attribution_endpoint=fault_tolerance.attribution_endpoint,
        ends=in_slurm.ends,
        time_limit_margin_s=time_limit_margin,
        launches=in_slurm.launches,
        max_batch_requeue=_max_batch_requeue(client),
        standby=standby_coordinator,
    )
    try:
        code = run_job(spec)
    except OSError as error:
        # The journal or the port: nothing has been started yet.
        raise click.UsageError(f"cannot start: {error}") from error
    os.close(lock)
    sys.exit(code)
