"""Read the dumps of a directory: in a pool of limited processes, one dump at a time in each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from nvrx_slurm.attribution.flight_recorder.load import (
    MAX_DUMP_BYTES,
    DumpError,
    looks_like_dump,
    parse_dump,
    read_capped,
)
from nvrx_slurm.attribution.flight_recorder.trace import RankTrace, reduce_dump

MANIFEST_SUFFIX = ".manifest.json"
_MAX_MANIFEST_BYTES = 64 * 1024
_BATCH = 16
_WORKER_MEMORY = 3 * 2**30
"""Address space of a pool's process: a hostile dump gets a MemoryError, not the machine's memory."""
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
        if rank is None or rank < 0:
            raise DumpError("neither its name nor a manifest tells the rank")
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


_Read = tuple[Path, RankTrace | None, str]


def _read_all(paths: Sequence[Path], workers: int) -> Iterator[_Read]:
    batches = [paths[at : at + _BATCH] for at in range(0, len(paths), _BATCH)]
    if not batches:
        return
    # Fork would copy the locks of the caller's threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(batches)), mp_context=context, initializer=_prepare) as pool:
        reading = [(batch, pool.submit(_read_and_collect, batch)) for batch in batches]
        for batch, found in reading:
            try:
                yield from found.result()
            except BrokenProcessPool:
                yield from ((path, None, "the process that read it was killed") for path in batch)


def _prepare() -> None:
    """Set up a process of the pool."""
    # Half of the time goes into looking for cycles, and a dump has none unless it is hostile.
    gc.disable()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _WORKER_MEMORY if hard == resource.RLIM_INFINITY else min(hard, _WORKER_MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _read_and_collect(paths: Sequence[Path]) -> list[_Read]:
    found = _read_batch(paths)
    gc.collect()
    return found


def _read_batch(paths: Sequence[Path]) -> list[_Read]:
    found: list[_Read] = []
    for path in paths:
        try:
            found.append((path, read_dump(path), ""))
        except DumpError as error:
            found.append((path, None, str(error)))
    return found
