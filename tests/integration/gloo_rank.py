"""One rank of a gloo job that stands still: rank 2 never calls the fifth all_reduce.

Says ``calls N`` before each call. Each line of standard input is a path: it writes its Flight Recorder dump
there, as JSON or, where the path ends in ``.pickle``, as pickle, and says ``dumped``.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_STOPS = {2: 5}


def train(rank: int, world: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for call in range(1, 100):
        print(f"calls {call}", flush=True)
        if _STOPS.get(rank) == call:
            threading.Event().wait()
        dist.all_reduce(torch.ones(1))


def dump(path: str) -> None:
    data = c10d._dump_fr_trace() if path.endswith(".pickle") else c10d._dump_fr_trace_json()
    with open(path + ".new", "wb") as file:
        file.write(data)
    os.replace(path + ".new", path)
    print("dumped", flush=True)


def main() -> None:
    rank, world, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=train, args=(rank, world, meeting), daemon=True).start()
    for line in sys.stdin:
        dump(line.strip())
    os._exit(0)


main()
