"""What a rank finds in its environment, and how many ranks a node runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from nvrx_slurm.agent.error_file import error_path
from nvrx_slurm.agent.flight_recorder import recorder_environment
from nvrx_slurm.wire import checkpoint_writer
from nvrx_slurm.wire.messages import StartWorkers, Welcome
from nvrx_slurm.wire.page import PAGE_VARIABLE
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE
from nvrx_slurm.wire.timeouts import MONITORING_VARIABLE


class SlotsError(ValueError):
    """``--nproc-per-node`` can't be satisfied on this node."""


def resolve_slots(nproc_per_node: str, environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this node.

    ``auto``: the job's GPUs on this node, 1 without GPUs; ``gpu``: the same, but no GPU is an error; ``cpu``:
    the CPUs that this process may use.

    Raises:
        SlotsError: not a positive number, or no GPU with ``gpu``.
    """
    gpus = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    match nproc_per_node:
        case "auto":
            return gpus or 1
        case "gpu" if gpus:
            return gpus
        case "gpu":
            raise SlotsError("--nproc-per-node=gpu, but Slurm has given this job no GPU on this node")
        case "cpu":
            return len(os.sched_getaffinity(0))
    digits = nproc_per_node.isascii() and nproc_per_node.isdigit()
    if not digits or int(nproc_per_node) < 1:
        raise SlotsError(f"--nproc-per-node={nproc_per_node}: a number above 0, auto, gpu or cpu is accepted")
    return int(nproc_per_node)


def server_environment(environ: Mapping[str, str], welcome: Welcome, slots: int) -> dict[str, str]:
    """Return what all ranks of the node share; libraries read some of it when they are loaded."""
    env = dict(environ)
    if slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    env.update(recorder_environment(environ))
    env.update(
        LOCAL_WORLD_SIZE=str(slots),
        ROLE_NAME=welcome.role,
        TORCHELASTIC_MAX_RESTARTS=str(welcome.max_restarts),
        TORCHELASTIC_RUN_ID=welcome.job_id,
        # The Coordinator hosts the store; rank 0 must not try to.
        TORCHELASTIC_USE_AGENT_STORE="True",
        NVRX_RUN_DIR=welcome.run_dir,
        **{checkpoint_writer.GRACE_VARIABLE: f"{welcome.node.checkpoint_write_timeout_s:g}"},
        **({"NVRX_CURRENT_CYCLE_INFO": welcome.cycle_info} if welcome.cycle_info else {}),
    )
    return env


def cycle_environment(start: StartWorkers, socket: Path) -> dict[str, str]:
    """Return what all ranks of the node share in one cycle; names and meaning as torchrun sets them."""
    return {
        "WORLD_SIZE": str(start.world_size),
        "GROUP_RANK": str(start.group_rank),
        "GROUP_WORLD_SIZE": str(start.group_world_size),
        "ROLE_WORLD_SIZE": str(start.world_size),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(start.cycle),
        SOCKET_VARIABLE: str(socket),
        MONITORING_VARIABLE: msgspec.json.encode(start.monitoring).decode(),
    }


def rank_environment(start: StartWorkers, local_rank: int, page: Path) -> dict[str, str]:
    """Return what differs between the ranks of a node."""
    rank = start.first_rank + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "ROLE_RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": str(error_path(page)),
        PAGE_VARIABLE: str(page),
    }


def virtual_local_rank(local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what makes a rank see its own GPU alone, as torchrun's ``--virtual-local-rank`` does.

    There must be as many GPUs as ranks in ``CUDA_VISIBLE_DEVICES``, if it is set.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    own = str(local_rank) if visible is None else visible.split(",")[local_rank].strip()
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
