"""Synthetic activity records, laid out as CUPTI's are, and the simulated libcupti."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

KERNEL, DRIVER, RUNTIME, CONCURRENT_KERNEL, EXTERNAL = 3, 4, 5, 10, 39
DISTANCE = 216
"""Bytes of CUpti_ActivityKernel10; here of every record."""
LAUNCH_KERNEL = 211
"""cudaLaunchKernel; CUPTI's number of it."""
_SOURCE = Path(__file__).parents[2] / "csrc" / "cupti_sim"
_PATIENCE_S = 120

kernel_type = np.dtype(
    {
        "names": ["kind", "start", "end", "correlation", "name"],
        "formats": ["u4", "u8", "u8", "u4", "u8"],
        "offsets": [0, 16, 24, 92, 104],
        "itemsize": DISTANCE,
    }
)
external_type = np.dtype(
    {
        "names": ["kind", "external_kind", "id", "correlation"],
        "formats": ["u4", "u4", "u8", "u4"],
        "offsets": [0, 4, 8, 16],
        "itemsize": DISTANCE,
    }
)
api_type = np.dtype(
    {
        "names": ["kind", "start", "end", "correlation"],
        "formats": ["u4", "u8", "u8", "u4"],
        "offsets": [0, 8, 16, 32],
        "itemsize": DISTANCE,
    }
)
_names: dict[str, Any] = {}


def name_address(name: str) -> int:
    """Return where a name lies; always at the same place, as CUPTI's do."""
    text = _names.setdefault(name, ctypes.create_string_buffer(name.encode()))
    return ctypes.addressof(text)


def kernels(name: str, durations_ns: Any, correlation: Any = 0, start: int = 1000) -> Any:
    """Return one record for each duration."""
    durations = np.asarray(durations_ns, dtype=np.uint64)
    records = np.zeros(len(durations), kernel_type)
    records["kind"] = CONCURRENT_KERNEL
    records["start"] = start
    records["end"] = np.uint64(start) + durations
    records["correlation"] = correlation
    records["name"] = name_address(name)
    return records


def correlations(section: int, numbers: Any, external_kind: int = 5) -> Any:
    """Return the records that name the section of each launch."""
    records = np.zeros(len(numbers), external_type)
    records["kind"], records["external_kind"] = EXTERNAL, external_kind
    records["id"], records["correlation"] = section, numbers
    return records


def launches(when: Any, numbers: Any) -> Any:
    """Return the records of calls that launch."""
    records = np.zeros(len(numbers), api_type)
    records["kind"], records["start"], records["correlation"] = RUNTIME, when, numbers
    return records


def others(kind: int, count: int) -> Any:
    records = np.zeros(count, kernel_type)
    records["kind"] = kind
    return records


def extension() -> Any:
    """Return the extension module; without a compiler it is not there, else it must be."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        return pytest.importorskip("nvrx_slurm.straggler._cupti")
    try:
        from nvrx_slurm.straggler import _cupti
    except ImportError as error:
        pytest.fail(f"{error}: it is built by pip install -e '.[dev]', or bin/nvrx-test")
    return _cupti


@functools.cache
def simulated_library() -> Path:
    """Build the simulated libcupti once for all tests of this process."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler: run bin/nvrx-test")
    folder = tempfile.mkdtemp(prefix="nvrx-test-cupti-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = Path(folder, "lib64", "libcupti.so.13")
    library.parent.mkdir()
    argv = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run(
        [*argv, "-o", library, _SOURCE / "cupti_sim.cpp"],
        check=True,
        timeout=_PATIENCE_S,
        capture_output=True,
    )
    return library


class SimulatedCupti:
    """The library that the extension has open, seen from the side of the GPU."""

    def __init__(self) -> None:
        self.path = simulated_library()
        self._library = ctypes.CDLL(str(self.path))
        self._library.sim_launch.argtypes = (
            ctypes.c_char_p,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
        )

    def launch(self, name: str, ns: int, kernels: int = 1, call: int = LAUNCH_KERNEL) -> None:
        name_address(name)
        self._library.sim_launch(ctypes.cast(_names[name], ctypes.c_char_p), ns, kernels, call)

    def set(self, key: str, value: int) -> None:
        self._library.sim_set(key.encode(), ctypes.c_long(value))

    def calls(self, name: str) -> int:
        return int(self._library.sim_calls(name.encode()))

    def other_record(self, kind: int) -> None:
        self._library.sim_other(kind)

    def take_over(self) -> None:
        self._library.sim_taken_over()

    @property
    def is_recording(self) -> bool:
        return bool(self._library.sim_is_recording())
