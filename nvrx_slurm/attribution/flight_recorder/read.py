"""Read the dumps of a directory: in processes of limited memory, one dump at a time in each."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import nvrx_slurm
from nvrx_slurm.attribution.flight_recorder.load import (
    MAX_DUMP_BYTES,
    DumpError,
    looks_like_dump,
    parse_dump,
    read_capped,
)
from nvrx_slurm.attribution.flight_recorder.trace import MAX_RANKS, RankTrace, reduce_dump

MANIFEST_SUFFIX = ".manifest.json"
_MAX_MANIFEST_BYTES = 64 * 1024
BATCH = 16
"""Dumps that a child tells at once."""
_RANK = re.compile(r"rank[_-]?(\d+)")
_TRAILING = re.compile(r"(\d+)$")
_SUFFIXES = (".json", ".pickle", ".pkl", ".bin", ".gz")


class Manifest(msgspec.Struct, frozen=True):
    """What the agent writes beside a dump, as ``<dump>.manifest.json``; torch's own dump says none of it."""

    rank: int
    node: str = ""
    job: str = ""
    cycle: int = -1
    time: float = 0.0
    """When the dump was taken, Unix seconds."""


@dataclass
class Dumps:
    """The traces that could be read, and what could not."""

    traces: dict[int, RankTrace] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)
    files: int = 0
    unreadable: int = 0


def rank_of(name: str) -> int | None:
    """Return the rank that a dump's file name tells: ``_dump_3``, ``host7_3``, ``trace_rank3_1699.json``."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    found = _RANK.search(name) or _TRAILING.search(name)
    return int(found.group(1)) if found else None


def find_dumps(directory: Path) -> list[Path]:
    """Return the files of a directory that may be dumps, sorted by name; links are left out.

    Raises:
        OSError: the directory cannot be read.
    """
    with os.scandir(directory) as entries:
        paths = [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    named = [p for p in paths if not p.name.endswith(MANIFEST_SUFFIX) and rank_of(p.name) is not None]
    return sorted(path for path in named if looks_like_dump(path))


def read_dumps(paths: Sequence[Path], workers: int | None = None) -> Dumps:
    """Read dumps; a file that is no usable dump becomes a caveat.

    Args:
        workers: processes; the default is one per core.
    """
    dumps = Dumps(files=len(paths))
    for path, trace, problem in _read_all(paths, workers or os.cpu_count() or 1):
        if trace is None:
            dumps.unreadable += 1
            dumps.caveats.append(f"{path.name}: {problem}")
            continue
        dumps.caveats.extend(trace.caveats)
        other = dumps.traces.get(trace.rank)
        if other is not None:
            dumps.caveats.append(f"rank {trace.rank} has several dumps: the newest is used")
            if (other.written_at or 0.0) > (trace.written_at or 0.0):
                continue
        dumps.traces[trace.rank] = trace
    return dumps


def read_dump(path: Path) -> RankTrace:
    """Read one dump and the manifest beside it.

    Raises:
        DumpError: it is no usable dump.
    """
    try:
        dump = parse_dump(read_capped(path, MAX_DUMP_BYTES + 1))
        manifest = _manifest(path)
        rank = manifest.rank if manifest else rank_of(path.name)
        if rank is None or not 0 <= rank < MAX_RANKS:
            raise DumpError(f"neither its name nor a manifest tells a rank below {MAX_RANKS:,}")
        trace = reduce_dump(rank, dump)
    except OSError as error:
        raise DumpError(error.strerror or str(error)) from error
    if manifest:
        trace.node = manifest.node or None
        trace.written_at = manifest.time or None
    return trace


def _manifest(path: Path) -> Manifest | None:
    try:
        data = read_capped(path.with_name(path.name + MANIFEST_SUFFIX), _MAX_MANIFEST_BYTES)
        return msgspec.json.decode(data, type=Manifest)
    except (OSError, DumpError, msgspec.DecodeError):
        return None


Read = tuple[Path, RankTrace | None, str]
"""A file, its trace or none, and why there is none."""


def _read_all(paths: Sequence[Path], workers: int) -> Iterator[Read]:
    count = max(1, min(workers, -(-len(paths) // BATCH)))
    with ThreadPoolExecutor(count) as threads:
        for found in threads.map(_read_in_child, [paths[at::count] for at in range(count)]):
            yield from found


def _read_in_child(paths: Sequence[Path]) -> list[Read]:
    """Read dumps in a process of limited memory; those that it did not come to are told as unreadable."""
    if not paths:
        return []
    # Not multiprocessing: that would run the caller's main module again.
    package_root = str(Path(nvrx_slurm.__file__).parent.parent)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])}
    argv = [sys.executable, "-m", "nvrx_slurm.attribution.flight_recorder.child"]
    found: list[Read] = []
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(b"\0".join(map(os.fsencode, paths)))
            child.stdin.close()
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                found += pickle.load(child.stdout)  # of our own child, not of a dump
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            pipe.close()
    return found + [(path, None, "the process that read it was killed") for path in paths[len(found) :]]
