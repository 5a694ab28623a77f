"""Rules M1 to M10: what the doctor says about a machine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from nvrx_slurm.doctor.findings import Status
from nvrx_slurm.doctor.machine import MACHINE, Machine, read_machine

OK, WARN, PROBLEM, UNKNOWN = Status.OK, Status.WARN, Status.PROBLEM, Status.UNKNOWN
GOOD = Machine(
    host="n1",
    python=(3, 12, 1),
    cgroup_version=2,
    shm_bytes=512 << 30,
    torch="2.13.0+cu130",
    nccl="2.27.7",
    py_spy="/opt/bin/py-spy",
    ptrace_scope=1,
    open_files=1048576,
    locked_memory=math.inf,
    processes=math.inf,
    infiniband=True,
    gpu_driver="580.65.06",
)


def test_a_good_gpu_node_is_all_right() -> None:
    assert [finding for finding in MACHINE.apply(GOOD) if finding.status is not OK] == []


@pytest.mark.parametrize(
    ("rule", "values", "status"),
    [
        ("M1", {"python": (3, 9, 18)}, PROBLEM),
        ("M1", {"python": (3, 10, 0)}, OK),
        ("M2", {"torch": None}, PROBLEM),
        ("M2", {"torch": "2.7.1"}, PROBLEM),
        ("M2", {"torch": "2.8.0"}, OK),
        ("M2", {"torch": "10.0"}, OK),
        ("M2", {"torch": "nightly"}, UNKNOWN),
        ("M3", {"nccl": None}, OK),
        ("M3", {"nccl": None, "torch": "2.13.0+cpu"}, WARN),
        ("M3", {"nccl": None, "torch": None}, UNKNOWN),
        ("M4", {"gpu_driver": None}, OK),
        ("M5", {"py_spy": None}, WARN),
        ("M5", {"ptrace_scope": 2}, WARN),
        ("M5", {"ptrace_scope": None}, UNKNOWN),
        ("M6", {"cgroup_version": 1}, OK),
        ("M6", {"cgroup_version": None}, UNKNOWN),
        ("M7", {"shm_bytes": 0}, PROBLEM),
        ("M7", {"shm_bytes": 64 << 20}, WARN),
        ("M7", {"shm_bytes": 1 << 30}, OK),
        ("M7", {"shm_bytes": None}, UNKNOWN),
        ("M8", {"open_files": 1024}, WARN),
        ("M8", {"open_files": 4096}, OK),
        ("M9", {"locked_memory": 65536}, PROBLEM),
        ("M9", {"locked_memory": 65536, "infiniband": False}, OK),
        ("M10", {"processes": 1000}, WARN),
        ("M10", {"processes": 4096}, OK),
    ],
)
def test_each_reading_is_judged(rule: str, values: dict[str, object], status: Status) -> None:
    machine = dataclasses.replace(GOOD, **values)  # type: ignore[arg-type]
    (found,) = [finding for finding in MACHINE.apply(machine) if finding.rule == rule]
    assert found.status is status, found
    if status in (WARN, PROBLEM):
        assert found.answer.why
        assert found.answer.fix


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for directory in ("proc/self", "proc/sys/kernel/yama", "dev/shm", "proc/driver/nvidia", "sys"):
        (tmp_path / directory).mkdir(parents=True)
    return tmp_path


def test_a_node_is_read_from_its_files(root: Path) -> None:
    (root / "proc/self/mounts").write_text("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
    (root / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    )
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    machine = read_machine(root)
    assert (machine.cgroup_version, machine.ptrace_scope, machine.infiniband) == (2, 1, True)
    assert machine.gpu_driver == "580.65.06"
    assert machine.shm_bytes


def test_a_hybrid_hierarchy_counts_as_version_1(root: Path) -> None:
    (root / "proc/self/mounts").write_text(
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw 0 0\n"
    )
    assert read_machine(root).cgroup_version == 1


def test_what_is_not_there_is_not_made_up(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.cgroup_version, machine.ptrace_scope, machine.gpu_driver) == (None, None, None)
    assert (machine.shm_bytes, machine.infiniband) == (0, False)


def test_a_kernel_without_yama_lets_a_parent_look(root: Path) -> None:
    assert read_machine(root).ptrace_scope == 0
