"""One of two gloo ranks that save twice into three directories; killed before the second save counts."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, ensure_snapshotted
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

SIZE = 300_000


def state_of(rank: int, step: int) -> dict[str, torch.Tensor | int]:
    return {f"own{rank}": torch.full((SIZE,), float(10 * step + rank)), "both": torch.full((9,), step)}


def schedule(queue: AsyncCallsQueue, folder: Path, rank: int, step: int) -> None:
    writer = FileSystemWriterAsync(folder, thread_count=2)
    plan = save_state_dict_async_plan(state_of(rank, step), writer)
    save, preload, arguments = writer.get_save_function_and_args()
    finish = partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    queues = {name: AsyncCallsQueue() for name in ("stopped", "written", "torn")}
    for name, queue in queues.items():
        schedule(queue, folder / name, rank, step=1)
        queue.maybe_finalize_async_calls(blocking=True)
    workers = {name: queue._caller._current.pid for name, queue in queues.items()}  # type: ignore[union-attr]
    os.kill(workers["stopped"], signal.SIGSTOP)
    if rank == 1:
        os.kill(workers["torn"], signal.SIGSTOP)
    for name, queue in queues.items():
        schedule(queue, folder / name, rank, step=2)
    ensure_snapshotted()
    queues["written"]._pending[0].ticket.wait()
    print(json.dumps(workers), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
