"""One launcher, from its options to its exit code."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.agent.guardian import run_guarded
from nvrx_slurm.agent.private_places import RAM_DIR_VARIABLE, new_private_dir, release_places
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.launch.processes import (
    Coordinator,
    start_coordinator,
    start_guardian,
    wait_for_job,
)
from nvrx_slurm.launch.rank_console import RankConsole, Shown
from nvrx_slurm.launch.rendezvous import Hosting, Rendezvous
from nvrx_slurm.launch.this_host import bind_address, claim_hosting, claim_node_name, is_this_host
from nvrx_slurm.launch.token_file import read_or_create_token, wait_for_token
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.rpc import new_token

COMMAND = "nvrx-launch"
_EXIT_EXCLUDED = 3
_CONSOLE_GRACE_S = 2.0


class LaunchError(RuntimeError):
    """The launcher can't start; the message says why and what to do."""


@dataclass(frozen=True)
class Launch:
    """Everything that was decided from options, environment and files."""

    rendezvous: Rendezvous
    min_nodes: int
    max_nodes: int
    nproc_per_node: str
    """A number: every word has been resolved."""
    program: msg.Program
    role: str
    max_restarts: int
    rejoin_timeout_s: float
    segment: int
    workers_stop_timeout_s: float
    term_timeout_s: float
    warm_start: bool
    virtual_local_rank: bool
    fault_tolerance: FaultToleranceConfig
    limits: Limits
    local_addr: str | None
    run_dir: RunDir
    token_file: Path
    shown: Shown
    signals: tuple[signal.Signals, ...]
    environ: Mapping[str, str]
    """The ranks', before anything of ours."""


def run_name(run_id: str) -> str:
    """Return ``run_id`` as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", run_id).lstrip(".") or "_"


def run_launch(launch: Launch) -> int:
    """Run this node's part of the job, and the Coordinator if this is the node for it; return the exit code.

    Must be called before any thread exists.

    Raises:
        LaunchError, TokenFileError, RunDirError, CannotCoordinateError, OSError, ValueError: nothing was
            started, or what was has ended.
    """
    rendezvous = launch.rendezvous
    job = f"{rendezvous.run_id} at {rendezvous.host}:{rendezvous.port}"
    name, _held = claim_node_name(launch.local_addr or socket.getfqdn(), job)
    hosting = _claim_hosting(rendezvous)
    token = _token(launch, hosts=hosting is not None)
    private_dir = _new_private_dir(launch)
    try:
        coordinator = _start_coordinator(launch, name, token) if hosting is not None else None
    except BaseException:
        shutil.rmtree(private_dir, ignore_errors=True)
        raise
    port = coordinator.port if coordinator else rendezvous.port
    # On its own host a name may lead to another interface than the one that is listened on.
    host = _reachable(bind_address(rendezvous.host)) if coordinator else rendezvous.host
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    guardian = start_guardian(
        lambda: _run_node(launch, name, token, address, private_dir, hosts=coordinator is not None)
    )
    return wait_for_job(guardian, coordinator, launch.signals)


def _reachable(bound: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)


def _claim_hosting(rendezvous: Rendezvous) -> socket.socket | None:
    """Return a hold on the Coordinator's port if this launcher is to run it."""
    host, port = rendezvous.host, rendezvous.port
    match rendezvous.hosting:
        case Hosting.ELSEWHERE:
            return None
        case Hosting.WHERE_THE_ENDPOINT_IS:
            return claim_hosting(port) if is_this_host(host) else None
        case Hosting.HERE:
            held = claim_hosting(port)
            if held is None:
                raise LaunchError(
                    f"another {COMMAND} of this host coordinates on port {port} already: choose another port "
                    "with --rdzv-endpoint or --master-port"
                )
            return held


def _token(launch: Launch, *, hosts: bool) -> str:
    if launch.max_nodes == 1 and hosts:
        return new_token()
    if hosts:
        return read_or_create_token(launch.token_file)
    return wait_for_token(launch.token_file, launch.rendezvous.conf.connect_wait_s)


# --- the Coordinator's process -----------------------------------------------------------------------


def _start_coordinator(launch: Launch, name: str, token: str) -> Coordinator:
    lock = launch.run_dir.claim()
    try:
        return start_coordinator(lambda started: _coordinate(launch, name, token, started))
    finally:
        # The Coordinator has its own, for as long as it lives.
        os.close(lock)


def _coordinate(launch: Launch, name: str, token: str, started: Callable[[int], None]) -> int:
    from nvrx_slurm.coordinator.cycle_info import current_path
    from nvrx_slurm.coordinator.ft_state import load_ft_state
    from nvrx_slurm.coordinator.job import run_job
    from nvrx_slurm.coordinator.job_spec import JobSpec, Listening
    from nvrx_slurm.coordinator.past import past_of_job
    from nvrx_slurm.coordinator.preparation import attempts, first_cycle
    from nvrx_slurm.coordinator.server import CannotListenError
    from nvrx_slurm.coordinator.terminal import open_standard_streams

    open_standard_streams()
    release_places()
    rendezvous, directory = launch.rendezvous, launch.run_dir
    fault_tolerance = launch.fault_tolerance
    monitoring = fault_tolerance.monitoring()
    if fault_tolerance.calc_ft_timeouts:
        monitoring = load_ft_state(directory.ft_state, monitoring)
    attempt, argv = attempts(directory), [launch.program.target, *launch.program.args]
    spec = JobSpec(
        job_id=rendezvous.run_id,
        restart_count=attempt,
        submitted=0,
        host=name,
        address=launch.local_addr or rendezvous.host,
        policy=Policy(
            nodes=(),
            active_nodes=launch.min_nodes,
            max_restarts=launch.max_restarts,
            first_cycle=first_cycle(directory),
            max_unknown_nodes=launch.max_nodes,
            join_timeout_s=rendezvous.conf.join_timeout_s,
            stop_timeout_s=fault_tolerance.stop_timeout_s(launch.workers_stop_timeout_s),
            term_timeout_s=launch.term_timeout_s,
            segment=launch.segment,
            group_size=rendezvous.conf.replacement_group_size,
            rejoin_timeout_s=launch.rejoin_timeout_s,
            limits=launch.limits,
            past=past_of_job(directory.journal, rendezvous.run_id, attempt, argv),
            has_iteration_file=fault_tolerance.checkpoint_iteration_file is not None,
        ),
        welcome=msg.Welcome(
            program=launch.program,
            job_id=rendezvous.run_id,
            run_dir=str(directory.path),
            nproc_per_node=launch.nproc_per_node,
            warm_start=launch.warm_start,
            max_restarts=launch.max_restarts,
            stop_timeout_s=launch.workers_stop_timeout_s,
            role=launch.role,
            node=fault_tolerance.node_options(),
            segment=launch.segment,
            cycle_info=current_path(fault_tolerance.cycle_info_dir, rendezvous.run_id),
        ),
        monitoring=monitoring,
        keep_timeouts=fault_tolerance.calc_ft_timeouts,
        run_dir=directory,
        command=COMMAND,
        listening=Listening(bind_address(rendezvous.host), rendezvous.port, token, started),
        shows_rank_0=False,
        stop_signals=launch.signals,
        cycle_info_dir=fault_tolerance.cycle_info_dir,
        applog_prefix=fault_tolerance.per_cycle_applog_prefix,
        iteration_file=fault_tolerance.checkpoint_iteration_file,
        attribution=fault_tolerance.attribution,
        attribution_endpoint=fault_tolerance.attribution_endpoint,
    )
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        return run_job(spec)
    except CannotListenError as error:
        raise LaunchError(f"{error}; choose another port with --rdzv-endpoint or --master-port") from error


# --- the node's processes ----------------------------------------------------------------------------


def _new_private_dir(launch: Launch) -> Path:
    """Make it before anything is started: a Coordinator would wait for its node."""
    try:
        return new_private_dir(launch.environ)
    except OSError as error:
        raise LaunchError(
            f"no place for this node's private files: {error}; NVRX_NODE_LOCAL_TMPDIR or TMPDIR names another"
        ) from error


def _run_node(launch: Launch, name: str, token: str, address: str, private_dir: Path, *, hosts: bool) -> int:
    logging.basicConfig(format=f"{COMMAND} {name}: %(message)s", level=logging.WARNING)

    def agent() -> int:
        try:
            return _run_agent(launch, name, token, address, private_dir, hosts=hosts)
        finally:
            shutil.rmtree(private_dir, ignore_errors=True)

    return run_guarded(agent, private_dir, launch.signals)


def _run_agent(launch: Launch, name: str, token: str, address: str, private_dir: Path, *, hosts: bool) -> int:
    import asyncio

    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

    from nvrx_slurm.agent.agent import Agent, AgentConfig, OwnLauncher
    from nvrx_slurm.coordinator.terminal import Terminal

    terminal = Terminal(COMMAND)
    if not hosts:
        patience_s = launch.rendezvous.conf.connect_wait_s
        terminal.say(f"joins job {launch.rendezvous.run_id} at {address}: waits {patience_s:g} s for it")
    own = OwnLauncher(
        program=launch.program,
        nproc_per_node=launch.nproc_per_node,
        role=launch.role,
        warm_start=launch.warm_start,
        virtual_local_rank=launch.virtual_local_rank,
        term_timeout_s=launch.term_timeout_s,
        connect_timeout_s=launch.rendezvous.conf.connect_wait_s,
        show=RankConsole(launch.shown, terminal.show).show,
        place=launch.rendezvous.place,
    )
    run_id = launch.rendezvous.run_id
    environ = {**launch.environ, RAM_DIR_VARIABLE: str(private_dir / "ram")}
    config = AgentConfig(address, token, run_id, name, private_dir, environ, own, launch.signals)

    async def run() -> tuple[int, int | None]:
        agent = Agent(config)
        return await agent.run(), agent.job_code

    code, job_code = asyncio.run(run())
    terminal.close(_CONSOLE_GRACE_S)
    if job_code is not None:
        return job_code
    return 1 if code == _EXIT_EXCLUDED else code
