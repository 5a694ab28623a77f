"""A node whose hardware is simulated: real checks, real nvidia-ml-py, the simulated driver library, files."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from health_world import CHECKS

from nvrx_slurm.devcluster.hardware import (
    STATE_VARIABLE,
    NodeHardware,
    Shape,
    build_library,
    parse_fault,
)
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.isolation import call_isolated
from nvrx_slurm.health.kernel_log import KernelLogFile
from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.nvml import Nvml, RealNvml
from nvrx_slurm.health.result import CheckResult
from nvrx_slurm.health.runner import run_checks
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.health.tree import Tree

_T = TypeVar("_T")
SMALL = Shape(gpus=2, links=3, nics=2)
PATIENCE_S = 60.0


@functools.cache
def library() -> Path:
    """Build the simulator once for all tests of this process."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler: run bin/nvrx-test")
    folder = tempfile.mkdtemp(prefix="nvrx-test-nvml-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_library(Path(folder))


def load_simulator(state: Path) -> None:
    """Have this process find the simulated driver; only for child processes, which keep it."""
    os.environ[STATE_VARIABLE] = str(state)
    # The dynamic linker knows it by its name from now on.
    ctypes.CDLL(str(library()), mode=ctypes.RTLD_GLOBAL)


class SimulatedNode:
    """One node below ``folder``."""

    def __init__(self, folder: Path, shape: Shape = SMALL) -> None:
        library()
        self.hardware = NodeHardware(folder / "node", shape, "n1")
        self.hardware.heal()
        self.state = StateDir(folder / "state")
        self.hardware.write("/proc/meminfo", "MemTotal: 9000000 kB\nMemAvailable: 8000000 kB")
        self.hardware.write("/proc/sys/kernel/random/boot_id", "one-boot")

    def inject(self, *faults: str) -> None:
        for fault in faults:
            parse_fault(fault, self.hardware.shape).apply(self.hardware)

    def node(self, stage: Stage = Stage.MANUAL, **fields: object) -> Node:
        """As the checks see it; NVML is only ever opened in a child of the test's process."""

        def open_nvml() -> Nvml:
            load_simulator(self.hardware.nvml_state)
            return RealNvml()

        return Node(
            stage=stage,
            host="n1",
            tree=Tree(self.hardware.directory),
            kernel_log=KernelLogFile(str(self.hardware.at("/dev/kmsg"))),
            open_nvml=open_nvml,
            state=self.state,
            job=JobContext(),
            **fields,  # type: ignore[arg-type]
        )

    def check(
        self, name: str, stage: Stage = Stage.MANUAL, budget_s: float = PATIENCE_S, **settings: object
    ) -> Sequence[CheckResult]:
        """Run one check as nvrx-health does, in a process of its own."""
        check = CHECKS[name]
        config = HealthConfig(checks={name: check.settings(**{"timeout_s": 50.0, **settings})})
        (finished,) = run_checks([check], self.node(stage), config, budget_s)
        return finished.results

    def baseline(self) -> None:
        """Remember what is there now."""
        node = self.node()

        def work() -> bool:
            take_baseline(node).save(node.state)
            return True

        in_child(work, bool)


def in_child(work: Callable[[], _T], kind: type[_T]) -> _T:
    """Return what ``work`` returns in a process of its own."""
    answer = call_isolated({"work": work}, PATIENCE_S, kind)["work"]
    assert answer.value is not None, answer.trouble
    return answer.value
