"""From the options of ``nvrx-srun`` to a job: its allocation, its run directory, its specification."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.coordinator.address import NoAddressError, address_toward
from nvrx_slurm.coordinator.cycle_info import current_path
from nvrx_slurm.coordinator.deferred_exit import deferred_code, report_exit
from nvrx_slurm.coordinator.ft_state import FtStateError, load_ft_state
from nvrx_slurm.coordinator.job import run_job
from nvrx_slurm.coordinator.job_lock import JobInUseError, claim_job
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.lease import Fence
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.past import past_of_job
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.preparation import NodeCountError, claim_own, count_active, first_cycle
from nvrx_slurm.coordinator.run_dir import RunDir, RunDirError
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.journal import JournalVersionError
from nvrx_slurm.slurm import (
    AgentStep,
    Job,
    JobEnvironment,
    NotInAllocationError,
    ScontrolClient,
    SlurmUnavailableError,
    UnknownJobError,
    ancestor_titles,
    scrubbed_environment,
    surrounding_step,
)
from nvrx_slurm.wire import messages as msg

__all__ = [
    "Allocation",
    "NoAddressError",
    "NotInAllocationError",
    "Options",
    "StartError",
    "find_allocation",
    "run",
]


class StartError(RuntimeError):
    """The job can't start; the message says why and what to do."""


@dataclass(frozen=True)
class Options:
    """Those of the command line that are about the job, seconds where they are times."""

    nproc_per_node: str
    spares: int | None
    nnodes: str | None
    rejoin_timeout: float
    segment: int
    group_size: int
    max_restarts: int
    workers_stop_timeout: float
    warm_start: str
    standby_coordinator: bool
    run_dir: Path | None
    srun_args: tuple[str, ...]
    fault_tolerance: FaultToleranceConfig
    limits: Limits
    time_limit_margin: float


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that this runs in."""

    job: JobEnvironment
    in_slurm: Job
    client: ScontrolClient
    active_nodes: int

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.in_slurm.nodes

    @property
    def can_be_requeued(self) -> bool:
        return self.in_slurm.batch and self.in_slurm.requeue

    @property
    def host(self) -> str:
        """Where this runs."""
        return self.job.node_name or socket.gethostname()

    def step(self, command: Sequence[str], srun_args: tuple[str, ...]) -> AgentStep:
        """Return the job step of the agents."""
        return AgentStep(nodes=self.nodes, command=command, extra=srun_args)


def find_allocation(options: Options) -> Allocation:
    """Find out the job that this runs in, and whether it may run here.

    Raises:
        NotInAllocationError: there is none.
        StartError
    """
    job = JobEnvironment.from_environ(os.environ, Path.cwd())
    if (inside := surrounding_step(os.environ, ancestor_titles())) is not None:
        raise StartError(
            f"this is a task of job step {inside}, but nvrx-srun starts srun itself: call it without srun, in"
            " the batch script or from salloc"
        )
    client = ScontrolClient()
    try:
        in_slurm = client.job(job.job_id)
        active_nodes = count_active(len(in_slurm.nodes), options.spares, options.nnodes, options.segment)
    except (SlurmUnavailableError, UnknownJobError) as error:
        raise StartError(f"cannot find out the nodes of job {job.job_id}: {error}") from error
    except NodeCountError as error:
        raise StartError(str(error)) from error
    if in_slurm.restarts > job.restart_count:
        raise StartError(
            f"Slurm has started job {job.job_id} again since: this is restart {job.restart_count}, and the "
            f"newest is {in_slurm.restarts}"
        )
    return Allocation(job, in_slurm, client, active_nodes)


def run(
    options: Options,
    allocation: Allocation,
    step: AgentStep,
    program: msg.Program,
    say: Callable[[str], None],
) -> int:
    """Run the job to its end; return the exit code.

    Raises:
        StartError, NoAddressError: nothing has been started.
    """
    job = allocation.job
    chosen = options.run_dir or os.environ.get("NVRX_RUN_DIR")
    directory = RunDir(Path(chosen or job.submit_dir / "nvrx" / job.job_id).absolute())
    with contextlib.ExitStack() as held:
        # Nobody else takes the job, or the run directory, meanwhile.
        _claim(directory, allocation, is_own=not chosen, held=held, say=say)
        try:
            deferred = deferred_code(directory.journal, job.job_id)
            if deferred is not None:
                report_exit(directory.journal, job.job_id, job.restart_count, deferred)
        except (OSError, JournalVersionError) as error:
            raise StartError(f"run directory {directory.path}: {error}") from error
        if deferred is not None:
            say(
                f"nvrx-srun: the job has ended with {deferred} already, when its batch host was gone: "
                "this start only tells Slurm"
            )
            return deferred
        spec = _specification(options, allocation, step, program, directory)
        try:
            return run_job(spec)
        except OSError as error:
            # The journal or the port: nothing has been started yet.
            raise StartError(f"cannot start: {error}") from error


def _claim(
    directory: RunDir,
    allocation: Allocation,
    *,
    is_own: bool,
    held: contextlib.ExitStack,
    say: Callable[[str], None],
) -> None:
    """Take the job and its run directory until ``held`` is closed; ``is_own``: it is named after the job."""
    job, submitted = allocation.job, allocation.in_slurm.submitted
    try:
        if (in_use := claim_job(job.job_id, submitted)) is not None:
            held.enter_context(in_use)
        aside = None
        if is_own:
            lock, aside = claim_own(directory, job.job_id, job.restart_count, submitted)
        else:
            lock = directory.claim(Fence(job.job_id, job.restart_count, 0))
        held.callback(os.close, lock)
    except (JobInUseError, RunDirError) as error:
        raise StartError(str(error)) from error
    except (OSError, JournalVersionError) as error:
        raise StartError(f"run directory {directory.path}: {error}") from error
    if aside is not None:
        say(f"an earlier job had the id {job.job_id}: {aside} is its run directory now")


def _specification(
    options: Options, allocation: Allocation, step: AgentStep, program: msg.Program, directory: RunDir
) -> JobSpec:
    job, in_slurm, client = allocation.job, allocation.in_slurm, allocation.client
    fault_tolerance = options.fault_tolerance
    others = [node for node in allocation.nodes if node != job.node_name] or list(allocation.nodes)
    try:
        address = address_toward(others, client.node_address)
        policy = _policy(options, allocation, program, directory)
        monitoring = fault_tolerance.monitoring()
        if fault_tolerance.calc_ft_timeouts:
            monitoring = load_ft_state(directory.ft_state, monitoring)
    except FtStateError as error:
        raise StartError(str(error)) from error
    except JournalVersionError as error:
        raise StartError(f"{directory.journal}: {error}") from error
    return JobSpec(
        job_id=job.job_id,
        restart_count=job.restart_count,
        submitted=in_slurm.submitted,
        host=allocation.host,
        address=address,
        policy=policy,
        welcome=_welcome(options, job.job_id, program, directory),
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
        time_limit_margin_s=options.time_limit_margin,
        launches=in_slurm.launches,
        max_batch_requeue=_max_batch_requeue(client),
        standby=options.standby_coordinator,
    )


def _policy(options: Options, allocation: Allocation, program: msg.Program, directory: RunDir) -> Policy:
    job, fault_tolerance = allocation.job, options.fault_tolerance
    argv = [program.target, *program.args]
    return Policy(
        nodes=allocation.nodes,
        active_nodes=allocation.active_nodes,
        max_restarts=options.max_restarts,
        first_cycle=first_cycle(directory),
        limits=options.limits,
        past=past_of_job(directory.journal, job.job_id, job.restart_count, argv),
        host=allocation.host,
        has_iteration_file=fault_tolerance.checkpoint_iteration_file is not None,
        stop_timeout_s=fault_tolerance.stop_timeout_s(options.workers_stop_timeout),
        # Losing it loses the Coordinator: training load should not be what takes it down.
        last_choice=job.node_name if allocation.active_nodes < len(allocation.nodes) else None,
        segment=options.segment,
        group_size=options.group_size,
        rejoin_timeout_s=options.rejoin_timeout,
    )


def _welcome(options: Options, job_id: str, program: msg.Program, directory: RunDir) -> msg.Welcome:
    fault_tolerance = options.fault_tolerance
    return msg.Welcome(
        program=program,
        job_id=job_id,
        run_dir=str(directory.path),
        nproc_per_node=options.nproc_per_node,
        warm_start=options.warm_start == "on",
        max_restarts=options.max_restarts,
        stop_timeout_s=options.workers_stop_timeout,
        node=fault_tolerance.node_options(),
        segment=options.segment,
        cycle_info=current_path(fault_tolerance.cycle_info_dir, job_id),
    )


def _max_batch_requeue(client: ScontrolClient) -> int | None:
    try:
        return client.config().max_batch_requeue
    except SlurmUnavailableError:
        return None
