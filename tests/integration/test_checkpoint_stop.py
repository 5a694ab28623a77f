"""A rank that dies right after a save: what was copied is written before the next cycle, within a bound."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
from harness import RANK, LocalJob, is_alive, until

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]

# The worker is stopped while the second save is handed over, so it can't have written when its rank dies.
SCRIPT = (
    RANK
    + """
import logging
import torch
from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
import warnings
from functools import partial
import torch.distributed.checkpoint as dcp
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncRequest, WhenFull
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize, save_state_dict_async_plan)
warnings.simplefilter("ignore")
def save_directory(queue, step):
    writer = FileSystemWriterAsync(f"{folder}/directory")
    plan = save_state_dict_async_plan({"step": torch.full((1 << 19,), step)}, writer)
    save, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))
path = f"{folder}/rank_{rank}.pt"
local = LocalCheckpointManager(f"{folder}/parts")
if cycle == 0 and rank == 0:
    local.save(BasicTensorAwareStateDict({"step": 1}), 1)
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"step": 1}, path, step=1)
    save_directory(checkpoint._get_async_calls_queue(), 1)
    checkpoint.finalize_async_save(blocking=True)
    worker = checkpoint._queue._caller._current.pid
    os.kill(worker, signal.SIGSTOP)
    checkpoint.async_save({"step": 2, "tensor": torch.arange(1 << 20)}, path)
    request = local.save(BasicTensorAwareStateDict({"tensor": torch.ones(1 << 20)}), 2, is_async=True)
    checkpoint._get_async_calls_queue().schedule_async_request(request)
    save_directory(checkpoint._get_async_calls_queue(), 2)
    request.async_fn._files.result()
    checkpoint.ensure_snapshotted()
    write("worker", str(worker))
    os.kill(os.getpid(), signal.SIGKILL)
if cycle == 0:
    signal.pause()
if rank == 0:
    state = storage.load(path)
    assert state["step"] == 1 or torch.equal(state["tensor"], torch.arange(1 << 20))
    print("worker is there" if os.path.exists(f"/proc/{wait_for('worker')}") else "worker is gone")
    loaded = {"step": torch.zeros(1 << 19, dtype=torch.int64)}
    dcp.load(loaded, checkpoint_id=f"{folder}/directory", no_dist=True)
    print(f"step {state['step']}, local {local.find_latest()}, directory {loaded['step'].unique().item()}")
    assert local.load()[0].state_dict.get("tensor", torch.ones(1)).all()
    logging.disable()
    full = TorchAsyncCheckpoint(max_inflight_bytes=20 << 20, when_full=WhenFull.SKIP)
    os.kill(full._queue._caller._current.pid, signal.SIGSTOP)  # a storage that can't keep up
    for _ in range(2):
        full.async_save({"tensor": torch.ones(1 << 20)}, f"{folder}/full.pt")
    full.close(abort=True)
"""
)


def _worker(run: LocalJob) -> psutil.Process:
    return psutil.Process(int(run.wait_for_file("worker")))


def test_a_copied_checkpoint_is_written_although_its_rank_has_died(job: Jobs) -> None:
    run = job(SCRIPT, "--checkpoint-write-timeout", "60s", real_torch=True).start()
    other = run.rank(1)
    worker = _worker(run)
    run.wait_for(journal.FaultDetected)
    until("rank 1 is gone", lambda: not is_alive(other))
    assert run.events(journal.WorkersStopped) == []
    assert is_alive(worker)
    os.kill(worker.pid, signal.SIGCONT)
    assert run.wait() == 0, run.stderr
    assert "committed now" in run.log("rank_0")
    assert run.log("rank_0", cycle=1) == "worker is gone\nstep 2, local 2, directory 2\n"
    # Nobody has finalized the second save, so the journal does not know of it; but it was loaded.
    saved = {(event.step, event.layer) for event in run.events(journal.CheckpointSaved)}
    assert saved == {(1, "local"), (1, "shared")}
    loaded = run.events(journal.CheckpointLoaded)
    assert loaded == [journal.CheckpointLoaded(step=2, layer="local", rank=0)]
    why = "skipped: no room for another snapshot beside 1 that are being written"
    assert run.events(journal.CheckpointHeldUp) == [journal.CheckpointHeldUp(save=1, rank=0, why=why)]
    assert why in run.stderr
    assert run.nothing_is_left()


def test_a_writer_that_does_not_end_is_killed_when_its_time_is_over(job: Jobs) -> None:
    run = job(SCRIPT, "--checkpoint-write-timeout", "300ms", real_torch=True).start()
    assert run.wait() == 0, run.stderr
    assert run.log("rank_0", cycle=1) == "worker is gone\nstep 1, local 1, directory 1\n"
    assert "killed what still wrote checkpoints after 0.3 s: 1 process(es)" in run.stderr
    assert run.nothing_is_left()
