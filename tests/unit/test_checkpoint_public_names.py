"""Names, parameters and defaults that scripts for NVIDIA's extension use: to change an import is enough."""

from __future__ import annotations

import importlib
import inspect
import math
from typing import Any

import pytest

ANY = object()
"""A default that differs on purpose; the documentation says so."""
REQUIRED = inspect.Parameter.empty

QUEUE = {
    "is_daemon": True,
    "cpu_priority": 10,
    "io_priority": None,
    "sigterm_timeout": 30.0,
    "cpu_shm_mode": False,
}

CALLABLES: dict[str, dict[str, dict[str, Any]]] = {
    "async_ckpt.core": {
        "AsyncRequest": {
            "async_fn": REQUIRED,
            "async_fn_args": REQUIRED,
            "finalize_fns": REQUIRED,
            "async_fn_kwargs": None,
            "preload_fn": None,
            "is_frozen": False,
            "call_idx": 0,
        },
        "AsyncRequest.add_finalize_fn": {"fn": REQUIRED},
        "AsyncRequest.execute_sync": {},
        "AsyncRequest.execute_finalize_fns": {"validate_matching_call_idx": True},
        "AsyncRequest.freeze": {},
        "AsyncCallsQueue": {"persistent": True, **QUEUE},
        "AsyncCallsQueue.warmup_persistent_caller": {"rank": REQUIRED, **QUEUE},
        "AsyncCallsQueue.schedule_async_request": {"async_request": REQUIRED},
        "AsyncCallsQueue.maybe_finalize_async_calls": {"blocking": False, "no_dist": False},
        "AsyncCallsQueue.get_num_unfinalized_calls": {},
        "AsyncCallsQueue.close": {"abort": False},
        "AsyncCaller.schedule_async_call": {"async_req": REQUIRED},
        "AsyncCaller.is_current_async_call_done": {"blocking": False, "no_dist": False},
        "AsyncCaller.sync_all_async_calls": {"is_alive": REQUIRED},
        "AsyncCaller.close": {"abort": False},
        "TemporalAsyncCaller": {},
        "PersistentAsyncCaller": {},
        "abort_nvrx_checkpoint": {},
    },
    "async_ckpt.torch_ckpt": {
        "TorchAsyncCheckpoint": {"persistent_queue": True},
        "TorchAsyncCheckpoint.async_save": {"state_dict": REQUIRED},
        "TorchAsyncCheckpoint.finalize_async_save": {"blocking": False, "no_dist": True, "terminate": False},
        "TorchAsyncCheckpoint.close": {"abort": False},
        "TorchAsyncCheckpoint._get_async_calls_queue": {},
    },
    "async_ckpt.filesystem_async": {
        "FileSystemWriterAsync": {
            "path": REQUIRED,
            "separation_hint": None,
            "use_msc": False,
            "is_multiproc_io": False,
            "use_cached_data_structure": False,
            "use_cpu_shm_for_gpu_tensors": False,
        },
        "FileSystemWriterAsync.prepare_write_data": {"plan": REQUIRED, "planner": REQUIRED},
        "FileSystemWriterAsync.get_save_function_and_args": {},
        "FileSystemWriterAsync.retrieve_write_results": {},
        "FileSystemWriterAsync.finish": {"metadata": REQUIRED, "results": REQUIRED},
        "FileSystemWriterAsync.prepare_local_plan": {"plan": REQUIRED},
        "FileSystemWriterAsync.prepare_decentralized_global_plan": {"plan": REQUIRED},
        "get_write_results_queue": {"mp_mode": "spawn"},
        "_get_write_results_queue": {"mp_mode": "spawn"},
    },
    "async_ckpt.state_dict_saver": {
        "save_state_dict_async_plan": {
            "state_dict": REQUIRED,
            "storage_writer": REQUIRED,
            "process_group": None,
            "coordinator_rank": 0,
            "planner": None,
            "enable_cache": False,
            "metadata_cache": None,
        },
        "save_state_dict_async_finalize": {
            "storage_writer": REQUIRED,
            "global_metadata": REQUIRED,
            "dist_wrapper": REQUIRED,
        },
        "CheckpointMetadataCache": {},
        "CheckpointMetadataCache.set_cached_global_metadata": {"md": REQUIRED},
        "CheckpointMetadataCache.set_cache_metadata": {"central_plan": REQUIRED, "local_plan": REQUIRED},
        "init_checkpoint_metadata_cache": {"md": None},
        "get_metadata_caching_status": {},
        "verify_global_md_reuse": {
            "loaded_all_plans": REQUIRED,
            "local_plan": REQUIRED,
            "rank": REQUIRED,
            "dist_wrapper": REQUIRED,
        },
    },
    "async_ckpt.cached_metadata_filesystem_reader": {
        "CachedMetadataFileSystemReader": {"path": REQUIRED, "cache_metadata": True},
        "CachedMetadataFileSystemReader.read_metadata": {},
        "CachedMetadataFileSystemReader.clear_metadata_cache": {"path": None},
    },
    "utils": {
        "preload_tensors": {"state_dict": REQUIRED, "non_blocking": True},
        "wrap_for_async": {"fn": REQUIRED},
        "debug_time": {"name": REQUIRED, "logger": None, "threshold": -math.inf, "level": None},
        "diff": {"x1": REQUIRED, "x2": REQUIRED},
        "dict_list_map_outplace": {"f": REQUIRED, "x": REQUIRED},
        "_disable_gc": {},
        "logger_stack": {"name": REQUIRED},
        "debug_msg": {"msg": REQUIRED},
    },
    "local.ckpt_managers.local_manager": {
        "LocalCheckpointManager": {"root_local_ckpt_dir": REQUIRED, "session_id": "", "repl_strategy": None},
        "LocalCheckpointManager.find_latest": {},
        "LocalCheckpointManager.load": {},
        "LocalCheckpointManager.save": {"state_dict": REQUIRED, "iteration": REQUIRED, "is_async": False},
        "LocalCheckpointManager._ckpt_id": {"iteration": REQUIRED},
        "LocalCheckpointManager._local_ckpt_path_from_id": {"ckpt_id": REQUIRED},
        "LocalCheckpointManager._filename_from_template": {"iteration": REQUIRED, "rank": REQUIRED},
        "LocalCheckpointManager._filename_to_id": {"name": REQUIRED},
        "LocalCheckpointManager._save": {},
        "LocalCheckpointManager._load": {},
        "LocalCheckpointManager._cleanup": {"iteration": REQUIRED},
        "LocalCheckpointManager._cleanup_failed_save": {"iteration": REQUIRED},
    },
    "local.ckpt_managers.base_manager": {
        "BaseCheckpointManager": {},
        "CkptID": {"iteration": REQUIRED, "rank": REQUIRED, "session_id": REQUIRED},
        "SameMachineReplicationException": {"ckpt_id": REQUIRED},
    },
    "local.base_state_dict": {
        "TensorAwareStateDict.pop_tensors": {},
        "TensorAwareStateDict.insert_tensors": {"tensor_data": REQUIRED},
        "TensorAwareStateDict.init_tensors": {},
        "TensorAwareStateDict.copy_tensors_to_cpu": {"non_blocking": False},
        "TensorAwareStateDict.restore_tensor_device": {"non_blocking": True},
        "TensorAwareStateDict.values": {},
    },
    "local.basic_state_dict": {
        "BasicTensorAwareStateDict": {"state_dict": REQUIRED},
        "TensorPlaceholder": {"device": REQUIRED, "shape": REQUIRED, "dtype": REQUIRED},
        "TensorPlaceholder.init_data": {},
        "nested_values": {},
        "dict_list_map_inplace": {"f": REQUIRED, "x": REQUIRED},
    },
    "local.replication.strategies": {
        "ReplicationStrategy.replicate": {"local_ckpt": REQUIRED, "id_": REQUIRED},
        "ReplicationStrategy.retrieve_plan": {"globally_available_ids": REQUIRED, "wanted": REQUIRED},
        "ReplicationStrategy.retrieve_execute": {"plan": REQUIRED, "my_data": REQUIRED},
        "CliqueReplicationStrategy": {"local_group": REQUIRED, "target_device": "cpu"},
        "CliqueReplicationStrategy.from_replication_params": {
            "replication_jump": ANY,
            "replication_factor": 2,
        },
        "LazyReplicationStrategyBuilder._eager_build": {},
        "LazyCliqueReplicationStrategy": {"replication_jump": ANY, "replication_factor": 2},
    },
    "local.replication.group_utils": {
        "parse_group_sequence": {
            "replication_jump": REQUIRED,
            "replication_factor": REQUIRED,
            "world_size": REQUIRED,
        },
        "batched": {"iterable": REQUIRED, "n": REQUIRED},
        "ExchangePlanEntry": {"sender": REQUIRED, "receiver": REQUIRED, "id_": REQUIRED},
        "ExchangePlan": {"group": REQUIRED},
        "ExchangePlan.plan": {"sender": REQUIRED, "receiver": REQUIRED, "id_": REQUIRED},
        "ExchangePlan.required_ids": {"rank": None},
        "GroupWrapper": {"group": None},
        "GroupWrapper.wrap": {"group": REQUIRED},
        "GroupWrapper.from_list_of_groups": {"list_of_groups": REQUIRED},
        "GroupWrapper.get_device": {"wanted": None},
        "GroupWrapper.get_group_rank": {"global_rank": None},
        "GroupWrapper.get_global_rank": {"group_rank": None},
        "GroupWrapper.all_gather_object": {},
        "GroupWrapper.broadcast": {},
        "GroupWrapper.all_gather_batch": {"tensors": REQUIRED, "target_device": None},
        "GroupWrapper.send_object": {},
        "GroupWrapper.recv_object": {},
        "GroupWrapper.isend_state_dict": {},
        "GroupWrapper.irecv_state_dict": {},
        "GroupWrapper.execute_plan": {"plan": REQUIRED, "my_data": REQUIRED},
    },
    "local.replication.torch_device_utils": {
        "TensorPlaceholder.init_data": {},
        "get_default_device_from_type": {"device_type": REQUIRED},
    },
    "local.replication.utils": {"zip_strict": {}},
}

OTHERS = {
    "async_ckpt.core": ["AsyncCaller"],
    "async_ckpt.torch_ckpt": ["TorchAsyncCheckpoint.save"],
    "async_ckpt.filesystem_async": [
        "_results_queue",
        "FileSystemWriterAsync.can_run_decentralized_global_plan",
        "FileSystemWriterAsync.validate_checkpoint_id",
        "FileSystemWriterAsync.write_data",
    ],
    "local.ckpt_managers.base_manager": ["CheckpointingException"],
    "local.base_state_dict": ["TensorAwareStateDict.tensors", "TensorAwareStateDict.is_hollow"],
    "local.basic_state_dict": ["BasicTensorAwareStateDict.state_dict"],
    "local.replication.strategies": ["NoReplicasAvailableError"],
    "local.replication.group_utils": [
        "ProcessGroupLike",
        "ExchangePlan.entries",
        "GroupWrapper.backend",
        "GroupWrapper.supported_devices",
        "GroupWrapper.my_group_rank",
        "GroupWrapper.my_global_rank",
        "GroupWrapper.ranks",
        "GroupWrapper.world_size",
    ],
    "local.replication.torch_device_utils": ["TensorPlaceholder.restore"],
}
"""What has no parameters of its own, or other ones: it is there."""

CACHE_FIELDS = (
    "cached_central_plan",
    "cached_local_plan",
    "cached_global_metadata",
    "validated_cache_reuse",
    "validated_loaded_metadata_reuse",
    "loaded_all_plans",
)


def found(module: str, path: str) -> Any:
    thing: Any = importlib.import_module(f"nvrx_slurm.checkpointing.{module}")
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


ROWS = [
    pytest.param(module, path, parameters, id=f"{module}.{path}")
    for module, names in CALLABLES.items()
    for path, parameters in names.items()
]


@pytest.mark.parametrize(("module", "path", "parameters"), ROWS)
def test_a_call_that_is_right_there_is_right_here(module: str, path: str, parameters: dict[str, Any]) -> None:
    ours = {
        name: each
        for name, each in inspect.signature(found(module, path)).parameters.items()
        if name != "self" and each.kind is not inspect.Parameter.VAR_POSITIONAL
    }
    assert list(ours)[: len(parameters)] == list(parameters)  # by position, too
    for name, default in parameters.items():
        if default is not ANY:
            assert ours[name].default == default, name


@pytest.mark.parametrize("module", OTHERS)
def test_everything_else_that_is_imported_there_is_here(module: str) -> None:
    for path in OTHERS[module]:
        found(module, path)


def test_what_callers_probe_for_is_there() -> None:
    queue = found("async_ckpt.core", "AsyncCallsQueue")
    assert "cpu_shm_mode" in inspect.signature(queue.__init__).parameters
    assert "cpu_shm_mode" in inspect.signature(queue.warmup_persistent_caller).parameters
    assert (
        "mp_mode"
        in inspect.signature(found("async_ckpt.filesystem_async", "get_write_results_queue")).parameters
    )
    cache = found("async_ckpt.state_dict_saver", "CheckpointMetadataCache")()
    assert tuple(vars(cache)) == CACHE_FIELDS
