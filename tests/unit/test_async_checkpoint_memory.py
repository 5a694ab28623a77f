"""Memory that snapshots read: freed under the copy by its owner, or seen by a forked process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvrx_slurm.checkpointing.async_ckpt.snapshot import Snapshot
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

LARGE = 12 << 20
"""Elements; the allocator gives the memory back to the system at once."""


def resize_to_nothing(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def resize_to_nothing_and_back(tensor: torch.Tensor) -> None:
    """As FSDP does from one layer's use to the next."""
    size = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(size)
    tensor.fill_(-1)


def resize_typed(tensor: torch.Tensor) -> None:
    tensor._typed_storage()._resize_(0)


def move_to_shared_memory(tensor: torch.Tensor) -> None:
    tensor.share_memory_().fill_(-1)


@pytest.mark.parametrize(
    "free", [resize_to_nothing, resize_to_nothing_and_back, resize_typed, move_to_shared_memory]
)
def test_memory_that_is_freed_under_the_copy_is_copied_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: Callable[[torch.Tensor], None]
) -> None:
    # given the copier in the middle of a piece
    copying, go_on = threading.Event(), threading.Event()
    copy, guard = Snapshot._copy, Snapshot.guard

    def held_copy(snapshot: Snapshot, piece: Any) -> None:
        copying.set()
        go_on.wait(60)
        copy(snapshot, piece)

    def announced_guard(snapshot: Snapshot) -> None:
        go_on.set()
        guard(snapshot)

    monkeypatch.setattr(Snapshot, "_copy", held_copy)
    monkeypatch.setattr(Snapshot, "guard", announced_guard)
    tensor = torch.arange(LARGE, dtype=torch.float32)
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"large": tensor}, tmp_path / "a.pt")
    assert copying.wait(60)
    # when the memory is freed
    with torch.no_grad():
        free(tensor)
    assert go_on.is_set(), "nobody waited for the copy"
    # then what is saved is what was there at the call
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert torch.equal(torch.load(tmp_path / "a.pt")["large"], torch.arange(LARGE, dtype=torch.float32))


def test_other_storages_are_resized_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    copy = Snapshot._copy

    def held_copy(snapshot: Snapshot, piece: Any) -> None:
        go_on.wait(60)
        copy(snapshot, piece)

    monkeypatch.setattr(Snapshot, "_copy", held_copy)
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"large": torch.zeros(LARGE)}, tmp_path / "a.pt")
    torch.zeros(LARGE).untyped_storage().resize_(0)
    assert not go_on.is_set()
    go_on.set()
    checkpoint.close()


FORKS = """
import multiprocessing, os, sys, threading
import torch
from torch.utils.data import DataLoader, Dataset
from nvrx_slurm.checkpointing.async_ckpt import snapshot
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, abort_nvrx_checkpoint
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

folder = sys.argv[1]
copying, go_on, real = threading.Event(), threading.Event(), snapshot.Snapshot._copy

def held_copy(self, piece):
    copying.set()
    go_on.wait()
    real(self, piece)

class Squares(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.tensor(index * index)

def train(parameter):
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=1.0).step()  # its pre-hook copies what is pending

def child(kind, parameter, checkpoint):
    torch.set_num_threads(1)  # as DataLoader does: OpenMP can go no further after a fork
    if kind == "steps":
        with torch.no_grad():
            parameter.fill_(-5.0)
        train(parameter)
    elif kind == "saves":
        checkpoint.async_save({"mine": torch.full((3 << 20,), 8.0)}, f"{folder}/child.pt")
        checkpoint.close()
        assert torch.load(f"{folder}/child.pt")["mine"].eq(8).all()
    elif kind == "aborts":
        abort_nvrx_checkpoint()
    elif kind == "closes":
        checkpoint.close()

def main():
    parameter = torch.nn.Parameter(torch.full((4 << 20,), 7.0))
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"first": 1}, f"{folder}/first.pt")
    checkpoint.finalize_async_save(blocking=True)
    worker = checkpoint._queue._caller._current.pid
    snapshot.Snapshot._copy = held_copy
    checkpoint.async_save({"parameter": parameter}, f"{folder}/parent.pt")
    copying.wait()
    # whatever is forked now has a copy of everything in its midst
    for kind in ("steps", "saves", "aborts", "closes", "ends"):
        pid = os.fork()
        if pid == 0:
            snapshot.Snapshot._copy = real
            child(kind, parameter, checkpoint)
            sys.exit(0)  # frames end, destructors and atexit functions run
        assert os.waitpid(pid, 0)[1] == 0, kind
    seen = sorted(int(each) for batch in DataLoader(Squares(), batch_size=4, num_workers=2,
                  multiprocessing_context="fork") for each in batch)
    assert seen == [index * index for index in range(64)]
    go_on.set()
    checkpoint.finalize_async_save(blocking=True)
    assert torch.load(f"{folder}/parent.pt")["parameter"].eq(7).all()
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork",
                        persistent_workers=True)
    for save in range(4):  # and the same beside real training
        checkpoint.async_save({"parameter": parameter}, f"{folder}/{save}.pt")
        for batch in loader:
            pass
        train(parameter)
    checkpoint.finalize_async_save(blocking=True)
    for save in range(4):
        assert torch.load(f"{folder}/{save}.pt")["parameter"].eq(7.0 - save).all(), save
    assert checkpoint._queue._caller._current.pid == worker, "the worker has died"
    checkpoint.close()
    print("all is well")

try:
    main()
except SystemExit:
    raise
except BaseException:
    import traceback; traceback.print_exc()
    os._exit(1)
"""


def test_forked_processes_leave_worker_snapshot_and_sockets_to_their_parent(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, tmp_path], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.stdout == "all is well\n", done.stderr
    assert done.returncode == 0
