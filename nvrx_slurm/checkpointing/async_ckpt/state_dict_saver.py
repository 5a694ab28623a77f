"""``torch.distributed.checkpoint`` in two parts: plan and snapshot now, commit when all ranks have written.

::

    writer = FileSystemWriterAsync(path)
    plan = save_state_dict_async_plan(state_dict, writer)          # collective
    save, preload, arguments = writer.get_save_function_and_args()
    finish = functools.partial(save_state_dict_async_finalize, *plan)
    queue.schedule_async_request(AsyncRequest(save, arguments, [finish], preload_fn=preload))
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from nvrx_slurm.checkpointing.async_ckpt.agreement import device_of
from nvrx_slurm.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvrx_slurm.checkpointing.async_ckpt.save_names import next_save
from nvrx_slurm.checkpointing.storage.torch_internals import require

_is_wrapped_exception = require("torch.distributed.checkpoint.api", "_is_wrapped_exception")
_DistWrapper = require("torch.distributed.checkpoint.utils", "_DistWrapper")


@dataclasses.dataclass
class CheckpointMetadataCache:
    """What the last save, or a checkpoint that was loaded, has planned, for the next of the same structure.

    A save with it does not gather the plans of all ranks; one collective of two numbers finds out whether
    each rank's own plan is the one that is known.
    """

    cached_central_plan: Any = None
    cached_local_plan: Any = None
    cached_global_metadata: Any = None
    """On the coordinator only, unless it is that of a loaded checkpoint."""
    validated_cache_reuse: bool = False
    """Whether the last save could use what the one before had planned."""
    validated_loaded_metadata_reuse: bool = False
    """Whether the last save could use the metadata of the loaded checkpoint."""
    loaded_all_plans: list[Any] | None = None
    """Of each rank, as the loaded checkpoint's metadata holds them; see :func:`verify_global_md_reuse`."""

    def set_cached_global_metadata(self, md: Any) -> None:
        """Keep the metadata of a checkpoint that was loaded, and the plans in it; on all ranks."""
        self.cached_global_metadata = md
        self.loaded_all_plans = getattr(md, _ALL_PLANS, None)

    def set_cache_metadata(
        self, central_plan: Any, local_plan: Any, global_md_verify_reuse: bool = False
    ) -> None:
        """Keep what a save has planned."""
        self.validated_cache_reuse = central_plan == self.cached_central_plan
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        self.cached_central_plan, self.cached_local_plan = central_plan, local_plan


_ALL_PLANS = "all_local_plans"
"""Attribute of the metadata of a checkpoint whose plans were made without a coordinator."""
_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(md: Any = None) -> None:
    """Make the cache that saves of this process with ``enable_cache`` use.

    Args:
        md: the metadata of the checkpoint that was loaded; see :class:`CheckpointMetadataCache`.
    """
    global _cache
    _cache = CheckpointMetadataCache()
    _cache.set_cached_global_metadata(md)


def get_metadata_caching_status() -> tuple[bool, bool]:
    """Return whether the last save with ``enable_cache`` used the plans of the save before, or of a load."""
    if _cache is None:
        return False, False
    return _cache.validated_cache_reuse, _cache.validated_loaded_metadata_reuse


def verify_global_md_reuse(
    loaded_all_plans: list[Any] | None, local_plan: Any, rank: int, dist_wrapper: Any
) -> bool:
    """Return whether the plan of each rank is the one in a loaded checkpoint's metadata; collective.

    Args:
        loaded_all_plans: of all ranks, in their order; None: there are none.
        local_plan: of this rank, now; where its data would lie is not compared.
        dist_wrapper: the third of what :func:`save_state_dict_async_plan` returns.
    """
    return _all_agree([_is_known(loaded_all_plans, local_plan, rank, dist_wrapper)], dist_wrapper)[0]


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
        planner: torch's ``DefaultSavePlanner`` if None. One with ``can_run_decentralized_global_plan`` makes
            each rank's part of the global plan on that rank, by ``create_decentralized_global_plan``; the
            coordinator gathers the plans only for the metadata, and keeps them in it (``all_local_plans``).
        enable_cache: use the last save's global plan, or that of a loaded checkpoint, when no rank's state
            has changed its structure, which one small collective finds out.
        metadata_cache: where the plan is kept, instead of what :func:`init_checkpoint_metadata_cache` made.

    Raises:
        CheckpointException: planning failed on some rank; raised on all.
    """
    planner = planner or DefaultSavePlanner()
    group = _DistWrapper(process_group, dist.is_available() and dist.is_initialized(), coordinator_rank)
    cache = (metadata_cache or _cache) if enable_cache else None
    is_decentralized = all(
        getattr(each, "can_run_decentralized_global_plan", False) for each in (planner, storage_writer)
    )
    metadata = None

    def local_step() -> tuple[Any, Any]:
        planner.set_up_planner(
            state_dict, storage_meta=storage_writer.storage_meta(), is_coordinator=group.is_coordinator
        )
        storage_writer.set_up_storage_writer(group.is_coordinator, rank=group.rank, use_collectives=True)
        plan = storage_writer.prepare_local_plan(planner.create_local_plan())
        if not is_decentralized:
            return plan, None
        part = planner.create_decentralized_global_plan(plan)
        return plan, storage_writer.prepare_decentralized_global_plan(part)

    def global_step(plans: list[Any]) -> list[Any]:
        nonlocal metadata
        central, metadata = planner.create_global_plan(plans)
        if is_decentralized:
            setattr(metadata, _ALL_PLANS, plans)
            return [None] * len(plans)  # each rank has its part
        return list(storage_writer.prepare_global_plan(central))

    planned, failure = _attempt(local_step)
    local, central = planned or (None, None)
    is_last = is_loaded = False
    if cache is not None:
        loaded = cache.loaded_all_plans if is_decentralized else None
        is_last, is_loaded = _known_everywhere(cache.cached_local_plan, loaded, local, group)
    if cache is not None and (is_last or is_loaded):
        metadata = cache.cached_global_metadata if group.is_coordinator else None
    if is_last and cache is not None:
        central = cache.cached_central_plan
    elif not is_loaded:
        scattered = group.reduce_scatter("plan", lambda: _outcome(local, failure), global_step)
        central = central if is_decentralized else scattered
    if cache is not None:
        cache.set_cache_metadata(central, local, is_loaded)
        cache.validated_cache_reuse = is_last
        cache.cached_global_metadata = metadata
        if not (is_last or is_loaded):
            cache.loaded_all_plans = None  # they belong to other metadata
    storage_writer.announce(next_save(group), metadata if group.is_coordinator else None)
    storage_writer.prepare_write_data(planner.finish_plan(central), planner)
    # A copy, with what planners attach to it: finish() writes to it, and the next save may begin before.
    return storage_writer, copy.copy(metadata), group


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


def _known_everywhere(last: Any, loaded: list[Any] | None, local: Any, group: Any) -> tuple[bool, bool]:
    """Return whether all ranks have the plan of the last save, or else that of the loaded checkpoint."""
    is_last = local is not None and last == local
    is_loaded = local is not None and _is_known(loaded, local, group.rank, group)
    is_last, is_loaded = _all_agree([is_last, is_loaded], group)
    return is_last, is_loaded and not is_last


def _is_known(all_plans: list[Any] | None, local: Any, rank: int, group: Any) -> bool:
    world_size = dist.get_world_size(group.group) if group.use_dist else 1
    if all_plans is None or len(all_plans) != world_size:
        return False
    there, names = all_plans[rank], {each.name for each in dataclasses.fields(local)} - {"storage_data"}
    return type(there) is type(local) and all(getattr(there, n) == getattr(local, n) for n in names)


def _all_agree(said: list[bool], group: Any) -> list[bool]:
    if not group.use_dist:
        return said
    vote = torch.tensor(list(map(int, said)), device=device_of(group.group))
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group.group)
    return list(map(bool, vote.tolist()))
