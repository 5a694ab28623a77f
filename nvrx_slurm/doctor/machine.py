"""M: what this machine offers to ranks and agents, read without importing torch."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.doctor.findings import Answer, Rules, ok, problem, unknown, warn

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 8)
_GIB = 1 << 30
_MIB = 1 << 20
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_INFINIBAND = Path("sys/class/infiniband")


@dataclass(frozen=True)
class Machine:
    """What was read from one machine; None is what could not be read."""

    host: str
    python: tuple[int, int, int]
    cgroup_version: int | None
    """2 when processes are in the unified hierarchy alone."""
    shm_bytes: int | None
    """Free in /dev/shm; 0 without one."""
    torch: str | None
    """None: not installed."""
    nccl: str | None
    py_spy: str | None
    ptrace_scope: int | None
    """Yama's; 0 where the kernel has no Yama."""
    open_files: float
    locked_memory: float
    processes: float
    infiniband: bool
    gpu_driver: str | None


def read_machine(root: Path = Path("/")) -> Machine:
    """Read this machine; files come from below ``root``."""
    return Machine(
        host=platform.node(),
        python=sys.version_info[:3],
        cgroup_version=_cgroup_version(_read(root / "proc/self/mounts")),
        shm_bytes=_free_bytes(root / "dev/shm"),
        torch=_package("torch"),
        nccl=next(filter(None, map(_package, _NCCL_PACKAGES)), None),
        py_spy=shutil.which(
            "py-spy", path=os.pathsep.join((f"{sys.prefix}/bin", os.environ.get("PATH", "")))
        ),
        ptrace_scope=_ptrace_scope(root),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        locked_memory=_soft_limit(resource.RLIMIT_MEMLOCK),
        processes=_soft_limit(resource.RLIMIT_NPROC),
        infiniband=_has_entries(root / _INFINIBAND),
        gpu_driver=_driver_version(_read(root / "proc/driver/nvidia/version")),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _cgroup_version(mounts: str | None) -> int | None:
    if mounts is None:
        return None
    kinds = {line.split()[2] for line in mounts.splitlines() if len(line.split()) > 2}
    if "cgroup" in kinds:
        return 1
    return 2 if "cgroup2" in kinds else None


def _free_bytes(path: Path) -> int | None:
    try:
        stat = os.statvfs(path)
    except FileNotFoundError:
        return 0
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ptrace_scope(root: Path) -> int | None:
    if not (root / "proc/sys/kernel").is_dir():
        return None
    text = (_read(root / "proc/sys/kernel/yama/ptrace_scope") or "0").strip()
    return int(text) if text.isdecimal() else None


def _soft_limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


def _has_entries(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False


def _driver_version(text: str | None) -> str | None:
    match = re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text or "")
    return match.group(1) if match else None


MACHINE = Rules[Machine]()


@MACHINE.rule("M1", "Python")
def python(machine: Machine) -> Answer:
    said = ".".join(map(str, machine.python))
    if machine.python >= OLDEST_PYTHON:
        return ok(said)
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return problem(
        said, f"Python {wanted} or newer is needed", "make the virtual environment with a newer one"
    )


@MACHINE.rule("M2", "torch")
def torch(machine: Machine) -> Answer:
    wanted = ".".join(map(str, OLDEST_TORCH))
    if machine.torch is None:
        why = "this environment has no torch: ranks cannot be started from it"
        return problem("not installed", why, f"pip install 'torch>={wanted}'")
    match = re.match(r"(\d+)\.(\d+)", machine.torch)
    if match is None:
        return unknown(machine.torch)
    if (int(match.group(1)), int(match.group(2))) < OLDEST_TORCH:
        why = f"torch {wanted} or newer is needed"
        return problem(machine.torch, why, f"pip install 'torch>={wanted}'")
    return ok(machine.torch)


@MACHINE.rule("M3", "NCCL")
def nccl(machine: Machine) -> Answer:
    if machine.nccl is not None:
        return ok(machine.nccl)
    if machine.torch is None:
        return unknown("no torch")
    if "+cpu" in machine.torch:
        return warn("torch for CPUs", "ranks cannot use GPUs", "install torch for the driver's CUDA version")
    return ok("no package of its own", "this torch brings NCCL with it, or the site does")


@MACHINE.rule("M4", "NVIDIA driver")
def gpu_driver(machine: Machine) -> Answer:
    if machine.gpu_driver is not None:
        return ok(machine.gpu_driver)
    return ok("none here", "as it should be on a login node; on a GPU node: srun -N1 nvrx-doctor")


@MACHINE.rule("M5", "py-spy")
def py_spy(machine: Machine) -> Answer:
    if machine.py_spy is None:
        why = "Python stacks of a rank that is stopped or deaf to signals cannot be taken from outside"
        return warn("not found", why, "pip install py-spy")
    if machine.ptrace_scope is None:
        return unknown(f"{machine.py_spy}; ptrace_scope unreadable")
    if machine.ptrace_scope > 1:
        return warn(
            f"found; ptrace_scope {machine.ptrace_scope}",
            "the kernel lets no user look into another process, not even an ancestor",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    return ok("found")


@MACHINE.rule("M6", "control groups")
def control_groups(machine: Machine) -> Answer:
    if machine.cgroup_version is None:
        why = "only the kernel log can tell an out-of-memory kill from another SIGKILL, if it may be read"
        return unknown(
            "no hierarchy is mounted here", why, "mount /sys/fs/cgroup (container: --cgroupns=host)"
        )
    return ok(f"version {machine.cgroup_version}")


@MACHINE.rule("M7", "/dev/shm")
def shared_memory(machine: Machine) -> Answer:
    free = machine.shm_bytes
    if free is None:
        return unknown("unreadable")
    said = f"{free / _GIB:.1f} GiB free" if free >= _GIB else f"{free / _MIB:.0f} MiB free"
    if free < 64 * _MIB:
        why = "heartbeat pages, NCCL and data-loader workers live there: ranks fail with 'Bus error'"
        return problem(said, why, "mount a larger tmpfs there (container: --shm-size, --ipc=host)")
    if free < _GIB:
        why = "data-loader workers and NCCL's intra-node buffers can fill it"
        return warn(said, why, "mount a larger tmpfs there (container: --shm-size, --ipc=host)")
    return ok(said)


@MACHINE.rule("M8", "open files")
def open_files(machine: Machine) -> Answer:
    said = _limit(machine.open_files)
    if machine.open_files < 4096:
        why = "NCCL and data-loader workers open thousands: 'Too many open files' at scale"
        return warn(said, why, "ulimit -n 65536 in the batch script, or slurmd's LimitNOFILE")
    return ok(said)


@MACHINE.rule("M9", "locked memory")
def locked_memory(machine: Machine) -> Answer:
    said = _limit(machine.locked_memory)
    if not math.isinf(machine.locked_memory) and machine.infiniband:
        why = "InfiniBand registers memory: NCCL fails to, or falls back to TCP"
        return problem(said, why, "slurmd's LimitMEMLOCK=infinity, and PropagateResourceLimitsExcept=MEMLOCK")
    return ok(said if machine.infiniband else f"{said}; no InfiniBand here")


@MACHINE.rule("M10", "processes")
def processes(machine: Machine) -> Answer:
    said = _limit(machine.processes)
    if machine.processes < 4096:
        why = "threads count, too: ranks, data loaders and NCCL start hundreds each"
        return warn(said, why, "ulimit -u 65536, or slurmd's LimitNPROC")
    return ok(said)


def _limit(value: float) -> str:
    return "unlimited" if math.isinf(value) else f"{value:.0f}"
