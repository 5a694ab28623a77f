"""Reads the dumps that standard input names, NUL between them, and writes pickled lists of what it found.

Run by ``read.py`` as a process of its own: a hostile dump that asks for all memory gets a MemoryError here.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import sys
from pathlib import Path

from nvrx_slurm.attribution.flight_recorder.load import DumpError
from nvrx_slurm.attribution.flight_recorder.read import BATCH, Read, read_dump

_MEMORY = 3 * 2**30
"""Address space."""


def main() -> None:
    # Half of the time goes into looking for cycles, and a dump has none unless it is hostile.
    gc.disable()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MEMORY if hard == resource.RLIM_INFINITY else min(hard, _MEMORY)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    paths = [Path(os.fsdecode(name)) for name in sys.stdin.buffer.read().split(b"\0")]
    for at in range(0, len(paths), BATCH):
        pickle.dump([_read(path) for path in paths[at : at + BATCH]], sys.stdout.buffer)
        gc.collect()
    sys.stdout.buffer.flush()


def _read(path: Path) -> Read:
    try:
        return path, read_dump(path), ""
    except DumpError as error:
        return path, None, str(error)


if __name__ == "__main__":
    main()
