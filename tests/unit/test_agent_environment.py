"""How many ranks a node runs, and what they find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.agent.environment import (
    SlotsError,
    cycle_environment,
    rank_environment,
    resolve_slots,
    server_environment,
)
from nvrx_slurm.wire.messages import Program, ProgramKind, StartWorkers, Welcome
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

WELCOME = Welcome(
    program=Program(kind=ProgramKind.SCRIPT, target="/home/user/train.py", args=[], cwd="/home/user"),
    job_id="123",
    run_dir="/home/user/nvrx/123",
    nproc_per_node="auto",
    warm_start=True,
    max_restarts=10,
    stop_timeout_s=15.0,
)
START = StartWorkers(
    cycle=4,
    group_rank=1,
    group_world_size=3,
    first_rank=2,
    world_size=6,
    master_addr="10.0.0.1",
    master_port=29500,
    monitoring=Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts()),
)
GPUS = {"SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("text", "environ", "slots"),
    [
        ("auto", GPUS, 4),
        ("auto", {}, 1),
        ("auto", {"SLURM_GPUS_ON_NODE": ""}, 1),
        ("auto", {"SLURM_GPUS_ON_NODE": "0"}, 1),
        ("gpu", GPUS, 4),
        ("cpu", GPUS, len(os.sched_getaffinity(0))),
        ("3", GPUS, 3),
        ("03", {}, 3),
    ],
)
def test_ranks_per_node(text: str, environ: dict[str, str], slots: int) -> None:
    assert resolve_slots(text, environ) == slots


def test_gpu_without_a_gpu_is_an_error() -> None:
    with pytest.raises(SlotsError, match="--nproc-per-node=gpu, but Slurm has given this job no GPU"):
        resolve_slots("gpu", {})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "²", "4 "])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(SlotsError, match="a number above 0, auto, gpu or cpu is accepted"):
        resolve_slots(text, {})


def test_a_rank_finds_what_torchrun_would_set() -> None:
    environment = {
        **cycle_environment(START, Path("/dev/shm/x/sock")),
        **rank_environment(START, 1, Path("/dev/shm/x/page")),
    }
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "4",
        "TORCHELASTIC_ERROR_FILE": "/dev/shm/x/page.error.json",
    }
    assert {name: environment[name] for name in expected} == expected
    assert all(name in expected or name.startswith("NVRX_") for name in environment)


def test_the_node_shares_what_is_the_same_for_all() -> None:
    environment = server_environment({"PATH": "/bin", "MINE": "1"}, WELCOME, 2)
    assert environment == {
        "PATH": "/bin",
        "MINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "LOCAL_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": "10",
        "TORCHELASTIC_RUN_ID": "123",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "NVRX_RUN_DIR": "/home/user/nvrx/123",
        "NVRX_CHECKPOINT_WRITE_TIMEOUT": "10",
    }


def test_what_the_user_has_set_is_kept_and_one_rank_has_all_cores() -> None:
    mine = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    environment = server_environment(mine, WELCOME, 2)
    assert mine.items() <= environment.items()
    assert "OMP_NUM_THREADS" not in server_environment({}, WELCOME, 1)
