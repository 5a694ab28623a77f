"""One of four gloo ranks that go through scenarios of local checkpoints, two to a pretended node.

Command line: a directory, and the names of scenarios. After each, rank R appends a line to ``DIRECTORY/rR``:
JSON with the scenario's name, the error if there was one, and what the scenario returns.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.errors import (
    CheckpointingException,
    ExchangeError,
    NoReplicasAvailableError,
)
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.ladder import CheckpointLadder
from nvrx_slurm.checkpointing.local.replication.group_utils import ExchangePlan, GroupWrapper
from nvrx_slurm.checkpointing.local.replication.strategies import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
)
from nvrx_slurm.checkpointing.local.shards import local_of

PATIENCE = timedelta(seconds=60)


class World:
    def __init__(self, directory: Path) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.directory = directory
        self.cliques = CliqueReplicationStrategy.from_replication_params(self.size // 2, 2, timeout=PATIENCE)

    @property
    def first_of_node(self) -> bool:
        return self.rank % 2 == 0

    def manager(self, name: str, node: int | None = None, strategy: Any = "cliques", **options: Any) -> Any:
        """A manager whose root is that of a node: by default two ranks have one."""
        root = self.directory / name / f"node{self.rank // 2 if node is None else node}"
        chosen = self.cliques if strategy == "cliques" else strategy
        return LocalCheckpointManager(root, repl_strategy=chosen, timeout=PATIENCE, **options)

    def lose_node(self, name: str, node: int) -> None:
        """The node is replaced: nothing is on its disk."""
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.directory / name / f"node{node}")
        dist.barrier()


def content(rank: int, iteration: int) -> dict[str, Any]:
    """What a rank has to save: nothing two ranks have in common but the keys."""
    made = torch.Generator().manual_seed(1000 * rank + iteration)
    return {
        "weights": [
            torch.randn(100 + rank, 7, generator=made),
            (torch.ones(3, dtype=torch.bfloat16) * rank,),
        ],
        "nothing": torch.zeros(0, 4),
        "step": iteration,
        "rng": {"python": (3, tuple(range(5)), None), "rank": rank},
        "only here": {rank: torch.arange(rank)},
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def save(manager: Any, world: World, iteration: int) -> None:
    manager.save(BasicTensorAwareStateDict(content(world.rank, iteration)), iteration)


def check_loads(manager: Any, world: World, iteration: int) -> None:
    found = manager.find_latest()
    assert found == iteration, found
    state, ckpt_id = manager.load()
    assert ckpt_id == (iteration, world.rank, "")
    assert equal(state.state_dict, content(world.rank, iteration))


def files_of(world: World, name: str) -> list[str]:
    """What lies where, on all nodes, by rank directory."""
    dist.barrier()
    root = world.directory / name
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    dist.barrier()
    return found


def a_save_is_found_and_loaded_by_another_manager(world: World) -> None:
    for strategy in (None, "cliques"):
        name = f"plain-{strategy}"
        manager = world.manager(name, strategy=strategy)
        assert manager.find_latest() == -1
        given = content(world.rank, 1)
        manager.save(BasicTensorAwareStateDict(given), 1)
        assert equal(given, content(world.rank, 1)), "the caller's state has changed"
        check_loads(manager, world, 1)
        check_loads(world.manager(name, strategy=strategy), world, 1)


def the_last_save_replaces_those_before(world: World) -> list[str]:
    manager = world.manager("retention")
    save(manager, world, 1)
    save(manager, world, 2)
    kept = world.manager("retention-2", keep=2)
    for iteration in (1, 2, 3):
        save(kept, world, iteration)
    return files_of(world, "retention") + files_of(world, "retention-2")


def the_same_state_gives_the_same_file(world: World) -> None:
    names = ("same-a", "same-b")
    paths = []
    for name in names:
        manager = world.manager(name)
        save(manager, world, 5)
        paths.append(manager.local_ckpt_dir / f"iter_0000005_{world.rank}_local.pt")
    assert paths[0].read_bytes() == paths[1].read_bytes()


def a_lost_node_gets_its_parts_back_and_keeps_them(world: World) -> None:
    save(world.manager("lost"), world, 3)
    world.lose_node("lost", 1)
    check_loads(world.manager("lost"), world, 3)
    dist.barrier()
    # What was fetched is on its disk again, so the other node may be lost, too.
    for owner in (2, 3):
        assert (world.directory / f"lost/node1/{owner}/iter_0000003_{owner}_local.pt").exists()


def ranks_that_have_moved_get_their_parts(world: World) -> None:
    save(world.manager("moved"), world, 3)
    world.lose_node("moved", 0)
    # Ranks 0 and 1 are on the old node 1 now, ranks 2 and 3 on a new one.
    check_loads(world.manager("moved", node=1 if world.rank < 2 else 9), world, 3)


def permuted_ranks_get_their_parts(world: World) -> None:
    save(world.manager("permuted"), world, 3)
    moved = world.manager("permuted", node=[1, 0, 0, 1][world.rank])
    check_loads(moved, world, 3)
    save(moved, world, 4)
    # nor does anything stay where ranks have been
    assert not [name for name in files_of(world, "permuted") if "iter_0000003" in name]


def a_loss_of_all_copies_is_named(world: World) -> str:
    save(world.manager("gone"), world, 3)
    world.lose_node("gone", 0)
    dist.barrier()
    if world.rank == 0:  # The copy of rank 1, on the node that is left.
        next((world.directory / "gone/node1/3").glob("iter_0000003_1_local.pt")).unlink()
    dist.barrier()
    manager = world.manager("gone")
    assert manager.find_latest() == -1
    try:
        manager.load()
    except NoReplicasAvailableError as error:
        return str(error)
    raise AssertionError("loaded")


def a_damaged_copy_is_passed_over_and_replaced(world: World) -> None:
    save(world.manager("damaged"), world, 3)
    own = world.manager("damaged").local_ckpt_dir / f"iter_0000003_{world.rank}_local.pt"
    if world.rank in (1, 2):
        flip_a_bit(own)
    dist.barrier()
    check_loads(world.manager("damaged"), world, 3)
    dist.barrier()
    check_loads(world.manager("damaged", strategy=None), world, 3)  # from one's own file alone


def damage_everywhere_is_named_on_all_ranks(world: World) -> str:
    save(world.manager("rotten"), world, 3)
    dist.barrier()
    if world.rank == 0:
        for path in (world.directory / "rotten").rglob("iter_0000003_2_local.pt"):
            flip_a_bit(path)
    dist.barrier()
    manager = world.manager("rotten")
    assert manager.find_latest() == 3  # by names and headers it is whole
    try:
        manager.load()
    except NoReplicasAvailableError as error:
        return str(error)
    raise AssertionError("loaded")


def a_torn_or_empty_file_is_no_part(world: World) -> None:
    for name, size in (("empty", 0), ("torn", 5000)):
        manager = world.manager(name, strategy=None, keep=2)
        save(manager, world, 1)
        save(manager, world, 2)
        if world.rank == 3:
            os.truncate(manager.local_ckpt_dir / "iter_0000002_3_local.pt", size)
        dist.barrier()
        check_loads(world.manager(name, strategy=None), world, 1)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def a_leftover_of_a_killed_writer_stops_nobody(world: World) -> list[str]:
    manager = world.manager("leftover")
    leftover = manager.local_ckpt_dir / f".iter_0000004_{world.rank}_local.pt.nvrx-tmp-0123456789ab"
    leftover.write_bytes(b"half")
    for _ in range(3):
        save(manager, world, 4)
    check_loads(world.manager("leftover"), world, 4)
    return files_of(world, "leftover")


def a_failing_or_silent_write_is_an_error_on_all_ranks_and_leaves_nothing(world: World) -> list[str]:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    messages = []
    for failing in (fail, lambda *_: None):
        manager = world.manager("failing", strategy=None)
        if world.rank == 1:
            manager._save = failing
        try:
            save(manager, world, 6)
        except CheckpointingException as error:
            messages.append(str(error))
        assert manager.find_latest() == -1
    assert files_of(world, "failing") == []
    assert len(messages) == 2
    return messages


def what_can_not_be_saved_on_one_rank_is_an_error_on_all(world: World) -> list[str]:
    messages = []
    for bad in (torch.zeros(3).to_sparse, lambda: object()):
        state = content(world.rank, 1) | ({"bad": bad()} if world.rank == 2 else {})
        manager = world.manager("unsaved")
        try:
            manager.save(Late(state), 1)
        except CheckpointingException as error:
            messages.append(str(error))
        check_can_save(manager, world)
    return messages


def check_can_save(manager: Any, world: World) -> None:
    manager.latest_iteration = -1
    save(manager, world, 2)
    check_loads(manager, world, 2)


class Late(BasicTensorAwareStateDict):
    """Finds out what it has been given only when it is to be copied."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._tree, self._devices = state, None

    @property
    def tensors(self) -> Any:
        return BasicTensorAwareStateDict(self._tree).tensors


def a_background_save_is_the_state_at_the_call(world: World) -> list[str]:
    queue = AsyncCallsQueue()
    manager = world.manager("async")
    returned = threading.Event()
    exchange = world.cliques.replicate_part

    def exchange_later(*arguments: Any) -> Any:
        assert returned.wait(PATIENCE.total_seconds()), "save waits for the copies"
        return exchange(*arguments)

    world.cliques.replicate_part = exchange_later  # type: ignore[method-assign]
    for iteration in (1, 2, 3):
        given = content(world.rank, iteration)
        request = manager.save(BasicTensorAwareStateDict(given), iteration, is_async=True)
        given["weights"][0].zero_()  # what training does next
        queue.schedule_async_request(request)
    returned.set()
    world.cliques.replicate_part = exchange  # type: ignore[method-assign]
    queue.maybe_finalize_async_calls(blocking=True)
    check_loads(world.manager("async"), world, 3)
    queue.close()
    manager._background.shutdown(wait=True)
    return files_of(world, "async")


def a_background_write_that_fails_is_an_error_on_all_ranks(world: World) -> str:
    queue = AsyncCallsQueue()
    manager = world.manager("async-failing", strategy=None)
    save(manager, world, 1)
    if world.rank == 2:
        manager._place_of = lambda _id: world.directory / "nowhere" / "part"
    request = manager.save(BasicTensorAwareStateDict(content(world.rank, 2)), 2, is_async=True)
    finalized: list[int] = []
    request.add_finalize_fn(lambda: finalized.append(2))
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException) as refused:
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert not finalized  # the manager's own finalizer came first: it told all ranks, and cleaned up
    manager._background.submit(lambda: None).result()
    assert not list(manager.local_ckpt_dir.glob("iter_0000002*"))
    check_loads(world.manager("async-failing", strategy=None), world, 1)
    save(manager, world, 3)
    check_loads(manager, world, 3)
    queue.close()
    return str(refused.value)


def shards_of_fsdp2_come_back_as_shards(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(9, 13), torch.nn.Linear(13, 5))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    train_a_step(model, optimizer)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expected = [local_of(tensor).clone() for tensor in BasicTensorAwareStateDict(saved).tensors]
    world.manager("fsdp").save(BasicTensorAwareStateDict(saved), 1)
    train_a_step(model, optimizer)  # and the state goes on
    world.lose_node("fsdp", 0)
    manager = world.manager("fsdp")
    assert manager.find_latest() == 1
    loaded = manager.load()[0]
    assert all(torch.equal(a, b) for a, b in zip(expected, loaded.tensors, strict=True))
    assert isinstance(loaded.state_dict["model"]["0.weight"], DTensor)
    model.load_state_dict(loaded.state_dict["model"])
    optimizer.load_state_dict(loaded.state_dict["optimizer"])
    again = BasicTensorAwareStateDict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(torch.equal(a, b) for a, b in zip(expected, again.tensors, strict=True))


def train_a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def a_ladder_takes_the_layer_with_the_newest_whole_checkpoint(world: World) -> list[Any]:
    def ladder() -> CheckpointLadder:
        local = world.manager("ladder-local", keep=2)
        shared = LocalCheckpointManager(world.directory / "ladder-shared", keep=2, timeout=PATIENCE)
        return CheckpointLadder.of(local, shared, local_every=2, shared_every=4)

    told = []
    saving = ladder()
    for step in range(1, 7):
        saving.save_if_due(step, lambda step=step: BasicTensorAwareStateDict(content(world.rank, step)))
    for lost in ([1], [0, 1]):
        for node in lost:
            world.lose_node("ladder-local", node)
        loaded = ladder().load()
        assert loaded is not None
        assert equal(loaded.state.state_dict, content(world.rank, loaded.step))
        told.append([loaded.step, loaded.layer, loaded.why])
    return told


def too_little_room_is_said_before_anything_is_written(world: World) -> str:
    manager = world.manager("room")
    room = replace(manager._room(), free=10_000)
    manager._room = lambda: room
    try:
        save(manager, world, 1)
    except CheckpointingException as error:
        assert files_of(world, "room") == []
        return str(error)
    raise AssertionError("saved")


def a_rank_that_can_not_look_is_an_error_on_all(world: World) -> str:
    manager = world.manager("unseen")
    if world.rank == 1:
        manager.local_ckpt_dir.chmod(0o777)
    try:
        manager.find_latest()
    except CheckpointingException as error:
        return str(error)
    raise AssertionError("looked")


def irregular_cliques_hold_exactly_their_members_parts(world: World) -> list[str]:
    group = GroupWrapper.from_list_of_groups([[0, 2, 3], [1]], PATIENCE)
    strategy = CliqueReplicationStrategy(group, target_device="cpu")
    manager = world.manager("irregular", strategy=strategy)
    save(manager, world, 1)
    check_loads(manager, world, 1)
    return files_of(world, "irregular")


def replicas_are_equal_to_what_was_given(world: World) -> None:
    strategy = LazyCliqueReplicationStrategy(replication_jump=1, replication_factor=2)
    states, ids = strategy.replicate(BasicTensorAwareStateDict(content(world.rank, 8)), (8, world.rank, ""))
    members = [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
    assert [id_.rank for id_ in ids] == members
    assert all(equal(s.state_dict, content(rank, 8)) for s, rank in zip(states, members, strict=True))
    # everybody wants the state of the next rank
    held = {rank: [(8, rank, "")] for rank in range(world.size)}
    plan = strategy.retrieve_plan(held, [(8, (world.rank + 1) % world.size, "")])
    assert plan.required_ids() == [(8, world.rank, "")]
    mine = {(8, world.rank, ""): BasicTensorAwareStateDict(content(world.rank, 8))}
    (got,) = strategy.retrieve_execute(plan, mine).values()
    assert equal(got.state_dict, content((world.rank + 1) % world.size, 8))


def a_group_carries_tensors_objects_and_states(world: World) -> None:
    group = GroupWrapper.from_list_of_groups([[0, 2, 3], [1]], PATIENCE)
    first = group.get_global_rank(0)
    tensor = torch.full((3,), float(world.rank))
    group.broadcast(tensor, first)
    assert torch.equal(tensor, torch.full((3,), float(first)))
    # each member gives another number of tensors, of other shapes; one gives none
    given = {rank: [torch.arange(rank + i) for i in range(rank)] for rank in range(world.size)}
    assert equal(group.all_gather_batch(given[world.rank], "cpu"), [given[rank] for rank in group.ranks])
    if world.rank == 2:
        group.send_object({"a": (1, "b")}, 3)
        assert group.isend_state_dict(BasicTensorAwareStateDict(content(2, 1)), 3) > 0
    if world.rank == 3:
        assert group.recv_object(2) == {"a": (1, "b")}
        state, size = group.irecv_state_dict(2)
        assert equal(state.state_dict, content(2, 1))  # type: ignore[attr-defined]
        assert size > 0
    # a plan within the group: each member gets the state of the next
    ids = [CkptID(4, rank, "") for rank in group.ranks]
    plan = ExchangePlan(group)
    for sender, receiver, id_ in zip(group.ranks, group.ranks[1:] + group.ranks[:1], ids, strict=True):
        plan.plan(sender=sender, receiver=receiver, id_=id_)
    own = group.my_group_rank
    got = group.execute_plan(plan, {ids[own]: BasicTensorAwareStateDict(content(world.rank, 4))})
    before = group.ranks[own - 1]
    assert list(got) == [ids[own - 1]]
    assert equal(got[ids[own - 1]].state_dict, content(before, 4))  # type: ignore[attr-defined]


def an_iteration_that_can_not_be_is_refused(world: World) -> None:
    manager = world.manager("refused")
    for iteration in (-1, True):
        with pytest.raises(CheckpointingException, match="an integer from 0"):
            save(manager, world, iteration)
    with pytest.raises(CheckpointingException, match="find_latest"):
        manager.load()
    save(manager, world, 10_000_000)
    check_loads(manager, world, 10_000_000)
    with pytest.raises(CheckpointingException, match="is there already"):
        save(manager, world, 10_000_000)


def a_rank_that_stays_away_is_named_in_time(world: World) -> dict[str, Any]:
    short = timedelta(seconds=2)
    manager = LocalCheckpointManager(world.directory / "absent", timeout=short)
    manager.find_latest()  # all meet
    done = world.directory / "absent-done"
    began = time.monotonic()
    if world.rank == 3:
        while not all((done.parent / f"absent-done{rank}").exists() for rank in range(3)):
            time.sleep(0.05)
        return {}
    try:
        manager.find_latest() if world.rank else save(manager, world, 1)
    except ExchangeError as error:
        return {"error": str(error), "after_s": time.monotonic() - began}
    finally:
        (done.parent / f"absent-done{world.rank}").touch()
    raise AssertionError("nobody was missed")


def sharded_state(value: float, **others: Any) -> BasicTensorAwareStateDict:
    """A state that any number of ranks can share, but for ``others``."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(13 * 5, dtype=torch.float32).reshape(13, 5) + value
    placements = {"rows": Shard(0), "columns": Shard(1), "copies": Replicate()}
    shards = {name: distribute_tensor(whole, mesh, [each]) for name, each in placements.items()}
    return BasicTensorAwareStateDict(shards | {"plain": torch.full((2,), value), "step": 3, **others})


def four_ranks_save_for_two(world: World) -> None:
    world.manager("resharded").save(sharded_state(7.0), 3)
    world.manager("per-rank").save(sharded_state(7.0, own=world.rank), 3)
    dist.barrier()


def two_ranks_load_what_four_have_saved(world: World) -> list[str]:
    manager = world.manager("resharded", node=world.rank)
    assert manager.find_latest() == -1
    state, iteration = manager.load_resharded(sharded_state(0.0))
    assert iteration == 3
    expected = sharded_state(7.0)
    assert all(torch.equal(a, b) for a, b in zip(state.tensors, expected.tensors, strict=True))
    assert state.state_dict["rows"].device_mesh.size() == 2
    save(manager, world, 4)
    check_loads(world.manager("resharded", node=world.rank), world, 4)
    with pytest.raises(CheckpointingException) as whole:
        world.manager("per-rank", node=world.rank).load()
    with pytest.raises(CheckpointingException) as refused:
        world.manager("per-rank", node=world.rank).load_resharded(sharded_state(0.0, own=0))
    with pytest.raises(CheckpointingException) as other:
        world.manager("per-rank", node=world.rank).load_resharded(sharded_state(0.0))
    return [str(each.value) for each in (whole, refused, other)]


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo", timeout=PATIENCE)
    torch.set_num_threads(1)
    world = World(directory)
    with open(directory / f"r{world.rank}", "w") as results:
        for name in names:
            scenario: Callable[[World], Any] = globals()[name]
            error, value = None, None
            try:
                value = scenario(world)
            except Exception:
                error = traceback.format_exc()
            print(json.dumps({"name": name, "error": error, "value": value}), file=results, flush=True)
            dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
