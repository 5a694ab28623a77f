"""Run by the peer's own Python: times TorchAsyncCheckpoint of nvidia-resiliency-ext, prints JSON.

It does not run without CUDA. Two calls are replaced by ones that do nothing, as its own code would see them
on a machine whose GPU has nothing to do; its files are untouched.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_arguments: None
torch.cuda.current_device = lambda: torch.device("cpu")


def main() -> None:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    folder, persistent, tensors, tensor_bytes, runs = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # it asks for its rank
    generator = torch.Generator().manual_seed(1)
    state = {f"w{i}": torch.rand(tensor_bytes // 4, generator=generator) for i in range(tensors)}
    checkpoint = TorchAsyncCheckpoint(persistent_queue=bool(persistent))
    times = []
    for _ in range(runs + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
        began = time.perf_counter()
        checkpoint.async_save(state, folder / "peer.pt")
        returned = time.perf_counter()
        checkpoint.finalize_async_save(blocking=True, no_dist=True)
        times.append((returned - began, time.perf_counter() - began))
    shutil.rmtree(folder)
    print(json.dumps(times), flush=True)
    for child in multiprocessing.active_children():
        child.kill()  # its worker would outlive us
    os._exit(0)


if __name__ == "__main__":
    main()
