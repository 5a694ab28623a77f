"""One rank of a gloo group whose collective never ends until it is aborted; run as a program.

python inprocess_abort_rank.py FOLDER RANK WORLD_SIZE

Rank 0 does not take part in the collective. Prints one JSON object.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from nvrx_slurm.inprocess import State
from nvrx_slurm.inprocess.abort import AbortTorchDistributed

BOUND = timedelta(seconds=60)


def main(folder: str, rank: int, world_size: int) -> dict[str, Any]:
    store = dist.FileStore(f"{folder}/store", world_size)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reader, writer = socket.socketpair()
    poller = select.epoll()
    poller.register(reader, select.EPOLLIN)
    meet(store, "first", rank, world_size)
    pair = dist.new_group([0, 1])
    dist.barrier()
    dist.barrier(pair) if rank < 2 else None
    found: dict[str, Any] = {}
    before = enqueued()
    interrupt = threading.Thread(target=abort, args=(store, rank, world_size, folder, found, before))
    interrupt.start()
    if rank > 0:
        try:
            dist.all_reduce(torch.ones(1), group=pair if rank == 1 else None)
        except RuntimeError as error:
            found["error"] = type(error).__name__
        found["unblocked_at"] = time.monotonic()
    interrupt.join()
    writer.send(b"x")
    found["user_socket"] = reader.recv(1).decode() if poller.poll(BOUND.total_seconds()) else "shut"
    served.set("still", "there")
    found["user_store"] = served.get("still").decode()
    found["initialized"] = dist.is_initialized()
    meet(store, "second", rank, world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    found["sum"] = total.item()
    dist.destroy_process_group()
    return found


def meet(store: dist.Store, name: str, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size, timeout=BOUND
    )


def enqueued() -> int:
    """How many collectives this rank has begun."""
    return len(json.loads(c10d._dump_fr_trace_json()).get("entries", []))


def abort(
    store: dist.Store, rank: int, world_size: int, folder: str, found: dict[str, Any], before: int
) -> None:
    while rank > 0 and enqueued() == before:
        time.sleep(0.01)
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        time.sleep(0.01)
    found["abort_at"] = time.monotonic()
    AbortTorchDistributed(f"{folder}/traces")(State(rank, world_size, iteration=4).freeze())
    found["aborted_at"] = time.monotonic()


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
    # The wrapper does not wait for a trace that is still being written; its file is looked at here.
    for thread in threading.enumerate():
        if thread.name == "nvrx-flight-recorder":
            thread.join()
