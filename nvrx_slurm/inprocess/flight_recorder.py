"""Operations that were under way at a fault, from torch's Flight Recorder, into one file for each rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from nvrx_slurm.inprocess.bounded import call_with_timeout
from nvrx_slurm.whole_file import replace_file

TRACE_PATH = "NVRX_FR_TRACE_PATH"
_SIZES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_LONGEST = timedelta(seconds=1)
_log = logging.getLogger(__name__)


def active_trace(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the operations under way as JSON, without stack traces; None where nothing is recorded.

    It has to happen before groups are aborted, which ends these operations, so it may take 1 s at the most.
    """
    if not any(_is_positive(environ.get(name, "")) for name in _SIZES):
        return None
    c10d = sys.modules.get("torch._C._distributed_c10d")
    # Its name until torch 2.8.
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return None
    try:
        return bytes(
            call_with_timeout(lambda: dump(True, True), _LONGEST, "taking the Flight Recorder's trace")
        )
    except Exception as error:
        _log.warning("the Flight Recorder's trace is lost: %s", error)
        return None


def write_trace(trace: bytes, directory: str, iteration: int, rank: int) -> None:
    """Write it whole or not at all; what goes wrong is logged."""
    place = Path(directory, f"iter_{iteration}")
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place / f"_dump_{rank}.json", trace)
    except OSError as error:
        _log.warning("the Flight Recorder's trace was not written to %s: %s", place, error.strerror)


def _is_positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0
