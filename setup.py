"""Build entry point; everything declarative is in setup.cfg, except the one extension module.

``nvrx_slurm.straggler._cupti`` (``csrc/cupti``) needs a C++ compiler, Python's headers and pybind11, and no
CUDA. If it can't be built the package is complete without it: sections are then timed on the GPU by CUDA
events, which the log says.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension, setup

_SOURCES = Path("csrc", "cupti")
_NEEDED = ("cupti.h", "cuda.h", "crt/host_defines.h")


def _extensions() -> list[Extension]:
    try:
        import pybind11
    except ImportError:
        return []
    names = [path.name for path in sorted(Path(__file__).parent.joinpath(_SOURCES).glob("*.cpp"))]
    headers = _cupti_headers()
    if headers is None:
        # It only compares our declarations with them.
        names.remove("abi_check.cpp")
    return [
        Extension(
            "nvrx_slurm.straggler._cupti",
            [str(_SOURCES / name) for name in names],
            depends=[str(path) for path in sorted(_SOURCES.glob("*.h"))],
            include_dirs=[pybind11.get_include(), *map(str, headers or ())],
            define_macros=[("NVRX_CUPTI_HEADERS", f'"{_version(headers)}"')] if headers else [],
            libraries=["dl"],
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
        )
    ]


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
