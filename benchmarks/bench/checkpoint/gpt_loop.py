"""A real training loop to save from: what a save adds to it, and how much of the time it trains."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from gpt.model import GPT

Save = Callable[[Path], None]
"""Begins to save; returns when training may go on."""


@dataclass
class Loop:
    """A GPT of 19 million parameters with AdamW: 230 MiB of state, as a checkpoint has it."""

    model: Any = field(default_factory=lambda: GPT(block=64, layers=6, heads=8, width=512))

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._tokens = torch.randint(0, 256, (8, 64))
        self.step()

    def step(self) -> float:
        """Return how long it took, in seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self._tokens, self._tokens).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size(self) -> int:
        """Of the state, in bytes."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values()) * 3


@contextmanager
def asynchronous(loop: Loop, **options: Any) -> Iterator[Save]:
    checkpoint = TorchAsyncCheckpoint(**options)
    checkpoint.prepare(loop.state())

    def save(path: Path) -> None:
        checkpoint.finalize_async_save()
        checkpoint.async_save(loop.state(), path)

    yield save
    checkpoint.close()


@contextmanager
def synchronous(loop: Loop) -> Iterator[Save]:
    yield lambda path: storage.save(loop.state(), path)


@contextmanager
def torch_save(loop: Loop) -> Iterator[Save]:
    yield lambda path: torch.save(loop.state(), path)


@contextmanager
def memcpy_in_a_thread(loop: Loop) -> Iterator[Save]:
    """The floor: a copy of so many bytes beside the step, which no step waits for; nothing is saved."""
    size = loop.size()
    source, target = (mmap.mmap(-1, size) for _ in range(2))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target)]
    for address in addresses:
        ctypes.memset(address, 1, size)
    copies: list[threading.Thread] = []

    def save(_path: Path) -> None:
        copies.append(threading.Thread(target=ctypes.memmove, args=(addresses[1], addresses[0], size)))
        copies[-1].start()

    yield save
    for copy in copies:
        copy.join()


def added(loop: Loop, save: Save, folder: Path, runs: int) -> tuple[list[float], list[float]]:
    """Return what a save adds to the two steps after it, and what those take without, in seconds.

    Each is compared with steps right before, since machines change.
    """
    more, plain = [], []
    for _ in range(runs + 1):
        without = loop.step() + loop.step()
        began = time.perf_counter()
        save(folder / "training.pt")
        loop.step()
        loop.step()
        more.append(time.perf_counter() - began - without)
        plain.append(without / 2)
        for _ in range(3):  # the write ends beside these
            loop.step()
    return more[1:], plain[1:]


def share_of_training(loop: Loop, save: Save, folder: Path, *, every: int, steps: int) -> float:
    """Return the part of the wall time that plain steps would have taken, with a save every so many."""
    plain = sum(loop.step() for _ in range(steps))
    began = time.perf_counter()
    for step in range(steps):
        loop.step()
        if (step + 1) % every == 0:
            save(folder / "training.pt")
    loop.step()  # the last save meets a step, too
    wall = time.perf_counter() - began
    return plain * (steps + 1) / steps / wall
