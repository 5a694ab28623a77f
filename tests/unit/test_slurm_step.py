"""The environment of the agents' srun, and its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.slurm import (
    AgentStep,
    JobEnvironment,
    NotInAllocationError,
    expand_hostlist,
    scrubbed_environment,
    surrounding_step,
)

# As a batch script of a job on 4 nodes saw it on Slurm 22.05, shortened where values repeat.
BATCH = {
    "PATH": "/usr/bin",
    "HOME": "/home/user",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_JOB_ID": "123",
    "SLURM_JOBID": "123",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_PARTITION": "batch",
    "SLURM_CLUSTER_NAME": "dev",
    "SLURM_SUBMIT_DIR": "/home/user/runs",
    "SLURM_SUBMIT_HOST": "login1",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURM_GPUS_PER_NODE": "2",
    "SLURM_RESTART_COUNT": "2",
    "SLURMD_NODENAME": "n1",
    "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_CPUS_PER_NODE": "16(x4)",
    "SLURM_CPUS_ON_NODE": "16",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "4711",
    "SLURM_TOPOLOGY_ADDR": "n1",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_SRUN_COMM_PORT": "40001",
    "SLURM_KILL_BAD_EXIT": "1",
    "SLURM_WAIT": "30",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_EXPORT_ENV": "NONE",
    "PMIX_RANK": "0",
    "PMI_FD": "3",
}
STAYS = [
    *("PATH", "HOME", "SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION"),
    *("SLURM_CLUSTER_NAME", "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_GPUS_ON_NODE"),
    *("SLURM_GPUS_PER_NODE", "SLURM_RESTART_COUNT", "SLURMD_NODENAME"),
]


def test_what_describes_the_allocation_as_it_was_is_not_passed_on() -> None:
    assert scrubbed_environment(BATCH) == {name: BATCH[name] for name in STAYS}


def test_the_environment_is_copied() -> None:
    environment = dict(BATCH)
    scrubbed_environment(environment)["PATH"] = "elsewhere"
    assert environment == BATCH


def test_the_job_is_read_from_its_environment() -> None:
    job = JobEnvironment.from_environ(BATCH, Path("/tmp"))
    assert job == JobEnvironment("123", 2, Path("/home/user/runs"), "n1")


def test_what_slurm_leaves_unset_has_a_meaning() -> None:
    job = JobEnvironment.from_environ({"SLURM_JOB_ID": "5", "SLURMD_NODENAME": ""}, Path("/here"))
    assert job == JobEnvironment("5", 0, Path("/here"), None)


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "x"}, {"SLURM_JOB_ID": "²"}])
def test_without_a_job_there_is_none(environ: dict[str, str]) -> None:
    with pytest.raises(NotInAllocationError, match="not inside a Slurm allocation"):
        JobEnvironment.from_environ(environ, Path("/here"))


@pytest.mark.parametrize(
    ("step", "titles", "inside"),
    [
        (None, ["slurmstepd: [7.batch]"], None),
        ("4294967290", ["slurmstepd: [7.interactive]"], None),
        ("4294967280", [], None),
        ("0", ["bash", "slurmstepd: [7.0]  ", "init"], "7.0"),
        ("2", ["slurmstepd: [7+1.2]"], "7.2"),
        ("0", ["slurmstepd: [7.batch]"], None),  # submitted from within a step
        ("0", ["salloc -N1", "slurmstepd: [6.0]"], None),  # salloc called within a step
        ("3", ["bash", "init"], "7.3"),  # the ancestors can't be read
        ("4294967279", [], "7.4294967279"),
        ("²", [], None),
    ],
)
def test_a_task_of_a_step_is_told_from_a_batch_script(
    step: str | None, titles: list[str], inside: str | None
) -> None:
    environ = {"SLURM_JOB_ID": "7"} | ({} if step is None else {"SLURM_STEP_ID": step})
    assert surrounding_step(environ, titles) == inside


def test_one_agent_runs_on_each_node_and_the_step_survives_a_lost_one() -> None:
    argv = AgentStep(["n1", "n2", "n4"], ["/opt/nvrx-agent"]).argv()
    assert argv == [
        "srun",
        "--no-kill",
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--mpi=none",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--export=ALL",
        *("-N", "3", "-n", "3", "-w", "n[1-2,4]"),
        "/opt/nvrx-agent",
    ]


def test_the_users_arguments_come_last_and_win() -> None:
    argv = AgentStep(["n1"], ["agent", "x"], ["--mpi=pmix", "--exclusive"]).argv()
    assert argv[-4:] == ["--mpi=pmix", "--exclusive", "agent", "x"]


def test_the_node_list_is_in_the_given_order() -> None:
    nodes = ["n2", "n1", "login", "n3"]
    argv = AgentStep(nodes, ["agent"]).argv()
    assert expand_hostlist(argv[argv.index("-w") + 1]) == nodes
