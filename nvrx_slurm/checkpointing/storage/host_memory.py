"""The bytes of tensor storages in host memory. Needs torch, no NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import torch

_HUGE_PAGE = 2 << 20
_WORTH_HUGE_PAGES = 2 * _HUGE_PAGE
_libc = ctypes.CDLL(None)


def host_bytes(storage: Any) -> memoryview:
    """Return the bytes of a storage: shared if it is in host memory, else a copy."""
    storage = storage.cpu()
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array.owner = storage  # a memoryview keeps the array alive, and that the storage
    return memoryview(array).cast("B")


def new_storage(size: int) -> Any:
    """Allocate a storage, on huge pages if there are: faults of small ones take longer than reading."""
    storage = torch.UntypedStorage(size)
    if size >= _WORTH_HUGE_PAGES:
        start = -(-storage.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
        length = (storage.data_ptr() + size - start) // _HUGE_PAGE * _HUGE_PAGE
        with contextlib.suppress(AttributeError):  # advice; a system without it is just slower
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return storage
