"""``nvrx-launch``: run a training script on nodes of any kind, through faults, with torchrun's options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.ft_options import fault_tolerance_options
from nvrx_slurm.cli.launch_flags import foreign_flags
from nvrx_slurm.cli.parameters import Duration
from nvrx_slurm.cli.program import check_nproc, find_program
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig
from nvrx_slurm.wire.messages import Program, ProgramKind

_COUNT_ACCELERATORS = """
import sys, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
if sys.argv[1] == "auto" and not gpus and torch.accelerator.is_available():
    gpus = torch.accelerator.device_count()
print(gpus)
"""


def _option(*names: str, **keywords: Any) -> Callable[..., Any]:
    """An option that ``PET_…`` sets too, as torchrun's."""
    longest = max(names, key=len)
    return click.option(
        *names, envvar=f"PET_{longest.removeprefix('--').replace('-', '_').upper()}", **keywords
    )


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


@click.command(
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
@_option("--rdzv-backend", default="static", show_default=True, help="c10d or static.")
@_option("--rdzv-conf", default="", metavar="KEY=VALUE,…", help="is_host, join_timeout and others.")
@_option("--standalone", is_flag=True, help="One node: everything about the rendezvous is chosen.")
@_option("--node-rank", type=click.IntRange(min=0), default=0, show_default=True, help="Static rendezvous.")
@_option(
    "--master-addr", default="127.0.0.1", show_default=True, help="Static rendezvous: address of node 0."
)
@_option(
    "--master-port", type=click.IntRange(1, 65535), help="Static rendezvous: its port.  [default: 29500]"
)
@_option("--local-addr", help="This node's name and, where it coordinates, its address.  [default: its FQDN]")
@_option(
    "--max-restarts", type=click.IntRange(min=0), default=0, show_default=True, help="Restarts of all ranks."
)
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
@foreign_flags
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(**given: Any) -> None:
    """Train SCRIPT on every node on which this is started, and go on when a rank or a node fails.

    Takes torchrun's and ft_launcher's options, with dashes or underscores, and PET_* variables. Start it on
    each node, or once with --standalone. Inside a Slurm job nvrx-srun does more.

    Exit codes: 0 all ranks succeeded; 1 failed, restarts used up; 2 wrong usage; 75 too few nodes: start the
    job again; 128 + N stopped by signal N.
    """
    from nvrx_slurm.coordinator.run_dir import RunDirError
    from nvrx_slurm.coordinator.terminal import open_standard_streams
    from nvrx_slurm.launch.job import LaunchError, run_launch
    from nvrx_slurm.launch.processes import CannotCoordinateError
    from nvrx_slurm.launch.token_file import TokenFileError

    open_standard_streams()
    try:
        launch = _launch(**given)
        code = run_launch(launch)
    except (LaunchError, RunDirError, TokenFileError, CannotCoordinateError) as error:
        raise click.UsageError(str(error)) from error
    sys.exit(code)


def _launch(
    *,
    nnodes: str,
    rdzv_id: str,
    nproc_per_node: str,
    role: str,
    max_restarts: int,
    virtual_local_rank: bool,
    warm_start: str,
    token_file: Path | None,
    local_addr: str | None,
    fault_tolerance: FaultToleranceConfig,
    **given: Any,
) -> Any:
    from nvrx_slurm.coordinator.run_dir import RunDir
    from nvrx_slurm.launch.job import Launch, run_name
    from nvrx_slurm.launch.rendezvous import RendezvousError, parse_nnodes

    try:
        low, high = parse_nnodes(nnodes)
        rendezvous = _rendezvous(rdzv_id, high, given)
        shown = _shown(role, given)
    except (RendezvousError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    nproc = _nproc(nproc_per_node)
    if virtual_local_rank:
        _check_virtual(nproc)
    if nproc > 1 and "OMP_NUM_THREADS" not in os.environ:
        _note("OMP_NUM_THREADS is set to 1 for each rank, as torchrun does for more than one rank a node")
    stop, term = _grace(given)
    directory = given["run_dir"] or (given["log_dir"] or Path("nvrx")) / run_name(rendezvous.run_id)
    directory = Path(directory).absolute()
    return Launch(
        rendezvous=rendezvous,
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=str(nproc),
        program=_program(given),
        role=role,
        max_restarts=max_restarts,
        workers_stop_timeout_s=stop,
        term_timeout_s=term,
        warm_start=warm_start == "on",
        virtual_local_rank=virtual_local_rank,
        fault_tolerance=fault_tolerance,
        local_addr=local_addr,
        run_dir=RunDir(directory),
        token_file=(token_file or directory / "token").absolute(),
        shown=shown,
        signals=_signals(given["signals_to_handle"]),
        environ=dict(os.environ),
    )


def _note(what: str) -> None:
    click.echo(f"nvrx-launch: note: {what}", err=True)


def _rendezvous(rdzv_id: str, max_nodes: int, given: dict[str, Any]) -> Any:
    from nvrx_slurm.launch.rendezvous import RendezvousOptions, plan_rendezvous

    rendezvous, notes = plan_rendezvous(
        RendezvousOptions(
            backend=given["rdzv_backend"],
            endpoint=given["rdzv_endpoint"],
            run_id=rdzv_id,
            conf=given["rdzv_conf"],
            standalone=given["standalone"],
            max_nodes=max_nodes,
            node_rank=given["node_rank"],
            master_addr=given["master_addr"],
            master_port=given["master_port"],
            environ=os.environ,
        )
    )
    for note in notes:
        _note(note)
    return rendezvous


def _shown(role: str, given: dict[str, Any]) -> Any:
    from nvrx_slurm.launch.rank_console import Shown, parse_ranks, parse_std

    return Shown(
        redirects=parse_std("--redirects", given["redirects"]),
        tee=parse_std("--tee", given["tee"]),
        only=parse_ranks(given["local_ranks_filter"]),
        role=role,
        template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )


def _grace(given: dict[str, Any]) -> tuple[float, float]:
    """Return the grace of the ranks for a restart and for a signal."""
    from nvrx_slurm.durations import parse_duration

    both = given["shutdown_timeout"]
    if both is None and (text := os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")):
        try:
            both = parse_duration(text)
        except ValueError as error:
            raise click.UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT: {error}") from error
    stop = given["workers_stop_timeout"] or both or 15.0
    return stop, given["term_timeout"] or both or 1800.0


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in filter(None, (name.strip() for name in text.split(","))):
        sig = signal.Signals.__members__.get(name)
        if sig is None or sig in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise click.BadParameter(
                f"{name!r}: names of signals that can be handled are accepted, such as SIGTERM,SIGUSR1",
                param_hint="--signals-to-handle",
            )
        found.append(sig)
    return tuple(dict.fromkeys(found))


def _program(given: dict[str, Any]) -> Program:
    kind, target = find_program(
        given["script"], given["module"], given["no_python"] and not given["run_path"]
    )
    args, cwd = list(given["args"]), os.getcwd()
    python = os.environ.get("PYTHON_EXEC")
    if python and kind is not ProgramKind.EXECUTABLE:
        _, interpreter = find_program(python, module=False, no_python=True)
        words = ["-u", "-m", target] if kind is ProgramKind.MODULE else ["-u", target]
        return Program(kind=ProgramKind.EXECUTABLE, target=interpreter, args=[*words, *args], cwd=cwd)
    return Program(kind=kind, target=target, args=args, cwd=cwd)


def _nproc(text: str) -> int:
    check_nproc(text)
    if text.isdigit():
        return int(text)
    cpus = len(os.sched_getaffinity(0))
    if text == "cpu":
        return cpus
    # What torchrun counts, without importing torch here: this process forks.
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT_ACCELERATORS, text], capture_output=True, text=True, check=False
    )
    if counted.returncode != 0 or not counted.stdout.strip().isdigit():
        last = counted.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise click.UsageError(f"--nproc-per-node={text}: torch cannot count the GPUs: {last[0]}")
    gpus = int(counted.stdout)
    if not gpus and text == "gpu":
        raise click.UsageError("--nproc-per-node=gpu: torch sees no GPU on this node")
    return gpus or cpus


def _check_virtual(nproc: int) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and len(visible.split(",")) < nproc:
        raise click.UsageError(
            f"--virtual-local-rank: {nproc} ranks, but CUDA_VISIBLE_DEVICES is {visible!r}: each needs a GPU"
        )
