"""``torch.distributed.checkpoint`` in two parts: plan and snapshot now, commit when all ranks have written.

::

    writer = FileSystemWriterAsync(path)
    plan = save_state_dict_async_plan(state_dict, writer)          # collective
    save, preload, arguments = writer.get_save_function_and_args()
    finish = functools.partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.storage.torch_internals import require

_is_wrapped_exception = require("torch.distributed.checkpoint.api", "_is_wrapped_exception")
_DistWrapper = require("torch.distributed.checkpoint.utils", "_DistWrapper")


@dataclasses.dataclass
class CheckpointMetadataCache:
    """What the last save planned, for the next one of the same structure."""

    cached_local_plan: Any = None
    cached_central_plan: Any = None
    cached_global_metadata: Any = None
    """On the coordinator only."""
    validated_cache_reuse: bool = False
    """Whether the last save could use it."""

    def set_cached_global_metadata(self, metadata: Any) -> None:
        """Keep the metadata of a checkpoint that was loaded."""
        self.cached_global_metadata = metadata

    def set_cache_metadata(self, central_plan: Any, local_plan: Any, metadata: Any) -> None:
        """Keep what has been planned."""
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan
        self.cached_global_metadata = metadata


_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(metadata: Any = None) -> None:
    """Make the cache that saves of this process with ``enable_cache`` use."""
    global _cache
    _cache = CheckpointMetadataCache(cached_global_metadata=metadata)


def get_metadata_caching_status() -> tuple[bool, bool]:
    """Return whether the last save with ``enable_cache`` needed no new global plan, and False.

    The second says in NVIDIA's package whether metadata of a loaded checkpoint was used; not done here.
    """
    return _cache is not None and _cache.validated_cache_reuse, False


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: Any = None,
    coordinator_rank: int = 0,
    planner: Any = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> tuple[FileSystemWriterAsync, Any, Any]:
    """Plan a save; collective. Returns the arguments of :func:`save_state_dict_async_finalize`.

    Args:
        planner: torch's ``DefaultSavePlanner`` if None.
        enable_cache: use the last save's global plan when no rank's state has changed its structure, which
            one small collective finds out.
        metadata_cache: where the plan is kept, instead of what :func:`init_checkpoint_metadata_cache` made.

    Raises:
        CheckpointException: planning failed on some rank; raised on all.
    """
    planner = planner or DefaultSavePlanner()
    group = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    cache = (metadata_cache or _cache) if enable_cache else None
    metadata = None

    def local_step() -> Any:
        planner.set_up_planner(
            state_dict, storage_meta=storage_writer.storage_meta(), is_coordinator=group.is_coordinator
        )
        storage_writer.set_up_storage_writer(group.is_coordinator, rank=group.rank, use_collectives=True)
        return storage_writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[Any]) -> list[Any]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return list(storage_writer.prepare_global_plan(plans))

    if cache is None:
        central = group.reduce_scatter("plan", local_step, global_step)
    else:
        local, failure = _attempt(local_step)
        same = failure is None and cache.cached_local_plan == local
        cache.validated_cache_reuse = _same_everywhere(same, group)
        if cache.validated_cache_reuse:
            central, metadata = cache.cached_central_plan, cache.cached_global_metadata
        else:
            central = group.reduce_scatter("plan", lambda: _outcome(local, failure), global_step)
            cache.set_cache_metadata(central, local, metadata)
    storage_writer.prepare_write_data(planner.finish_plan(central), planner)
    # A copy: finish() writes to it, and the next save may begin before.
    return storage_writer, dataclasses.replace(metadata) if metadata is not None else None, group


def save_state_dict_async_finalize(
    storage_writer: FileSystemWriterAsync, global_metadata: Any, dist_wrapper: Any
) -> None:
    """Commit a save that all ranks have written; collective.

    Raises:
        CheckpointException: some rank has failed, or the commit; raised on all ranks.
    """

    def commit(results: list[Any]) -> None:
        failures = {rank: each for rank, each in enumerate(results) if _is_wrapped_exception(each)}
        if failures:
            raise CheckpointException("write", failures)
        storage_writer.finish(global_metadata, results)

    dist_wrapper.all_reduce("write", storage_writer.retrieve_write_results, commit)


def _attempt(step: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What goes wrong on one rank is told to all of them by the collective that follows."""
    try:
        return step(), None
    except Exception as error:
        return None, error


def _outcome(value: Any, failure: Exception | None) -> Any:
    if failure is not None:
        raise failure
    return value


def _same_everywhere(same: bool, group: Any) -> bool:
    if not group.use_dist:
        return same
    nccl = dist.get_backend(group.group) == "nccl"
    vote = torch.tensor(int(same), device="cuda" if nccl else "cpu")
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group.group)
    return bool(vote.item())
