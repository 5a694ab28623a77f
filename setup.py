"""Build entry point; everything declarative is in setup.cfg, except the extension modules.

They need a C++ compiler, Python's headers and pybind11, and no CUDA. If they can't be built the package is
complete without them: without ``nvrx_slurm.straggler._cupti`` (``csrc/cupti``) sections are timed on the GPU
by CUDA events, which the log says; without ``nvrx_slurm.checkpointing.async_ckpt._copying``
(``csrc/copying``) snapshots in host memory are copied by memmove, which costs training more.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from setuptools import Extension, setup

_CUPTI = Path("csrc", "cupti")
_COPYING = Path("csrc", "copying")
_NEEDED = ("cupti.h", "cuda.h", "crt/host_defines.h")


def _extensions() -> list[Extension]:
    try:
        import pybind11
    except ImportError:
        return []
    headers = _cupti_headers()
    left_out = () if headers else ("abi_check.cpp",)  # it only compares our declarations with them
    return [
        _extension("nvrx_slurm.checkpointing.async_ckpt._copying", _COPYING, [pybind11.get_include()]),
        _extension(
            "nvrx_slurm.straggler._cupti",
            _CUPTI,
            [pybind11.get_include(), *map(str, headers or ())],
            left_out=left_out,
            define_macros=[("NVRX_CUPTI_HEADERS", f'"{_version(headers)}"')] if headers else [],
            libraries=["dl"],
        ),
    ]


def _extension(
    name: str, folder: Path, include_dirs: list[str], *, left_out: Collection[str] = (), **more: Any
) -> Extension:
    """Return the extension that all C++ files of a folder make."""
    sources = sorted(Path(__file__).parent.joinpath(folder).glob("*.cpp"))
    return Extension(
        name,
        [str(folder / path.name) for path in sources if path.name not in left_out],
        depends=[str(path) for path in sorted(folder.glob("*.h"))],
        include_dirs=include_dirs,
        language="c++",
        extra_compile_args=[
            "-std=c++17",
            "-O2",
            "-g0",
            "-Wall",
            "-Wextra",
            "-fvisibility=hidden",
            "-pthread",
        ],
        extra_link_args=["-pthread"],
        optional=True,
        **more,
    )


def _cupti_headers() -> tuple[Path, ...] | None:
    """Return the include folders of the first complete set: torch's packages, then the toolkit."""
    for folders in _candidates():
        has = {name: any((folder / name).is_file() for folder in folders) for name in _NEEDED}
        if all(has.values()):
            return folders
    return None


def _candidates() -> Iterator[tuple[Path, ...]]:
    packages = Path(sysconfig.get_paths()["purelib"], "nvidia")
    yield (packages / "cu13" / "include",)
    yield tuple(packages / name / "include" for name in ("cuda_cupti", "cuda_runtime", "cuda_nvcc"))
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            yield Path(toolkit, "extras", "CUPTI", "include"), Path(toolkit, "include")


def _version(folders: tuple[Path, ...]) -> str:
    for header in (folder / "cupti_version.h" for folder in folders):
        if header.is_file():
            found = re.search(r"#define\s+CUPTI_API_VERSION\s+(\d+)", header.read_text(errors="replace"))
            return found[1] if found else ""
    return ""


setup(ext_modules=_extensions())
