"""Copies of host memory without the GIL: past the processor's caches where ``csrc/copying`` is built."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

Range = tuple[int, int, int]
"""An address to copy to, one to copy from, and a size in bytes."""


def _copy_each(ranges: Sequence[Range], threads: int = 1) -> None:
    """On the caller's thread alone, whatever ``threads`` says: without a compiler it is at least right."""
    del threads
    for target, source, size in ranges:
        ctypes.memmove(target, source, size)  # releases the GIL


def _best() -> Callable[[Sequence[Range], int], None]:
    try:
        from nvrx_slurm.checkpointing.async_ckpt import _copying
    except ImportError:
        return _copy_each
    return _copying.copy


copy = _best()
"""Copy all ranges, of which none overlap, with so many threads, the caller's among them; return when done."""
