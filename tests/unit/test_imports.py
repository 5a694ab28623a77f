"""What starts quickly must not import torch: hooks, reports, and the tools on a login node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nvrx_slurm

PACKAGE = Path(nvrx_slurm.__file__).parent
COMMANDS = sorted(path.stem for path in (PACKAGE / "cli").glob("*.py") if path.stem != "__init__")
MODULES = [
    "nvrx_slurm",
    "nvrx_slurm.slurm",
    "nvrx_slurm.journal",
    "nvrx_slurm.health.report",
    "nvrx_slurm.report",
    "nvrx_slurm.attribution.attribute",
    "nvrx_slurm.devcluster",
    "nvrx_slurm.wire",
    "nvrx_slurm.testing",
    "nvrx_slurm.fault_tolerance",
    "nvrx_slurm.coordinator.job",
    "nvrx_slurm.coordinator.store",
    "nvrx_slurm.checkpointing.storage",
    "nvrx_slurm.checkpointing.storage.manifest",
    "nvrx_slurm.checkpointing.async_ckpt.worker",
    "nvrx_slurm.agent.agent",
    "nvrx_slurm.agent.worker_server",
    *(f"nvrx_slurm.cli.{command}" for command in COMMANDS),
]


def imported(*command: str) -> set[str]:
    """The modules that a Python command imports, by ``-X importtime``."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_the_measurement_sees_what_is_imported() -> None:
    assert "json.decoder" in imported("-c", "import json")


@pytest.mark.parametrize("module", MODULES)
def test_importing_it_imports_no_torch(module: str) -> None:
    found = imported("-c", f"import {module}")
    assert module in found
    assert not {name for name in found if name.split(".")[0] in ("torch", "numpy")}


@pytest.mark.parametrize(
    "command", ["nvrx-srun", "nvrx-launch", "nvrx-report", "nvrx-devcluster", "nvrx-agent", "nvrx-health"]
)
def test_its_help_imports_no_torch_and_no_grpc(command: str) -> None:
    found = imported(str(Path(sys.executable).parent / command), "--help")
    assert "click" in found
    assert not {name for name in found if name.split(".")[0] in ("torch", "numpy", "grpc", "asyncio")}
