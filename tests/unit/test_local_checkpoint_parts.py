"""States taken apart and put together, parts as bytes, and whether a save fits."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nvrx_slurm.checkpointing.local.base_state_dict import decode, encode
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict, TensorPlaceholder
from nvrx_slurm.checkpointing.local.buffers import BufferPool, SharedBuffer
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager, write_part
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, SameMachineReplicationException
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part, read_part, stage, state_of
from nvrx_slurm.checkpointing.local.part_format import (
    PAGE,
    Row,
    check_file,
    encode_index,
    parse_header,
    read_header,
    write_header,
)
from nvrx_slurm.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from nvrx_slurm.checkpointing.local.space import Room, file_system_type, shortage
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError, checksum, replacing
from nvrx_slurm.checkpointing.storage.host_memory import available_memory

ID = CkptID(3, 0, "")
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(5, 3),
    "bfloat16": lambda: torch.randn(9).bfloat16(),
    "float8": lambda: torch.randn(9).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "bool": lambda: torch.tensor([True, False, True]),
    "int8": lambda: torch.arange(7, dtype=torch.int8),
    "scalar": lambda: torch.tensor(2.5),
    "zero-size": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.randn(4, 6).t(),
    "view of a larger one": lambda: torch.randn(100)[10:20],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
}


def part_of(state: dict[str, Any], pool: BufferPool | None = None) -> Part:
    return stage(BasicTensorAwareStateDict(state), ID, pool or BufferPool()).seal(1, "x")


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_of_any_kind_comes_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    tensor = TENSORS[kind]()
    write_part(part_of({"it": [tensor]}), tmp_path / "part")
    loaded = state_of(read_part(tmp_path / "part", BufferPool())).state_dict["it"][0]
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert bits(loaded) == bits(tensor)


def test_containers_and_values_come_back_as_they_were() -> None:
    state = {
        "nested": [
            (1, {"a": torch.ones(2)}),
            [None, "text", 2.5, b"bytes", torch.float16, torch.Size([2, 3])],
        ],
        3: OrderedDict(z=1, a=(torch.zeros(1),)),
    }
    loaded = state_of(part_of(state)).state_dict
    assert torch.equal(loaded["nested"][0][1].pop("a"), torch.ones(2))
    assert torch.equal(loaded[3].pop("a")[0], torch.zeros(1))
    assert loaded == {
        "nested": [(1, {}), [None, "text", 2.5, b"bytes", torch.float16, torch.Size([2, 3])]],
        3: OrderedDict(z=1),
    }
    assert list(loaded) == ["nested", 3]
    assert isinstance(loaded[3], OrderedDict)


def test_a_copy_stays_what_it_was_whatever_happens_to_the_state() -> None:
    state = {"a": torch.arange(100.0), "b": [torch.ones(3)]}
    part = part_of(state)
    state["a"].zero_()
    state["b"].append(torch.ones(1))
    loaded = state_of(part).state_dict
    assert torch.equal(loaded["a"], torch.arange(100.0))
    assert len(loaded["b"]) == 1


def test_staging_leaves_the_state_and_the_callers_containers_as_they_were() -> None:
    given = {"a": torch.ones(2), "b": (torch.zeros(3), [torch.ones(1)])}
    state = BasicTensorAwareStateDict(given)
    stage(state, ID, BufferPool())
    assert not state.is_hollow
    assert state.state_dict["a"].data_ptr() == given["a"].data_ptr()
    state.pop_tensors()
    assert state.is_hollow
    assert torch.equal(given["b"][1][0], torch.ones(1))


def test_popping_and_inserting_is_the_identity_and_order_is_fixed() -> None:
    state = BasicTensorAwareStateDict({"b": torch.ones(2), "a": [torch.zeros(3), (torch.ones(4),)]})
    before = list(state.tensors)
    popped = state.pop_tensors()
    assert [t.data_ptr() for t in popped] == [t.data_ptr() for t in before]
    hollow = decode(encode(state))
    hollow.insert_tensors(popped)
    state.insert_tensors(popped)
    assert [t.data_ptr() for t in hollow.tensors] == [t.data_ptr() for t in state.tensors]


def test_a_hollow_state_refuses_what_needs_tensors_and_a_full_one_what_needs_room() -> None:
    state = BasicTensorAwareStateDict({"a": torch.ones(2)})
    with pytest.raises(CheckpointingException, match="have not been taken out"):
        state.insert_tensors([torch.ones(2)])
    (tensor,) = state.pop_tensors()
    for refused in (state.pop_tensors, state.copy_tensors_to_cpu, state.restore_tensor_device):
        with pytest.raises(CheckpointingException, match="have been taken out"):
            refused()
    with pytest.raises(CheckpointingException, match="fewer tensors"):
        state.insert_tensors([])
    with pytest.raises(CheckpointingException, match="more tensors"):
        state.insert_tensors([tensor, tensor])
    state.pop_tensors()
    with pytest.raises(CheckpointingException, match=r"\(3,\) torch.float32 is to go where one of \(2,\)"):
        state.insert_tensors([torch.ones(3)])
    state.init_tensors()
    assert state.state_dict["a"].shape == (2,)


def test_host_copies_are_copies() -> None:
    given = torch.ones(2)
    state = BasicTensorAwareStateDict({"a": given})
    state.copy_tensors_to_cpu()
    state.restore_tensor_device()
    given.zero_()
    assert torch.equal(state.state_dict["a"], torch.ones(2))


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (lambda: torch.ones(2).to_sparse(), "is torch.sparse_coo: make it dense first"),
        (lambda: torch.ones(2, device="meta"), "is on the meta device: it has no content"),
        (lambda: torch.ones(2).as_subclass(Sub), "is a Sub: only plain tensors and DTensors"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized"),
    ],
)
def test_a_tensor_that_can_not_be_saved_is_named(tensor: Callable[[], torch.Tensor], why: str) -> None:
    with pytest.raises(CheckpointingException, match=rf"The tensor layer\.0 {why}"):
        BasicTensorAwareStateDict({"layer": [tensor()]})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of another",)


def test_no_code_is_run_that_a_part_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointingException, match="add_safe_globals"):
        part_of({"evil": Evil()})
    with pytest.raises(CheckpointingException, match="can't be read back safely"):
        decode(pickle.dumps(Evil()))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("where", [0, 20, 200, 4096, 5000, -64, -1])
def test_one_other_bit_is_found(tmp_path: Path, where: int) -> None:
    path = tmp_path / "part"
    write_part(part_of({"a": torch.randn(2000), "b": torch.randn(16)}), path)
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        read_part(path, BufferPool())


def test_one_other_bit_where_nothing_is_said_is_found_and_not_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_part(part_of({"a": torch.ones(3), "b": torch.ones(5)}), path)
    data, header = path.read_bytes(), read_header(path)
    for where in (header.index_end, header.first_tensor - 1, header.first_tensor + 12):
        path.write_bytes(data[:where] + b"\4" + data[where + 1 :])
        with pytest.raises(CorruptCheckpointError, match="between the tensors"):
            check_file(path)
        assert bytes(read_part(path, BufferPool()).bytes().tolist()) == data


@pytest.mark.parametrize("size", [0, 10, 4096, 9000])
def test_a_file_cut_short_is_found(tmp_path: Path, size: int) -> None:
    path = tmp_path / "part"
    write_part(part_of({"a": torch.randn(2000)}), path)
    assert path.stat().st_mode & 0o777 == 0o600
    with open(path, "r+b") as file:
        file.truncate(size)
    with pytest.raises(CorruptCheckpointError, match=r"bytes of|does not begin"):
        read_part(path, BufferPool())


def test_a_bit_of_a_large_tensor_is_found_by_whichever_thread_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_part(part_of({"a": torch.zeros(700_003), "b": torch.zeros(700_003)}), path)
    for where in (-1, path.stat().st_size // 2, 3 << 20):
        with open(path, "r+b") as file:
            file.seek(where, os.SEEK_END if where < 0 else os.SEEK_SET)
            file.write(b"\1")
        with pytest.raises(CorruptCheckpointError, match="tensor"):
            read_part(path, BufferPool())
        with open(path, "r+b") as file:
            file.seek(where, os.SEEK_END if where < 0 else os.SEEK_SET)
            file.write(b"\0")
    read_part(path, BufferPool())


def test_memory_that_is_used_again_leaves_nothing_of_before_between_tensors(tmp_path: Path) -> None:
    path = tmp_path / "part"
    write_part(part_of({"a": torch.ones(3), "b": torch.ones(5), "c": torch.ones(300_001)}), path)
    pool = BufferPool()
    used = pool.take_any(path.stat().st_size + 5000)
    used.memory[:] = b"\xff" * len(used.memory)
    pool.give(used)
    part = read_part(path, pool)
    assert part.buffer is used
    assert bytes(part.bytes().tolist()) == path.read_bytes()


def test_a_save_is_not_made_in_memory_that_a_worker_can_not_map() -> None:
    pool = BufferPool()
    pool.give(pool.take_any(5000))
    assert isinstance(pool.take(5000), SharedBuffer)
    assert pool.spare == 0


def test_an_index_with_places_outside_of_the_part_is_refused(tmp_path: Path) -> None:
    part = part_of({"a": torch.ones(3)})
    header = parse_header("a part", bytes(part.buffer.memory[:PAGE]))
    index = bytes(part.buffer.memory[PAGE : PAGE + header.hollow_bytes]) + encode_index([Row(0, 1 << 50, 0)])
    part.buffer.memory[PAGE : PAGE + len(index)] = index
    write_header(part.buffer.memory, msgspec.structs.replace(header, index_sum=checksum(index)))
    write_part(part, tmp_path / "part")
    with pytest.raises(CorruptCheckpointError, match="do not fit"):
        read_part(tmp_path / "part", BufferPool())


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000003_0_local.pt"
    with replacing(path), pytest.raises(SameMachineReplicationException, match="already exists"):
        write_part(part_of({"a": torch.ones(1)}), path)
    write_part(part_of({"a": torch.ones(1)}), path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_buffer_is_used_again_unless_it_is_far_too_large() -> None:
    pool = BufferPool()
    first = pool.take(10_000)
    pool.give(first)
    assert pool.take(9_000) is first
    assert pool.take(9_000) is not first
    pool.give(first)
    assert pool.take(100) is not first


def test_placeholders_keep_kind_shape_and_type() -> None:
    place = TensorPlaceholder.of(torch.ones(2, 3, dtype=torch.float16))
    assert (place.device.type, place.shape, place.dtype) == ("cpu", (2, 3), torch.float16)
    assert place.init_data().shape == (2, 3)


ROOM = Room(host="n1", device=5, where="/scratch", free=1000, in_memory=False, memory=10**9)


def test_what_the_ranks_of_a_node_need_together_must_fit() -> None:
    rooms = {0: ROOM, 1: ROOM, 2: replace(ROOM, host="n2")}
    own = {0: 500, 1: 500, 2: 1000}
    assert shortage(rooms, own, own) is None
    lack = shortage(rooms, own, own | {1: 501})
    assert lack == "/scratch on n1 has 1000 bytes free, the save needs 1001 bytes"


def test_memory_must_hold_what_is_saved_there() -> None:
    room = replace(ROOM, free=10**12, in_memory=True, memory=999)
    lack = shortage({0: room}, {0: 1000}, {0: 1000})
    assert lack == "n1 has 999 bytes of memory free, the save needs 1000 bytes"


def test_memory_must_hold_the_copies_from_others_until_they_are_written() -> None:
    room = replace(ROOM, free=10**12, memory=999)
    own, needed = {0: 1000, 1: 1000}, {0: 2000, 1: 2000}
    lack = shortage({0: room, 1: room}, own, needed)
    assert lack == "n1 has 999 bytes of memory free, the save needs 2000 bytes"
    kept = replace(room, spare=600)
    assert shortage({0: kept, 1: kept}, own, needed) is None


def test_the_room_in_memory_is_that_of_the_narrowest_control_group(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (cgroups / "job/step").mkdir(parents=True)
    assert available_memory(proc, cgroups) == 50 * 1024
    (cgroups / "job/step/memory.max").write_text("max\n")
    (cgroups / "job/memory.max").write_text("10000\n")
    (cgroups / "job/memory.current").write_text("4000\n")
    assert available_memory(proc, cgroups) == 6000
    (cgroups / "job/memory.current").write_text("10000\n")
    (cgroups / "job/memory.stat").write_text("anon 700\nfile 9300\nactive_file 2000\ninactive_file 7000\n")
    assert available_memory(proc, cgroups) == 9000  # what it has read from files does not stand in the way


def test_a_file_system_is_known_by_the_type_that_the_kernel_lists() -> None:
    assert file_system_type(Path("/proc")) == "proc"


def test_a_manager_works_in_a_single_process(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path / "new" / "root", "session", keep=2)
    for iteration in (1, 2, 3):
        manager.save(BasicTensorAwareStateDict({"a": torch.full((3,), float(iteration))}), iteration)
    names = [f"iter_000000{iteration}_0_local.pt" for iteration in (2, 3)]
    assert sorted(each.name for each in (tmp_path / "new/root/session/0").iterdir()) == names
    again = LocalCheckpointManager(tmp_path / "new" / "root", "session")
    assert again.find_latest() == 3
    state, ckpt_id = again.load()
    assert ckpt_id == (3, 0, "session")
    assert torch.equal(state.state_dict["a"], torch.full((3,), 3.0))
    assert LocalCheckpointManager(tmp_path / "new" / "root", "other").find_latest() == -1


@pytest.mark.parametrize("session", ["a/b", "..", "."])
def test_a_session_that_is_no_name_is_refused(tmp_path: Path, session: str) -> None:
    with pytest.raises(ValueError, match="can't be the name of a directory"):
        LocalCheckpointManager(tmp_path, session)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0").chmod(0o777)
    with pytest.raises(CheckpointingException, match="no directory of uid"):
        LocalCheckpointManager(tmp_path).find_latest()


class Unreachable(CliqueReplicationStrategy):
    """Its ranks can't exchange copies while ``is_down``."""

    is_down = False

    def __init__(self) -> None:
        pass

    def members(self) -> list[int]:
        return [0]

    def replicate_part(self, part: Part, pool: BufferPool) -> list[Part]:
        if self.is_down:
            raise OSError("nobody there")
        return [part]


def test_the_last_iteration_with_all_copies_stays_until_there_is_another(tmp_path: Path) -> None:
    strategy = Unreachable()
    manager = LocalCheckpointManager(tmp_path, repl_strategy=strategy)

    def save(iteration: int) -> list[int]:
        manager.save(BasicTensorAwareStateDict({"a": torch.ones(3)}), iteration)
        return sorted(int(path.name.split("_")[1]) for path in (tmp_path / "0").iterdir())

    assert save(1) == [1]
    strategy.is_down = True
    assert save(2) == [1, 2]
    assert save(3) == [1, 3]
    strategy.is_down = False
    assert save(4) == [4]


@pytest.mark.parametrize("name", ["session", "session/0"])
@pytest.mark.parametrize("how", ["link", "writable"])
def test_a_directory_that_another_user_could_exchange_is_refused(tmp_path: Path, name: str, how: str) -> None:
    manager = LocalCheckpointManager(tmp_path / "root", "session")
    manager.save(BasicTensorAwareStateDict({"a": torch.ones(3)}), 1)
    place = tmp_path / "root" / name
    if how == "link":
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.chmod(0o777)
    with pytest.raises(CheckpointingException, match=f"{name} is no directory of uid"):
        manager.save(BasicTensorAwareStateDict({"a": torch.ones(3)}), 2)
    with pytest.raises(CheckpointingException, match=f"{name} is no directory of uid"):
        LocalCheckpointManager(tmp_path / "root", "session").find_latest()
