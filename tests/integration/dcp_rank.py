"""One of two gloo ranks that save with torch.distributed.checkpoint; writes what it saw as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest, AsyncSaveError, WhenFull
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

PATIENCE_S = 60.0


def write(folder: Path, text: str) -> None:
    (folder / text).write_text(text)


def write_when(go: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    go.with_suffix(".seen").touch()


def fail(message: str) -> None:
    raise ArithmeticError(message)


class OwnMetadata(Metadata):
    """A planner's own, as Megatron-LM has it."""


class OwnPlanner(DefaultSavePlanner):
    """Needs no coordinator for the plan of a rank: no two ranks have the same tensor."""

    can_run_decentralized_global_plan = True

    def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, OwnMetadata(**vars(metadata))

    def create_decentralized_global_plan(self, local_plan: Any) -> Any:
        return local_plan


class CoordinatorsPlans:
    """Counts how often plans come from a coordinator: nothing else is scattered."""

    count = 0

    def __enter__(self) -> CoordinatorsPlans:
        self._real = dist.scatter_object_list

        def scatter(*arguments: Any, **keywords: Any) -> None:
            self.count += 1
            self._real(*arguments, **keywords)

        dist.scatter_object_list = scatter
        return self

    def __exit__(self, *_exception: object) -> None:
        dist.scatter_object_list = self._real


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            yield
    else:
        model.unshard()
        yield
        model.reshard()


class Scenes:
    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.queue = AsyncCallsQueue()
        self.mesh = init_device_mesh("cpu", (2,))

    def schedule(self, state: dict[str, Any], path: Path, **how: Any) -> FileSystemWriterAsync:
        cache, planner = how.pop("cache", None), how.pop("planner", None)
        writer = FileSystemWriterAsync(path, **how)
        plan = save_state_dict_async_plan(
            state, writer, planner=planner, enable_cache=cache is not None, metadata_cache=cache
        )
        save, preload, arguments = writer.get_save_function_and_args()
        finish = partial(save_state_dict_async_finalize, *plan)
        self.queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))
        return writer

    def save(self, state: dict[str, Any], path: Path, **how: Any) -> None:
        self.schedule(state, path, **how)
        self.queue.maybe_finalize_async_calls(blocking=True)

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(700, 900), nn.ReLU(), nn.Linear(900, 3))
        for layer in (*model, model):
            fully_shard(layer, mesh=self.mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.step(model, optimizer)
        return model, optimizer

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.randn(4, 700)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def sharded_model_and_optimizer(self) -> dict[str, Any]:
        """FSDP2: saved while training goes on, read by plain torch."""
        model, optimizer = self.trained()
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        before = clone(state)
        self.schedule(state, self.folder / "fsdp2")
        for _ in range(3):
            self.step(model, optimizer)
        self.queue.maybe_finalize_async_calls(blocking=True)
        changed = not equal(before, state)
        blank = zeroed(before)
        dcp.load(blank, checkpoint_id=self.folder / "fsdp2")
        verified = zeroed(before)
        dcp.load(verified, storage_reader=CachedMetadataFileSystemReader(self.folder / "fsdp2"))
        full = {name: tensor.full_tensor() for name, tensor in before["model"].items()}
        alone = {"model": {name: torch.zeros_like(tensor) for name, tensor in full.items()}}
        dcp.load(alone, checkpoint_id=self.folder / "fsdp2", no_dist=True)
        return {
            "training went on": changed,
            "plain load": equal(before, blank),
            "verified load": equal(before, verified),
            "one process loads the whole": equal(full, alone["model"]),
        }

    def fsdp1(self) -> dict[str, Any]:
        model = FullyShardedDataParallel(nn.Linear(64, 65), device_id=torch.device("cpu"))
        kind = StateDictType.SHARDED_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict()
            before = [shard.tensor.clone() for each in state.values() for shard in each.local_shards()]
            self.save(state, self.folder / "fsdp1")
            for each in state.values():
                for shard in each.local_shards():
                    shard.tensor.zero_()
            dcp.load(state, checkpoint_id=self.folder / "fsdp1")
        after = [shard.tensor for each in state.values() for shard in each.local_shards()]
        return {"loaded": all(map(torch.equal, before, after)) and any(t.any() for t in after)}

    def whole_parameters_are_freed_at_once(self) -> dict[str, Any]:
        """Both FSDPs resize the storages of gathered parameters to nothing while they are being copied."""
        first = FullyShardedDataParallel(nn.Linear(900, 1100), device_id=torch.device("cpu"))
        second = nn.Linear(900, 1100)
        fully_shard(second, mesh=self.mesh)
        checkpoint, seen = TorchAsyncCheckpoint(), {}
        for name, model in (("fsdp1", first), ("fsdp2", second)):
            path = self.folder / f"freed_{name}_{self.rank}.pt"
            with gathered(model):
                state = {key: each.detach() for key, each in model.named_parameters()}
                before = {key: tensor.clone() for key, tensor in state.items()}
                checkpoint.async_save(state, path)
            freed = any(tensor.untyped_storage().nbytes() == 0 for tensor in state.values())
            checkpoint.finalize_async_save(blocking=True)
            loaded = torch.load(path)
            seen[name] = freed and all(torch.equal(loaded[key], each) for key, each in before.items())
        checkpoint.close()
        return seen

    def fsdp1_local(self) -> dict[str, Any]:
        """LOCAL_STATE_DICT: each rank's part of the flat parameter."""
        model = FullyShardedDataParallel(nn.Linear(64, 65), device_id=torch.device("cpu"))
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            state = model.state_dict()
            before = [
                shard.tensor.detach().clone() for each in state.values() for shard in each.local_shards()
            ]
            self.save(state, self.folder / "fsdp1_local")
            with torch.no_grad():
                for each in state.values():
                    for shard in each.local_shards():
                        shard.tensor.zero_()
            dcp.load(state, checkpoint_id=self.folder / "fsdp1_local")
            model.load_state_dict(state)
        after = [shard.tensor for each in state.values() for shard in each.local_shards()]
        return {"loaded": all(map(torch.equal, before, after)) and any(t.any() for t in after)}

    def several_files(self) -> dict[str, Any]:
        state = {f"{kind}.{i}": torch.full((50 + i,), float(i)) for kind in "ab" for i in range(9)}
        state |= {"view": torch.arange(100.0)[10:20], "transposed": torch.arange(6.0).view(2, 3).t(), "n": 5}
        path = self.folder / "files"
        self.save(state, path, thread_count=4, separation_hint="b")
        loaded = zeroed(state)
        dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(path))
        dist.barrier()
        return {"equal": equal(state, loaded), "files": sorted(each.name for each in path.iterdir())}

    def ranks_finish_at_different_calls(self) -> dict[str, Any]:
        go = self.folder / f"go{self.rank}"
        self.queue.schedule_async_request(AsyncRequest(write_when, (go,), []))
        if self.rank == 0:
            go.touch()
            self.queue._pending[0].ticket.wait(PATIENCE_S)
        early = self.queue.maybe_finalize_async_calls()
        go.touch()
        return {"early": early, "late": len(self.queue.maybe_finalize_async_calls(blocking=True))}

    def ranks_finalize_different_saves(self) -> dict[str, Any]:
        queue = AsyncCallsQueue()
        if self.rank == 0:  # a save that the other rank does not know of
            queue.schedule_async_request(AsyncRequest(None, (), []))
            queue.maybe_finalize_async_calls(no_dist=True)
        finalized: list[bool] = []
        queue.schedule_async_request(AsyncRequest(None, (), [lambda: finalized.append(True)]))
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except AsyncSaveError as error:
            return {"error": str(error), "finalized": finalized}
        finally:
            queue.close(abort=True)
        return {"error": None, "finalized": finalized}

    def one_rank_has_no_room(self) -> dict[str, Any]:
        """Rank 1's storage can't keep up, rank 0's does; all must agree on which save there is not."""
        queue = AsyncCallsQueue(max_inflight_bytes=20 << 20, when_full=WhenFull.SKIP)
        go = self.folder / "room"
        finalized: list[int] = []

        def schedule(number: int) -> None:
            path = self.folder / f"room{number}"
            writer = FileSystemWriterAsync(path)
            plan = save_state_dict_async_plan({f"own{self.rank}": torch.full((9,), float(number))}, writer)
            save, preload, arguments = writer.get_save_function_and_args()
            finish = [partial(save_state_dict_async_finalize, *plan), partial(finalized.append, number)]
            queue.schedule_async_request(AsyncRequest(save, arguments, finish, preload_fn=preload))

        slow = AsyncRequest(write_when, (go,), []) if self.rank else AsyncRequest(None, (), [])
        queue.schedule_async_request(slow)
        schedule(1)  # no room on rank 1, where one is still written
        has_written = None
        if self.rank == 0:
            has_written = queue._pending[-1].ticket.wait(PATIENCE_S)
        dist.barrier()
        go.touch()
        indices = queue.maybe_finalize_async_calls(blocking=True)
        schedule(2)
        indices += queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        dist.barrier()
        metadata = [(self.folder / f"room{number}/.metadata").exists() for number in (1, 2)]
        return {"indices": indices, "finalized": finalized, "committed": metadata, "written": has_written}

    def one_rank_fails(self) -> dict[str, Any]:
        return self.refused(AsyncRequest(fail if self.rank else str, ("broken",), []))

    def one_rank_cannot_pickle(self) -> dict[str, Any]:
        return self.refused(AsyncRequest((lambda _text: None) if self.rank else str, ("",), []))

    def refused(self, request: AsyncRequest) -> dict[str, Any]:
        finalized: list[bool] = []
        request.add_finalize_fn(lambda: finalized.append(True))
        self.queue.schedule_async_request(request)
        try:
            self.queue.maybe_finalize_async_calls(blocking=True)
        except AsyncSaveError as error:
            self.save({"a": torch.ones(3)}, self.folder / "again")
            return {"error": str(error).splitlines()[0], "finalized": finalized}
        return {"error": None, "finalized": finalized}

    def a_synchronous_save_fails_on_one_rank(self) -> dict[str, Any]:
        path = self.folder / "sync"
        writer = FileSystemWriterAsync(path)
        plan = save_state_dict_async_plan({str(self.rank): torch.ones(3)}, writer)
        save, _, arguments = writer.get_save_function_and_args()
        if self.rank:
            save.images = lambda: fail("disk is full")  # type: ignore[union-attr]
        finish = partial(save_state_dict_async_finalize, *plan)
        try:
            AsyncRequest(save, arguments, [finish]).execute_sync()
        except CheckpointException as error:
            return {"error": str(error), "committed": (path / ".metadata").exists()}
        return {"error": None}

    def structure_changes_between_cached_saves(self) -> dict[str, Any]:
        cache = CheckpointMetadataCache()
        state = {"a": torch.ones(5), f"own{self.rank}": torch.ones(2)}
        reused = []
        for number in range(4):
            if number == 3:
                state["added"] = torch.full((4,), 3.0)
            self.save(state, self.folder / f"cached{number}", cache=cache)
            reused.append(cache.validated_cache_reuse)
        loaded = zeroed(state)
        dcp.load(loaded, checkpoint_id=self.folder / "cached3")
        second = zeroed({"a": state["a"]})
        dcp.load(second, checkpoint_id=self.folder / "cached2")
        return {"reused": reused, "equal": equal(state, loaded) and equal({"a": state["a"]}, second)}

    def plans_without_a_coordinator(self) -> dict[str, Any]:
        """As Megatron-LM plans: gathered once, then known from the save before, or the checkpoint loaded."""
        cache = CheckpointMetadataCache()
        state: dict[str, Any] = {f"own{self.rank}": torch.ones(5)}
        how: list[tuple[bool, bool]] = []

        def save(name: str) -> None:
            state[f"own{self.rank}"] += 1
            self.save(state, self.folder / name, cache=cache, planner=OwnPlanner())
            how.append((cache.validated_cache_reuse, cache.validated_loaded_metadata_reuse))

        with CoordinatorsPlans() as gathered:
            for number in range(3):
                save(f"decentral{number}")
            before_restart = gathered.count
            cache = CheckpointMetadataCache()
            reader = CachedMetadataFileSystemReader(self.folder / "decentral2")
            cache.set_cached_global_metadata(reader.read_metadata())
            for number in range(3, 5):
                save(f"decentral{number}")
            after_restart = gathered.count - before_restart
            state[f"added{self.rank}"] = torch.zeros(2)
            save("decentral5")
            del state[f"added{self.rank}"]
            save("decentral6")  # the loaded checkpoint's plan again, but not with its metadata
        loaded = []
        for number in (2, 4, 5, 6):
            blank = zeroed(state)
            dcp.load(blank, checkpoint_id=self.folder / f"decentral{number}")
            loaded.append(float(blank[f"own{self.rank}"].unique().item()))
        dist.barrier()
        return {"how": how, "gathered": [before_restart, after_restart], "loaded": loaded}

    def a_plan_of_its_own_that_fails_on_one_rank(self) -> dict[str, Any]:
        planner = OwnPlanner()
        if self.rank:
            planner.create_decentralized_global_plan = fail  # type: ignore[method-assign]
        try:
            self.save({str(self.rank): torch.ones(3)}, self.folder / "plan", planner=planner)
        except CheckpointException as error:
            return {"error": list(error.failures)}
        return {"error": None}

    def another_directory_is_named_at_the_load(self) -> dict[str, Any]:
        for value in (1.0, 2.0):
            self.save({str(self.rank): torch.full((9,), value)}, self.folder / f"named{value:.0f}")
        dist.barrier()
        state = {str(self.rank): torch.zeros(9)}
        reader = CachedMetadataFileSystemReader(self.folder / "named1")
        dcp.load(state, storage_reader=reader, checkpoint_id=self.folder / "named2")
        return {"loaded": float(state[str(self.rank)].unique().item()), "of": Path(reader.folder).name}

    def overwriting(self) -> dict[str, Any]:
        path = self.folder / "over"
        seen = []
        for value in (1.0, 2.0):
            self.schedule({str(self.rank): torch.full((9,), value)}, path)
            if value == 2.0:
                self.queue._pending[0].ticket.wait(PATIENCE_S)
                dist.barrier()
                seen.append(loaded_value(path, self.rank))  # written, not committed
            self.queue.maybe_finalize_async_calls(blocking=True)
            seen.append(loaded_value(path, self.rank))
        dist.barrier()
        return {"seen": seen, "files": len(list(path.glob("*.distcp"))), "all": len(list(path.iterdir()))}


def loaded_value(path: Path, rank: int) -> float:
    state = {str(rank): torch.zeros(9)}
    dcp.load(state, storage_reader=CachedMetadataFileSystemReader(path))
    return float(state[str(rank)].unique().item())


def clone(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.clone())


def zeroed(value: Any) -> Any:
    return mapped(value, torch.zeros_like)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [mapped(each, change) for each in value]
    return change(value.detach()) if isinstance(value, torch.Tensor) else value


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, torch.Tensor):
        return torch.equal(local(left), local(right))
    return bool(left == right)


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    scenes = Scenes(rank, folder)
    saw = {}
    for name, scene in vars(Scenes).items():
        if name in sys.argv[3:]:
            try:
                saw[name] = scene(scenes)
            except BaseException:
                saw[name] = {"traceback": traceback.format_exc()}
            (folder / f"saw{rank}.json").write_text(json.dumps(saw))
    scenes.queue.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
