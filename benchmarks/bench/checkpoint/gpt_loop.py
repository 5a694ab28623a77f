"""A real training loop to save from: what a save adds to it, and how much of the time it trains."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvrx_slurm.checkpointing.storage.pace import Pace

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from gpt.model import GPT

_FILE = "training.pt"


@dataclass(frozen=True)
class Saver:
    """Who saves a loop's state."""

    begin: Callable[[Path], None]
    """Begin to save; returns when training may go on."""
    is_over: Callable[[], bool] = lambda: True
    """Called after each step, as a training script does: whether all saves are complete."""
    held: int = 0
    """So many saves can begin before one has to wait for the storage."""


@dataclass
class Loop:
    """A GPT with AdamW and small batches: 870 MiB of state in a checkpoint, less if it is less wide."""

    width: int = 1024

    def __post_init__(self) -> None:
        self.model: Any = GPT(block=64, layers=6, heads=8, width=self.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._tokens = torch.randint(0, 256, (1, 64))
        self.steps(3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._tokens, self._tokens).backward()
        self.optimizer.step()

    def steps(self, count: int) -> float:
        """Return how long so many take, in seconds."""
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def size(self) -> int:
        """Of the state, in bytes."""
        return sum(tensor.nbytes for tensor in self.model.state_dict().values()) * 3


@contextmanager
def asynchronous(loop: Loop, **options: Any) -> Iterator[Saver]:
    checkpoint = TorchAsyncCheckpoint(**options)
    checkpoint.prepare(loop.state())

    def is_over() -> bool:
        checkpoint.finalize_async_save()
        return checkpoint._get_async_calls_queue().get_num_unfinalized_calls() == 0

    yield Saver(lambda path: checkpoint.async_save(loop.state(), path), is_over, held=2)
    checkpoint.close()


@contextmanager
def torch_save(loop: Loop, *, bytes_per_s: int | None = None) -> Iterator[Saver]:
    def begin(path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            torch.save(loop.state(), file if bytes_per_s is None else _Paced(file, Pace(bytes_per_s)))

    yield Saver(begin)


class _Paced(io.RawIOBase):
    """A file on slow storage."""

    def __init__(self, file: Any, pace: Pace) -> None:
        self._file, self._pace = file, pace

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pace(len(data))
        return int(self._file.write(data))


@contextmanager
def nobody() -> Iterator[Saver]:
    """No save at all: what the measurement itself makes of it."""
    yield Saver(lambda _path: None)


@contextmanager
def memcpy(loop: Loop, *, idle: bool = False) -> Iterator[Saver]:
    """The floor: a copy of so many bytes by a thread that no step waits for; nothing is saved.

    Args:
        idle: it runs only where nobody else wants to (SCHED_IDLE, sched(7)).
    """
    size = loop.size()
    source, target = (mmap.mmap(-1, size) for _ in range(2))
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target)]
    for address in addresses:
        ctypes.memset(address, 1, size)
    copies: list[threading.Thread] = []

    def copy() -> None:
        if idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        ctypes.memmove(addresses[1], addresses[0], size)

    def begin(_path: Path) -> None:
        copies.append(threading.Thread(target=copy))
        copies[-1].start()

    yield Saver(begin, lambda: not copies[-1].is_alive())
    for each in copies:
        each.join()


def added(loop: Loop, savers: Mapping[str, Saver], folder: Path, runs: int) -> dict[str, list[float]]:
    """Return what a save of each saver adds to the loop until it is complete, and "plain" steps, in seconds.

    All steps until then count, two at least. They are compared with steps right before and after, and savers
    take turns, since machines change.
    """
    found: dict[str, list[float]] = {"plain": [], **{who: [] for who in savers}}
    before = loop.steps(2) / 2
    for run in range(runs + 1):
        for who, saver in savers.items():
            began, steps = time.perf_counter(), 0
            saver.begin(folder / _FILE)
            while True:
                loop.step()
                steps += 1
                if saver.is_over() and steps >= 2:
                    break
            wall = time.perf_counter() - began
            after = loop.steps(2) / 2
            if run > 0:  # the first one of each is to warm up
                found[who].append(wall - steps * (before + after) / 2)
                found["plain"].append(after)
            before = after
    return found


def share_of_training(loop: Loop, saver: Saver, folder: Path, *, every: int, steps: int) -> float:
    """Return the part of the wall time that plain steps would have taken, with a save every so many.

    As many saves as can be held have begun before, so this is what it comes to in the long run.
    """

    def train(count: int) -> float:
        began = time.perf_counter()
        for step in range(count):
            if step % every == 0:
                saver.begin(folder / _FILE)
            loop.step()
            saver.is_over()
        return time.perf_counter() - began

    plain = loop.steps(steps)
    train(every * saver.held)
    wall = train(steps)
    while not saver.is_over():
        loop.step()
    plain += loop.steps(steps)
    return plain / 2 / wall
