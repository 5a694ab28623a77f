"""One of several gloo ranks that save an FSDP2 state; rank 0 prints ``{who: [[foreground, total], …]}``."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, SnapshotMode
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

Wait = Callable[[], object]


def ours(mode: SnapshotMode) -> Callable[[dict[str, Any], Path], Wait]:
    queue, cache = AsyncCallsQueue(snapshot_mode=mode), CheckpointMetadataCache()

    def save(state: dict[str, Any], path: Path) -> Wait:
        writer = FileSystemWriterAsync(path)
        plan = save_state_dict_async_plan(state, writer, enable_cache=True, metadata_cache=cache)
        function, preload, arguments = writer.get_save_function_and_args()
        finish = [partial(save_state_dict_async_finalize, *plan)]
        queue.schedule_async_request(AsyncRequest(function, arguments, finish, preload_fn=preload))
        return lambda: queue.maybe_finalize_async_calls(blocking=True)

    return save


def dcp_save(state: dict[str, Any], path: Path) -> Wait:
    dcp.save(state, checkpoint_id=path)
    return lambda: None


def dcp_async(state: dict[str, Any], path: Path) -> Wait:
    return dcp.async_save(
        state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.THREAD
    ).result


def trained(width: int) -> dict[str, Any]:
    """Return the state of a sharded model and its AdamW: 3 x 8 layers x width x width floats in all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).square().sum().backward()
    optimizer.step()
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def main() -> None:
    rank, world, runs, width = map(int, sys.argv[1:5])
    folder = Path(sys.argv[5])
    torch.set_num_threads(1)
    # torch's async_save wants a backend for the processor, by name
    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    state = trained(width)
    contenders: dict[str, Callable[[dict[str, Any], Path], Wait]] = {
        "ours": ours(SnapshotMode.OVERLAPPED),
        "ours, strict": ours(SnapshotMode.STRICT),
        "dcp.save": dcp_save,
        "dcp.async, thread": dcp_async,
    }
    times: dict[str, list[tuple[float, float]]] = {who: [] for who in contenders}
    for _ in range(runs + 1):
        for who, save in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            wait = save(state, folder / "checkpoint")
            returned = time.perf_counter()
            wait()
            dist.barrier()
            times[who].append((returned - began, time.perf_counter() - began))
            if rank == 0:
                shutil.rmtree(folder / "checkpoint")
            dist.barrier()
    if rank == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
