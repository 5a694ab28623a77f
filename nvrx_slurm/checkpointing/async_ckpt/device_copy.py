"""Copies from a GPU into an arena, on a stream of their own."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from nvrx_slurm.checkpointing.async_ckpt.arena import Arena

_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of this process
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
        _pin(self._arena, storage.device)
        if storage.device not in _streams:
            _streams[storage.device] = torch.cuda.Stream(storage.device)
        stream = _streams[storage.device]
        stream.wait_stream(torch.cuda.current_stream(storage.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)  # who frees the storage meanwhile frees it for others after the copy
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


def _pin(arena: Arena, device: Any) -> None:
    """Let devices write to the arena directly (cudaHostRegister); copies are then asynchronous.

    Raises:
        RuntimeError: it can't be, for want of memory that may be locked, say.
    """
    if arena.key in _pinned:
        return
    with torch.cuda.device(device):  # else a context is made on another
        answer = torch.cuda.cudart().cudaHostRegister(arena.address, arena.capacity, _PORTABLE)
    torch.cuda.check_error(int(answer))
    _pinned.add(arena.key)
    # Not at the end of the program: the driver does it, and a device that hangs would hold that up.
    weakref.finalize(arena, _unpin, arena.key, arena.address).atexit = False


def _unpin(key: int, address: int) -> None:
    _pinned.discard(key)
    torch.cuda.cudart().cudaHostUnregister(address)
