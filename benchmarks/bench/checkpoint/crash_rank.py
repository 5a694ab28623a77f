"""One of four gloo ranks, two to a pretended node, that save locally, each part on both nodes.

What it does goes through a pipe, as a word and a number: ``loaded`` or ``mixed`` at first, then ``worker`` (a
process id), ``began``, ``committed`` and ``failed`` (iterations).
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, ExchangeError
from nvrx_slurm.checkpointing.local.replication.strategies import CliqueReplicationStrategy

WORLD, NODES = 4, 2
TENSORS, SIZE = 8, 100_000
_TIMEOUT = timedelta(seconds=60)
_STEP_S = 0.005


def node_of(rank: int) -> int:
    return rank // (WORLD // NODES)


def directory_of(folder: Path, node: int) -> Path:
    return folder / f"node{node}"


def state_of(rank: int, iteration: int) -> dict[str, torch.Tensor]:
    """Each tensor tells iteration and rank, so what is loaded shows whether it is mixed."""
    base = float((iteration * WORLD + rank) * TENSORS)
    return {str(i): torch.full((SIZE + i,), base + i) for i in range(TENSORS)}


def serve(rank: int, folder: Path, port: int, told: Connection) -> None:
    """Save until somebody ends this process, or another rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=_TIMEOUT)
    cliques = CliqueReplicationStrategy.from_replication_params(WORLD // NODES, NODES, timeout=_TIMEOUT)
    manager = LocalCheckpointManager(
        directory_of(folder, node_of(rank)), repl_strategy=cliques, keep=2, timeout=_TIMEOUT
    )
    iteration = manager.find_latest()
    whole = True
    if iteration != -1:
        loaded, expected = manager.load()[0].state_dict, state_of(rank, iteration)
        whole = all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    told.send(("loaded" if whole else "mixed", iteration))
    queue = AsyncCallsQueue()
    while True:
        iteration += 1
        told.send(("began", iteration))
        request = manager.save(BasicTensorAwareStateDict(state_of(rank, iteration)), iteration, is_async=True)
        assert request is not None
        queue.schedule_async_request(request)
        told.send(("worker", queue._caller._current.pid))  # type: ignore[union-attr]
        while queue.get_num_unfinalized_calls():
            time.sleep(_STEP_S)  # stands for a training step
            try:
                if queue.maybe_finalize_async_calls():
                    told.send(("committed", iteration))
            except ExchangeError:
                os._exit(1)
            except CheckpointingException:
                told.send(("failed", iteration))
