"""Where libcupti is. Nothing is opened before it is asked for."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

_NAME = re.compile(r"libcupti\.so\.(\d+)(?:[.\d]*)$")
_KNOWN_MAJORS = (13, 12, 11)


def libraries(maps: Path = Path("/proc/self/maps"), packages: Path | None = None) -> Iterator[str]:
    """Return paths of libcupti, the best first: what this process has open, torch's packages, the toolkit.

    One process must not have two of them, so what is open already comes first. Then the ones of the CUDA
    version that torch is built for, which is the driver interface that training uses.

    Args:
        maps: the files that this process has mapped.
        packages: the folder with the ``nvidia`` packages; this interpreter's by default.
    """
    seen = set()
    for path in (*_open(maps), *_of_packages(packages), *_of_toolkits(), *_by_name()):
        if path not in seen:
            seen.add(path)
            yield path


def _open(maps: Path) -> Iterator[str]:
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        path = line.rpartition(" ")[2]
        if _NAME.search(path):
            yield path


def _of_packages(packages: Path | None) -> list[str]:
    folder = (packages or Path(sysconfig.get_paths()["purelib"])) / "nvidia"
    return _sorted([*folder.glob("cuda_cupti/lib/libcupti.so.*"), *folder.glob("cu*/lib/libcupti.so.*")])


def _of_toolkits() -> Iterator[str]:
    for toolkit in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            for folder in ("extras/CUPTI/lib64", "lib64"):
                yield from _sorted(Path(toolkit, folder).glob("libcupti.so.*"))


def _by_name() -> Iterator[str]:
    major = _of_torch()
    for version in (major, *(each for each in _KNOWN_MAJORS if each != major)):
        if version is not None:
            yield f"libcupti.so.{version}"


def _sorted(paths: Iterator[Path] | list[Path]) -> list[str]:
    """Those of torch's CUDA version first, then the highest; one for each version."""
    found: dict[int, str] = {}
    for path in sorted(paths):
        if match := _NAME.search(path.name):
            found.setdefault(int(match[1]), str(path))
    return [found[major] for major in sorted(found, key=lambda major: (major != _of_torch(), -major))]


def _of_torch() -> int | None:
    version: str | None = torch.version.cuda
    return int(version.partition(".")[0]) if version else None
