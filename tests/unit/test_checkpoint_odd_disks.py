"""Real file systems that fill up, turn read-only or lose their directory while a checkpoint is saved."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, shutil, subprocess, sys
from functools import partial
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize, save_state_dict_async_plan)

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
place = disk / "directory"
queue = AsyncCallsQueue()

def schedule(value):
    writer = FileSystemWriterAsync(place)
    plan = save_state_dict_async_plan({"a": torch.full((9,), value)}, writer)
    save, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))

def refused(*words):
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except (AsyncSaveError, CheckpointException) as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError("nobody noticed")

def loaded():
    state = {"a": torch.zeros(9)}
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(place), no_dist=True)
    return state["a"].unique().item()

def save(value):
    schedule(value)
    queue.maybe_finalize_async_calls(blocking=True)
    assert loaded() == value

save(1.0)
# the disk is full when the manifest comes to be written
schedule(2.0)
assert queue._pending[0].ticket.wait(60)
with open(disk / "others", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
refused("No space left on device")
assert loaded() == 1
# and for data, too
schedule(3.0)
refused("No space left on device")
assert loaded() == 1
(disk / "others").unlink()
save(4.0)
assert len(list(place.iterdir())) == 3, list(place.iterdir())
# read-only under a save that has been planned, and for good
schedule(5.0)
assert queue._pending[0].ticket.wait(60)
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
refused("Read-only file system")
assert loaded() == 4
subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
save(6.0)
assert len(list(place.iterdir())) == 3, list(place.iterdir())
# its directory is gone when it is to be committed
schedule(7.0)
assert queue._pending[0].ticket.wait(60)
shutil.rmtree(place)
refused("No such file or directory")
save(8.0)
# and when it is to be written
worker = queue._caller._current.pid
os.kill(worker, 19)
schedule(9.0)
shutil.rmtree(place)
os.kill(worker, 18)
refused("No such file or directory")
save(10.0)
queue.close()
print("all is well")
"""


def test_a_full_a_read_only_and_a_missing_directory_are_errors_and_the_last_checkpoint_stays(
    tmp_path: Path,
) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no mount namespaces for users here")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", PROGRAM, disk],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "all is well\n", done.stderr
