"""One of two ranks of a program that saves as Megatron-LM does; writes what it saw as JSON."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

import nvrx_slurm.checkpointing.async_ckpt.filesystem_async as fsa
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import (
    FileSystemWriterAsync,
    get_write_results_queue,
)
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.base_manager import CheckpointingException
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.replication.group_utils import GroupWrapper, parse_group_sequence
from nvrx_slurm.checkpointing.local.replication.strategies import CliqueReplicationStrategy


class OwnMetadata(Metadata):
    """With what the framework adds."""


class Planner(DefaultSavePlanner):
    """No coordinator for the plan of a rank."""

    can_run_decentralized_global_plan = True

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata = OwnMetadata(**vars(metadata))
        metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (1, 2)}}  # type: ignore[attr-defined]
        return plans, metadata

    def create_decentralized_global_plan(self, local_plan: Any) -> Any:
        return local_plan


class Strategy:
    """Saves a directory for each iteration, through one queue of the process, as long as there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue: Any = None
        self.results_queue: Any = None
        self.cache = CheckpointMetadataCache()
        self.cached: list[tuple[bool, bool]] = []

    def start(self) -> None:
        keywords = {}
        if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.__init__).parameters:
            keywords["cpu_shm_mode"] = True
        if "cpu_shm_mode" in inspect.signature(AsyncCallsQueue.warmup_persistent_caller).parameters:
            AsyncCallsQueue.warmup_persistent_caller(dist.get_rank(), **keywords)
        self.queue = AsyncCallsQueue(persistent=True, **keywords)
        assert hasattr(fsa, "_results_queue")
        if "mp_mode" in inspect.signature(get_write_results_queue).parameters:
            self.results_queue = get_write_results_queue(mp_mode="fork")

    def reset(self) -> None:
        self.queue.close(abort=True)
        self.results_queue._manager.shutdown()
        CachedMetadataFileSystemReader.clear_metadata_cache()
        self.queue = self.results_queue = None

    def request(self, state: dict[str, Any], iteration: int) -> AsyncRequest:
        writer = FileSystemWriterAsync(
            self.folder / f"iter_{iteration:07d}",
            separation_hint="optimizer",
            thread_count=2,
            use_cached_data_structure=True,
            use_cpu_shm_for_gpu_tensors=True,
        )
        planned = save_state_dict_async_plan(
            state, writer, None, 0, planner=Planner(), enable_cache=True, metadata_cache=self.cache
        )
        self.cached.append((self.cache.validated_cache_reuse, self.cache.validated_loaded_metadata_reuse))
        save, preload, arguments = writer.get_save_function_and_args()
        request = AsyncRequest(
            save,
            arguments,
            [partial(save_state_dict_async_finalize, *planned)],
            async_fn_kwargs={},
            preload_fn=preload,
        )
        request.add_finalize_fn(partial(self.track, iteration))
        return request

    def track(self, iteration: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / "latest").write_text(str(iteration))
        dist.barrier()


def a_global_checkpoint(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    strategy = Strategy(folder / "global")
    state: dict[str, Any] = {f"{kind}.{rank}": torch.zeros(70_000) for kind in ("model", "optimizer")}
    finalized, pending = [], []

    def at(iteration: int) -> dict[str, Any]:
        for tensor in state.values():
            tensor.fill_(iteration)
        return state

    strategy.start()
    strategy.queue.schedule_async_request(strategy.request(at(10), 10))
    strategy.queue.ensure_snapshotted()
    pending.append(strategy.queue.get_num_unfinalized_calls())
    finalized.append(strategy.queue.maybe_finalize_async_calls(blocking=True, no_dist=False))
    strategy.queue.schedule_async_request(strategy.request(at(15), 15))
    finalized.append(strategy.queue.maybe_finalize_async_calls(True, no_dist=False))
    strategy.queue.schedule_async_request(AsyncRequest(None, (), [partial(strategy.track, 20)]))
    strategy.reset()  # an error elsewhere: what was under way does not count
    pending.append(AsyncCallsQueue().get_num_unfinalized_calls())

    reader = CachedMetadataFileSystemReader(strategy.folder / "iter_0000015")
    dcp.load(at(0), storage_reader=reader)
    strategy.cache = CheckpointMetadataCache()
    strategy.cache.set_cached_global_metadata(reader.read_metadata())
    strategy.start()
    finalized.append(strategy.queue.maybe_finalize_async_calls(blocking=True, no_dist=False))
    strategy.queue.schedule_async_request(strategy.request(at(30), 30))
    strategy.queue.close()
    dcp.load(at(0), storage_reader=CachedMetadataFileSystemReader(strategy.folder / "iter_0000030"))
    dist.barrier()
    return {
        "finalized": finalized,
        "pending": pending,
        "tracker": (strategy.folder / "latest").read_text(),
        "committed": sorted(int(each.parent.name[5:]) for each in strategy.folder.glob("*/.metadata")),
        "loaded": float(torch.cat(list(state.values())).unique().item()),
        "cached": strategy.cached,
    }


class Tensors(TensorAwareStateDict):
    """As a framework adapts its state: common values, and tensors of its own."""

    def __init__(self, common: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        self.common = common
        self._tensors: list[torch.Tensor] | None = tensors
        self._meta = [(tensor.shape, tensor.dtype) for tensor in tensors]

    @property
    def is_hollow(self) -> bool:
        return self._tensors is None

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        assert self._tensors is not None
        return iter(self._tensors)

    def pop_tensors(self) -> list[torch.Tensor]:
        assert self._tensors is not None
        tensors, self._tensors = self._tensors, None
        return tensors

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        assert self._tensors is None
        self._tensors = list(tensor_data)

    def init_tensors(self) -> None:
        self.insert_tensors(torch.empty(shape, dtype=dtype) for shape, dtype in self._meta)

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=non_blocking, copy=True) for tensor in self.tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        pass


def local_state(rank: int, iteration: int) -> Tensors:
    return Tensors(
        {"iteration": iteration, "args": {"lr": 0.1}}, [torch.full((50 + rank,), float(iteration))]
    )


def a_local_checkpoint(folder: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    root = folder / f"local{rank}"
    cliques = parse_group_sequence(replication_jump=1, replication_factor=2, world_size=world)
    strategy = CliqueReplicationStrategy(GroupWrapper.from_list_of_groups(cliques), target_device="cpu")
    manager = LocalCheckpointManager(root, repl_strategy=strategy)
    queue = AsyncCallsQueue()
    before = manager.find_latest()
    manager.save(local_state(rank, 1), 1, is_async=False)
    request = manager.save(local_state(rank, 2), 2, is_async=True)
    assert request is not None
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True, no_dist=False)

    manager.latest_iteration = -1  # look again
    found = manager.find_latest()
    state, ckpt_id = manager.load()
    assert isinstance(state, Tensors)
    path = Path(manager._local_ckpt_path_from_id(manager._ckpt_id(2)))
    assert path.name == manager._filename_from_template("0000002", rank)
    content = path.read_bytes()
    manager.latest_iteration = -1
    manager.save(local_state(rank, 2), 2)
    same = path.read_bytes() == content

    failing = LocalCheckpointManager(folder / f"failing{rank}")
    if rank == 1:
        failing._save = lambda *_: None  # type: ignore[method-assign]
    try:
        failing.save(local_state(rank, 3), 3)
        failure = None
    except CheckpointingException as error:
        failure = type(error).__name__
    queue.close()
    dist.barrier()
    return {
        "before": before,
        "found": found,
        "id": ckpt_id,
        "equal": state.common["iteration"] == 2
        and torch.equal(*state.tensors, torch.full((50 + rank,), 2.0)),
        "names": sorted(each.name for each in Path(manager.local_ckpt_dir).iterdir()),
        "parsed": list(manager._filename_to_id(path.name)[:2]),
        "same bytes": same,
        "after a failure": failure,
        "left": [each.name for each in Path(failing.local_ckpt_dir).iterdir()],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    saw = {"global": a_global_checkpoint(folder), "local": a_local_checkpoint(folder)}
    (folder / f"saw{dist.get_rank()}.json").write_text(json.dumps(saw))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
