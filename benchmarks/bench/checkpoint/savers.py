"""Who saves, and the floors below all of them; each save returns its foreground and its total time."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from nvrx_slurm.checkpointing.async_ckpt.core import SnapshotMode, ensure_snapshotted
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvrx_slurm.checkpointing.storage.durable import replacing

TENSOR_BYTES = 16 << 20
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Times:
    """Of one save, in seconds."""

    foreground: float
    """Until the call has returned and what is saved may be changed."""
    total: float
    """Until the checkpoint is complete; durable too, except where the title says otherwise."""


Save = Callable[[State, Path], Times]


def make_state(mebibytes: int) -> State:
    generator = torch.Generator().manual_seed(1)
    count = max(1, (mebibytes << 20) // TENSOR_BYTES)
    return {f"w{i}": torch.rand(TENSOR_BYTES // 4, generator=generator) for i in range(count)}


@contextmanager
def ours(mode: SnapshotMode, *, step_at_once: bool = False) -> Iterator[Save]:
    """``step_at_once``: an optimizer wants to step then, which is the longest that its guard can take."""
    checkpoint = TorchAsyncCheckpoint(snapshot_mode=mode)

    def save(state: State, path: Path) -> Times:
        began = time.perf_counter()
        checkpoint.async_save(state, path / "ours.pt")
        if step_at_once:
            ensure_snapshotted()
        returned = time.perf_counter()
        checkpoint.finalize_async_save(blocking=True)
        return Times(returned - began, time.perf_counter() - began)

    yield save
    checkpoint.close()


@contextmanager
def memcpy_floor() -> Iterator[Save]:
    """Copy into shared memory that is there already, with torch's threads."""
    buffers: list[torch.Tensor] = []

    def save(state: State, path: Path) -> Times:
        if not buffers:
            size = sum(tensor.numel() for tensor in state.values())
            buffers.append(torch.frombuffer(mmap.mmap(-1, size * 4), dtype=torch.float32).zero_())
        began, position = time.perf_counter(), 0
        for tensor in state.values():
            buffers[0][position : position + tensor.numel()].copy_(tensor)
            position += tensor.numel()
        return Times(*[time.perf_counter() - began] * 2)

    yield save


@contextmanager
def write_floor() -> Iterator[Save]:
    """O_DIRECT where the file system has it, from aligned memory, and fsync."""
    chunk = memoryview(mmap.mmap(-1, TENSOR_BYTES))
    chunk[:] = os.urandom(TENSOR_BYTES)

    def save(state: State, path: Path) -> Times:
        began = time.perf_counter()
        with replacing(path / "floor") as pending:
            pending.write_aligned((chunk for _ in state), len(state) * TENSOR_BYTES)
        return Times(*[time.perf_counter() - began] * 2)

    yield save


@contextmanager
def torch_save() -> Iterator[Save]:
    def save(state: State, path: Path) -> Times:
        began = time.perf_counter()
        torch.save(state, path / "torch.pt")
        return Times(*[time.perf_counter() - began] * 2)

    yield save


@contextmanager
def dcp_save() -> Iterator[Save]:
    def save(state: State, path: Path) -> Times:
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=path / "dcp", no_dist=True)
        return Times(*[time.perf_counter() - began] * 2)

    yield save


@contextmanager
def dcp_async(kind: str) -> Iterator[Save]:
    """torch's own, with its stager used again; needs a process group of one rank."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    process = kind == "process"
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=process,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    how: dict[str, Any] = {
        "async_checkpointer_type": AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD,
        "async_stager": stager,
    }

    def save(state: State, path: Path) -> Times:
        began = time.perf_counter()
        future = dcp.async_save(state, checkpoint_id=path / f"dcp-{kind}", **how)
        returned = time.perf_counter()
        future.result()
        return Times(returned - began, time.perf_counter() - began)

    yield save
    stager.close()


def timed(save: Save, state: State, folder: Path, runs: int) -> tuple[Times, list[Times]]:
    """Return the first save, which pays for what is made once, and the following ones."""
    every = []
    for _ in range(runs + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
        every.append(save(state, folder))
    shutil.rmtree(folder)
    return every[0], every[1:]
