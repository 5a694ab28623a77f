"""What trainers that were killed in the middle of something leave, and that the next start removes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint_leftovers import schedule
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvrx_slurm.checkpointing.storage import durable

phase, place = sys.argv[2], Path(sys.argv[3])
queue = AsyncCallsQueue(max_bytes_per_s=2_000_000 if phase == "write" else None)
worker = queue._caller._current.pid
print(worker, flush=True)
schedule(queue, place, 1.0)
queue.maybe_finalize_async_calls(blocking=True)
rename = os.rename
def killing(source, target):
    if os.path.basename(target) == ".metadata":
        os.kill(worker, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)
durable.os.rename = killing
schedule(queue, place, 2.0)
if phase == "write":
    queue.ensure_snapshotted()
    while not any(".nvrx-tmp-" in name for name in os.listdir(place)):
        time.sleep(0.001)
    os.kill(worker, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
queue.maybe_finalize_async_calls(blocking=True)
"""
SIZE = 1_000_000


def schedule(queue: AsyncCallsQueue, place: Path, value: float) -> None:
    writer = FileSystemWriterAsync(place)
    plan = save_state_dict_async_plan({"a": torch.full((SIZE,), value)}, writer)
    save, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))


def loaded(place: Path) -> float:
    state = {"a": torch.zeros(SIZE)}
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(place), no_dist=True)
    return float(state["a"].unique().item())


@pytest.mark.parametrize(("phase", "step"), [("write", 1.0), ("commit", 2.0)])
def test_what_trainer_and_worker_leave_when_both_are_killed_the_next_start_removes(
    tmp_path: Path, phase: str, step: float
) -> None:
    before = {name for name in os.listdir("/dev/shm") if "nvrx-checkpoint" in name}
    command = [sys.executable, "-c", PROGRAM, Path(__file__).parent, phase, tmp_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    psutil.wait_procs(
        [psutil.Process(pid) for pid in map(int, done.stdout.split()) if psutil.pid_exists(pid)]
    )
    assert any(".nvrx-tmp-" in path.name for path in tmp_path.iterdir())
    # its shared memory has no name, and went with the last of the two
    assert {name for name in os.listdir("/dev/shm") if "nvrx-checkpoint" in name} <= before
    assert loaded(tmp_path) == step
    queue = AsyncCallsQueue()
    schedule(queue, tmp_path, 3.0)
    queue.close()
    assert loaded(tmp_path) == 3
    kinds = sorted(path.suffix or path.name for path in tmp_path.iterdir())
    assert kinds == [".distcp", ".json", ".metadata"]
