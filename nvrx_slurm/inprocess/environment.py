"""Settings around the job that in-process restart depends on, and that are easily forgotten."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

_OLDEST_NCCL = (2, 26, 2)
_BAD_NCCL = ((2, 28, 3), (2, 28, 8))
"""First and last."""


def warn_about_environment(hard_timeout: timedelta, environ: Mapping[str, str] = os.environ) -> None:
    """Warn once for each setting that keeps ranks from surviving a fault, on one rank of a node."""
    if environ.get("LOCAL_RANK", "0") != "0":
        return
    for sentence in complaints(hard_timeout, environ, nccl_version):
        warnings.warn(sentence, UserWarning, stacklevel=3)


def complaints(
    hard_timeout: timedelta, environ: Mapping[str, str], nccl: Callable[[], tuple[int, ...] | None]
) -> Iterator[str]:
    """Yield a sentence for each wrong setting: which, what it is, what it should be and why.

    Args:
        hard_timeout: the wrapper's.
        environ: the process's.
        nccl: returns NCCL's version; None where this torch has none or no GPU is there.
    """
    level = environ.get("TORCH_CPP_LOG_LEVEL", "")
    if level.upper() not in ("ERROR", "FATAL", "3", "2"):
        yield (
            f"TORCH_CPP_LOG_LEVEL is {level!r}: with 'error' torch does not fill the log with warnings of "
            "connections that a restart closes"
        )
    version = nccl()
    if version is None:
        return
    if environ.get("TORCH_NCCL_RETHROW_CUDA_ERRORS", "1") != "0":
        yield (
            f"TORCH_NCCL_RETHROW_CUDA_ERRORS is {environ.get('TORCH_NCCL_RETHROW_CUDA_ERRORS', '')!r}: with "
            "any value but '0' a CUDA error ends the process from NCCL's watchdog thread"
        )
    if environ.get("NCCL_NVLS_ENABLE", "") != "0":
        yield (
            f"NCCL_NVLS_ENABLE is {environ.get('NCCL_NVLS_ENABLE', '')!r}: with any value but '0' aborting "
            "communicators can hang or leak memory of NVLink SHARP"
        )
    yield from _watchdog(hard_timeout, environ)
    if version < _OLDEST_NCCL or _BAD_NCCL[0] <= version <= _BAD_NCCL[1]:
        bad = ".".join(map(str, version))
        yield (
            f"NCCL is {bad}: aborting its communicators can hang; 2.26.2 and later work, but for "
            "2.28.3 to 2.28.8"
        )


def _watchdog(hard_timeout: timedelta, environ: Mapping[str, str]) -> Iterator[str]:
    if environ.get("TORCH_NCCL_ENABLE_MONITORING", "1") == "0":
        return
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    try:
        watchdog_s = float(environ.get(name, "480"))  # torch's own default
    except ValueError:
        return  # torch itself refuses it
    if watchdog_s <= hard_timeout.total_seconds():
        yield (
            f"{name} is {watchdog_s:g} s and hard_timeout {hard_timeout.total_seconds():g} s: it must be the "
            "longer one, or NCCL's monitor ends the process first"
        )


def nccl_version() -> tuple[int, ...] | None:
    """Return NCCL's version; None where torch has not been imported or has none, or there is no GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    if not torch.cuda.device_count():
        return None
    return tuple(int(part) for part in torch.cuda.nccl.version()[:3])
