"""The simulated NVML: building ``csrc/nvml_sim``, and the state file that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import nvrx_slurm
from nvrx_slurm.devcluster.errors import DevClusterError

STATE_VARIABLE = "NVRX_NVML_SIM_STATE"
"""Where a process looks for the state file; unset: ``/run/nvrx-node/nvml``."""
LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(nvrx_slurm.__file__).parents[1] / "csrc" / "nvml_sim"
_FLAGS = ("-std=c11", "-D_DEFAULT_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
_LINK_FLAGS = ("-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,defs")
CALLS = (
    "nvmlInit",
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkErrorCounter",
    "nvmlDeviceGetFieldValues",
)
"""What the simulator answers, without versions."""
_FIRST, _LAST = "nvml-sim 1", "end"
_PATIENCE_S = 120.0


def build_library(directory: Path) -> Path:
    """Compile the simulator into ``directory``, which must be this user's own; return the library.

    Raises:
        DevClusterError: no C compiler, no source, or it does not compile.
    """
    compiler = shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")
    if compiler is None:
        raise DevClusterError(
            "the simulated NVML needs a C compiler, and there is none here: apt-get install gcc libc6-dev"
        )
    sources = sorted(_SOURCE.glob("*.c"))
    if not sources:
        raise DevClusterError(f"the source of the simulated NVML is not in {_SOURCE}: run from a clone")
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    library, fresh = directory / LIBRARY, directory / f"{LIBRARY}.new"
    argv = [compiler, *_FLAGS, *_LINK_FLAGS, "-o", str(fresh), *map(str, sources)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DevClusterError(f"{compiler} does not run: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300]
        raise DevClusterError(f"{compiler} does not compile {_SOURCE}: {said}")
    fresh.chmod(0o755)
    fresh.replace(library)
    return library


def make_linker_cache(library: Path, cache: Path) -> None:
    """Write a cache for the dynamic linker that knows the library beside all that this machine has.

    Raises:
        DevClusterError: ldconfig does not do it.
    """
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin") or "ldconfig"
    # -i: leave the machine's own auxiliary cache alone; -X: and its links.
    argv = [ldconfig, "-i", "-X", "-C", str(cache), str(library.parent)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DevClusterError(f"{ldconfig} does not run: {error}") from error
    if done.returncode != 0 or not cache.exists():
        raise DevClusterError(f"{' '.join(argv)}: {' '.join(done.stderr.split())[:300]}")
    cache.chmod(0o644)


def state_text(values: Mapping[str, str]) -> str:
    """Return the state file; the format is described in ``csrc/nvml_sim/state.c``."""
    return "\n".join([_FIRST, *(f"{key} {value}" for key, value in values.items()), _LAST]) + "\n"


def parse_state(text: str) -> dict[str, str]:
    """Return what :func:`state_text` has written.

    Raises:
        ValueError: it is something else, or was cut off.
    """
    lines = text.split("\n")
    if len(lines) < 3 or (lines[0], *lines[-2:]) != (_FIRST, _LAST, ""):
        raise ValueError("not a whole state file of the simulated NVML")
    return dict(line.split(" ", 1) for line in lines[1:-2])
