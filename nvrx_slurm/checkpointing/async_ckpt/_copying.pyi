"""The extension module that ``csrc/copying`` makes."""

from collections.abc import Sequence

def copy(ranges: Sequence[tuple[int, int, int]], threads: int = 1) -> None:
    """Copy memory past the processor's caches, without the GIL.

    Args:
        ranges: each an address to copy to, one to copy from, and a size in bytes; none overlap.
        threads: that copy, the caller's among them.
    """
