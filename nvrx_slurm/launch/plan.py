"""From what the user typed to what a launcher does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.preparation import parse_nnodes
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.durations import parse_duration
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.launch.job import Launch, run_name
from nvrx_slurm.launch.rank_console import Shown, parse_ranks, parse_std
from nvrx_slurm.launch.rendezvous import RendezvousOptions, plan_rendezvous
from nvrx_slurm.wire.messages import Program

_STOP_S = 15.0
_TERM_S = 1800.0
_NOT_FOR_US = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
_COUNT_GPUS = """
import sys, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
if sys.argv[1] == "auto" and not gpus and torch.accelerator.is_available():
    gpus = torch.accelerator.device_count()
print(gpus)
"""


@dataclass(frozen=True)
class Options:
    """The command line, and ``PET_…`` where it is silent; names as there."""

    nnodes: str
    nproc_per_node: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_backend: str
    rdzv_conf: str
    standalone: bool
    node_rank: int | None
    master_addr: str
    master_port: int | None
    local_addr: str | None
    max_restarts: int
    rejoin_timeout: float
    segment: int
    workers_stop_timeout: float | None
    term_timeout: float | None
    shutdown_timeout: float | None
    signals_to_handle: str
    role: str
    log_dir: Path | None
    redirects: str
    tee: str
    local_ranks_filter: str
    virtual_local_rank: bool
    warm_start: str
    run_dir: Path | None
    token_file: Path | None
    fault_tolerance: FaultToleranceConfig
    limits: Limits


def plan_launch(options: Options, program: Program, environ: Mapping[str, str]) -> tuple[Launch, list[str]]:
    """Return what to do, and notes for the user.

    Raises:
        ValueError: an option is not accepted; the message names it and what is.
    """
    low, high = parse_nnodes(options.nnodes)
    rendezvous, notes = plan_rendezvous(_rendezvous_options(options, high, environ))
    if low % options.segment:
        raise ValueError(f"--ft-segment {options.segment}: {low} nodes that train are no multiple of it")
    ranks = count_ranks(options.nproc_per_node)
    if options.virtual_local_rank:
        _check_gpus_for(ranks, environ)
    if ranks > 1 and "OMP_NUM_THREADS" not in environ:
        notes.append("OMP_NUM_THREADS is 1 for each rank, as with torchrun, for there are several on a node")
    directory = options.run_dir or (options.log_dir or Path("nvrx")) / run_name(rendezvous.run_id)
    both = _seconds_for_both(options, environ)
    launch = Launch(
        rendezvous=rendezvous,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=str(ranks),
        program=program,
        role=options.role,
        max_restarts=options.max_restarts,
        rejoin_timeout_s=options.rejoin_timeout,
        segment=options.segment,
        workers_stop_timeout_s=options.workers_stop_timeout or both or _STOP_S,
        term_timeout_s=options.term_timeout or both or _TERM_S,
        warm_start=options.warm_start == "on",
        virtual_local_rank=options.virtual_local_rank,
        fault_tolerance=options.fault_tolerance,
        limits=options.limits,
        local_addr=options.local_addr,
        run_dir=RunDir(directory.absolute()),
        token_file=(options.token_file or directory / "token").absolute(),
        shown=Shown(
            redirects=parse_std("--redirects", options.redirects),
            tee=parse_std("--tee", options.tee),
            only=parse_ranks(options.local_ranks_filter),
            role=options.role,
            template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        ),
        signals=parse_signals(options.signals_to_handle),
        environ=environ,
    )
    return launch, notes


def _rendezvous_options(options: Options, max_nodes: int, environ: Mapping[str, str]) -> RendezvousOptions:
    return RendezvousOptions(
        backend=options.rdzv_backend,
        endpoint=options.rdzv_endpoint,
        run_id=options.rdzv_id,
        conf=options.rdzv_conf,
        standalone=options.standalone,
        max_nodes=max_nodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        environ=environ,
    )


def _seconds_for_both(options: Options, environ: Mapping[str, str]) -> float | None:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if options.shutdown_timeout is not None or not text:
        return options.shutdown_timeout
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {error}") from error


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Return the signals of ``SIGTERM,SIGINT,…``.

    Raises:
        ValueError: a name that is none, or one that no process can handle for its ranks.
    """
    found = []
    for name in filter(None, (name.strip() for name in text.split(","))):
        sig = signal.Signals.__members__.get(name)
        if sig is None or sig in _NOT_FOR_US:
            raise ValueError(
                f"--signals-to-handle: {name!r}: names of signals that a program can handle are accepted, "
                "such as SIGTERM,SIGUSR1"
            )
        found.append(sig)
    return tuple(dict.fromkeys(found))


def count_ranks(nproc_per_node: str) -> int:
    """Return what a number, ``auto``, ``gpu`` or ``cpu`` means on this node, as torchrun does.

    Raises:
        ValueError: ``gpu`` without a GPU, or torch can't tell.
    """
    if nproc_per_node.isdigit():
        return int(nproc_per_node)
    cpus = len(os.sched_getaffinity(0))
    if nproc_per_node == "cpu":
        return cpus
    # Torch knows, and must not be imported here: this process forks.
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT_GPUS, nproc_per_node], capture_output=True, text=True, check=False
    )
    if counted.returncode != 0 or not counted.stdout.strip().isdigit():
        last = counted.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"--nproc-per-node={nproc_per_node}: torch cannot count the GPUs: {last[0]}")
    gpus = int(counted.stdout)
    if not gpus and nproc_per_node == "gpu":
        raise ValueError("--nproc-per-node=gpu: torch sees no GPU on this node")
    return gpus or cpus


def _check_gpus_for(ranks: int, environ: Mapping[str, str]) -> None:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < ranks:
        raise ValueError(
            f"--virtual-local-rank: {ranks} ranks, but CUDA_VISIBLE_DEVICES is {visible!r}: each needs a GPU"
        )
