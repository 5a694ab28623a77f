"""One of four gloo ranks, two to a pretended node, that save without end, one iteration after the other.

Command line: a directory. Says ``began N`` before, ``saved N`` after each save. Every tensor of iteration N
tells N, so what is loaded shows whether it is mixed. Goes on where the newest checkpoint ends, and says first
``loaded N``.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.replication.strategies import CliqueReplicationStrategy

TIMEOUT = timedelta(seconds=60)


def state_of(rank: int, iteration: int) -> BasicTensorAwareStateDict:
    value = float(1000 * iteration + rank)
    return BasicTensorAwareStateDict({"tensors": [torch.full((40_000,), value) for _ in range(8)]})


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(1)
    rank = dist.get_rank()
    cliques = CliqueReplicationStrategy.from_replication_params(2, 2, timeout=TIMEOUT)
    manager = LocalCheckpointManager(directory / f"node{rank // 2}", repl_strategy=cliques, timeout=TIMEOUT)
    iteration = manager.find_latest()
    if iteration != -1:
        loaded = manager.load()[0]
        expected = state_of(rank, iteration)
        assert all(torch.equal(a, b) for a, b in zip(loaded.tensors, expected.tensors, strict=True))
    print(f"loaded {iteration}", flush=True)
    for each in range(iteration + 1, 10_000):
        print(f"began {each}", flush=True)
        manager.save(state_of(rank, each), each)
        print(f"saved {each}", flush=True)


main()
