"""Copies from a GPU into an arena, on a stream of their own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from nvrx_slurm.checkpointing.async_ckpt.arena import Arena

_pinned: set[int] = set()
_streams: dict[Any, Any] = {}


def bytes_of(storage: Any) -> Any:
    """Return all bytes of a storage as a tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class DeviceCopies:
    """What one snapshot copies from devices; nothing happens where there is none."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._events: dict[Any, Any] = {}
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        return bool(self._events)

    def start(self, offset: int, storage: Any) -> None:
        """Begin to copy a storage as it is when the work now queued on the current stream has run."""
        target = self._arena.as_tensor(offset, storage.nbytes())
        source = bytes_of(storage)
        if storage.device.type != "cuda":
            target.copy_(source)
            return
        _pin(self._arena)
        stream = _streams.setdefault(storage.device, torch.cuda.Stream(storage.device))
        stream.wait_stream(torch.cuda.current_stream(storage.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._events[storage.device] = stream.record_event()

    def guard(self) -> None:
        """Let what is queued from now on run only after the copies."""
        for device, event in list(self._events.items()):
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Return when everything has been copied."""
        with self._lock:
            for event in self._events.values():
                event.synchronize()


def _pin(arena: Arena) -> None:
    """Let the device write to the arena directly (cudaHostRegister); copies are then asynchronous."""
    if arena.key not in _pinned:
        _pinned.add(arena.key)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(arena.address, arena.capacity, 0))
        weakref.finalize(arena, _unpin, arena.key, arena.address)


def _unpin(key: int, address: int) -> None:
    _pinned.discard(key)
    torch.cuda.cudart().cudaHostUnregister(address)
