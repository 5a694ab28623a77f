"""Copies from a GPU, without one: a device whose streams run as late, and in as bad an order, as they may."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from nvrx_slurm.checkpointing.async_ckpt import device_copy
from nvrx_slurm.checkpointing.async_ckpt.agreement import device_of
from nvrx_slurm.checkpointing.async_ckpt.arena import Arena
from nvrx_slurm.checkpointing.async_ckpt.snapshot import Snapshot, SnapshotMode
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import stage, verified
from nvrx_slurm.checkpointing.storage.layout import FileImage, Hole

SIZE = 4096


class Event:
    def __init__(self, machine: Machine, stream: Stream) -> None:
        self.machine, self.stream, self.is_done = machine, stream, False

    def synchronize(self) -> None:
        self.machine.run_until(self)


class Stream:
    """Work in order; nothing runs before somebody waits for it."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.machine, self.device = machine, device
        self.work: deque[Callable[[], bool]] = deque()

    def enqueue(self, action: Callable[[], object]) -> None:
        def run() -> bool:
            action()
            return True

        self.work.append(run)

    def record_event(self) -> Event:
        event = Event(self.machine, self)
        self.enqueue(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.is_done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def step(self) -> bool:
        """Whether something could be run."""
        if self.work and self.work[0]():
            self.work.popleft()
            return True
        return False


class Machine:
    """Stands for ``torch.cuda``; streams of training run before those of copies wherever they may."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current: dict[torch.device, Stream] = {}
        self.entered: list[Stream] = []
        self.registered: list[tuple[torch.device, int, int]] = []
        self.unregistered: list[int] = []
        self.on: torch.device | None = None
        self.answer = 0
        self.lock = threading.Lock()

    def new_stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        if device not in self.current:
            self.current[device] = Stream(self, device)
            self.streams.insert(0, self.current[device])
        return self.current[device]

    def run_until(self, event: Event) -> None:
        with self.lock:
            while not event.is_done:
                assert any(stream.step() for stream in self.streams), "streams wait for each other"

    def run_all(self) -> None:
        with self.lock:
            while any(stream.step() for stream in self.streams):
                pass

    # What is asked of torch.cuda, beside streams.

    class _Within:
        def __init__(self, enter: Callable[[], object], leave: Callable[[], object]) -> None:
            self._enter, self._leave = enter, leave

        def __enter__(self) -> None:
            self._enter()

        def __exit__(self, *_exception: object) -> None:
            self._leave()

    def stream(self, stream: Stream) -> Machine._Within:
        return self._Within(lambda: self.entered.append(stream), self.entered.pop)

    def device(self, device: torch.device) -> Machine._Within:
        return self._Within(lambda: setattr(self, "on", device), lambda: setattr(self, "on", None))

    def cudart(self) -> Machine:
        return self

    def cudaHostRegister(self, address: int, _size: int, flags: int) -> int:
        assert self.on is not None
        self.registered.append((self.on, address, flags))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device, from which copies are made when its streams come to them."""

    where: torch.device
    machine: Machine
    recorded: list[Stream]

    @property
    def device(self) -> torch.device:
        return self.where

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        source = args[1] if len(args) > 1 else args[0]
        if func is torch.Tensor.copy_ and isinstance(source, OnDevice):
            assert (kwargs or {})["non_blocking"]
            plain, target, machine = source.as_subclass(torch.Tensor), args[0], source.machine
            stream = machine.entered[-1] if machine.entered else machine.current_stream(source.where)
            assert stream.device == source.where
            stream.enqueue(lambda: target.copy_(plain.reshape(target.shape)))
            return target
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if isinstance(found, OnDevice):
            for name in ("where", "machine", "recorded"):
                setattr(found, name, getattr(args[0], name))
        return found


class Storage:
    """Of a tensor on a device."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.device, self.machine = device, machine
        self.content = torch.zeros(SIZE, dtype=torch.uint8)
        self.recorded: list[Stream] = []
        self._cdata = id(self)

    def nbytes(self) -> int:
        return SIZE


def on_device(content: torch.Tensor, device: torch.device, machine: Machine, recorded: list[Stream]) -> Any:
    tensor = content.as_subclass(OnDevice)
    tensor.where, tensor.machine, tensor.recorded = device, machine, recorded
    return tensor


class Told:
    def __init__(self) -> None:
        self.ends: list[Exception | None] = []
        self.over = threading.Event()

    def advanced(self, up_to: int) -> None:
        assert not up_to, "nothing is there before the device has copied it"

    def ended(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.over.set()


DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


def check(answer: int) -> None:
    if answer:
        raise RuntimeError("out of memory")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    for name in ("current_stream", "stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(machine, name))
    monkeypatch.setattr(torch.cuda, "Stream", machine.new_stream)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(device_copy, "_streams", {})
    monkeypatch.setattr(device_copy, "_pinned", set())
    monkeypatch.setattr(
        device_copy, "bytes_of", lambda s: on_device(s.content, s.device, s.machine, s.recorded)
    )
    return machine


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("gloo", "cpu"),
        ("undefined", "cpu"),
        ("nccl", "cuda:3"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda:3"),
        ("xccl", "cuda:3"),
    ],
)
def test_ranks_agree_in_host_memory_where_their_group_can_do_that(
    monkeypatch: pytest.MonkeyPatch, backend: str, device: str
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _group: backend)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert str(device_of()) == device


@pytest.fixture
def storages(machine: Machine) -> list[Storage]:
    return [Storage(machine, device) for device in DEVICES]


def image_of(storages: list[Storage]) -> FileImage:
    holes = tuple(Hole(number * SIZE, storage) for number, storage in enumerate(storages))
    return FileImage(len(storages) * SIZE, (), holes, None)


def fill(machine: Machine, storages: list[Storage], value: int) -> None:
    """Queue what training does with the tensors."""
    for storage in storages:
        machine.current_stream(storage.device).enqueue(
            lambda content=storage.content: content.fill_(value)  # type: ignore[misc]
        )


def in_arena(arena: Arena) -> list[list[int]]:
    return [arena.as_tensor(n * SIZE, SIZE).unique().tolist() for n in range(len(DEVICES))]


def test_strict_it_has_what_was_queued_before_the_call_when_that_returns(
    machine: Machine, storages: list[Storage]
) -> None:
    arena, told = Arena(2 * SIZE), Told()
    fill(machine, storages, 1)
    Snapshot(arena, [(0, image_of(storages))], SnapshotMode.STRICT, told)
    assert in_arena(arena) == [[1], [1]]
    assert told.ends == [None]


def test_overlapped_a_step_is_queued_behind_the_copies_and_nobody_waits(
    machine: Machine, storages: list[Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.snapshot._Copier.take", lambda _snapshot: None)
    arena, told = Arena(2 * SIZE), Told()
    fill(machine, storages, 1)
    snapshot = Snapshot(arena, [(0, image_of(storages))], SnapshotMode.OVERLAPPED, told)
    fill(machine, storages, 1)  # a forward pass: it changes nothing, and waits for no copy
    snapshot.guard()
    fill(machine, storages, 2)  # optimizer.step
    assert in_arena(arena) == [[0], [0]]  # the device has not begun
    assert told.ends == []
    snapshot.work()
    assert in_arena(arena) == [[1], [1]]
    assert told.ends == [None]
    machine.run_all()
    assert [storage.content.unique().tolist() for storage in storages] == [[2], [2]]
    assert in_arena(arena) == [[1], [1]]


def test_this_device_shows_what_a_missing_guard_does(
    machine: Machine, storages: list[Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.snapshot._Copier.take", lambda _snapshot: None)
    arena = Arena(2 * SIZE)
    fill(machine, storages, 1)
    snapshot = Snapshot(arena, [(0, image_of(storages))], SnapshotMode.OVERLAPPED, Told())
    fill(machine, storages, 2)
    snapshot.work()
    assert in_arena(arena) == [[2], [2]]


def test_in_the_background_the_copier_waits_for_the_devices(
    machine: Machine, storages: list[Storage]
) -> None:
    arena, told = Arena(2 * SIZE), Told()
    fill(machine, storages, 3)
    Snapshot(arena, [(0, image_of(storages))], SnapshotMode.OVERLAPPED, told)
    assert told.over.wait(60)
    assert told.ends == [None]
    assert in_arena(arena) == [[3], [3]]


def test_freed_memory_is_given_to_others_after_the_copy_and_a_device_has_one_stream(
    machine: Machine, storages: list[Storage]
) -> None:
    for _ in range(3):
        Snapshot(Arena(2 * SIZE), [(0, image_of(storages))], SnapshotMode.STRICT, Told())
    for storage in storages:
        assert {stream.device for stream in storage.recorded} == {storage.device}
        assert len(set(map(id, storage.recorded))) == 1
        assert storage.recorded[0] is not machine.current_stream(storage.device)


def test_an_arena_is_pinned_once_for_all_devices_and_until_it_is_gone(
    machine: Machine, storages: list[Storage]
) -> None:
    arena = Arena(2 * SIZE)
    for _ in range(2):
        Snapshot(arena, [(0, image_of(storages))], SnapshotMode.STRICT, Told())
    assert machine.registered == [(DEVICES[0], arena.address, 1)]  # cudaHostRegisterPortable
    address = arena.address
    assert machine.unregistered == []
    del arena
    assert machine.unregistered == [address]


def test_what_can_not_be_pinned_is_an_error_each_time(machine: Machine, storages: list[Storage]) -> None:
    machine.answer = 2
    arena = Arena(2 * SIZE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            Snapshot(arena, [(0, image_of(storages))], SnapshotMode.STRICT, Told())


class State(BasicTensorAwareStateDict):
    given: ClassVar[list[Any]] = []

    @property
    def tensors(self) -> Any:
        return map(as_it_is, self.given)

    def pop_tensors(self) -> list[torch.Tensor]:
        return []

    def insert_tensors(self, tensor_data: object) -> None:
        pass


def test_a_local_save_copies_from_a_device_before_it_goes_on(  # C.2.12
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        waited.append(device)
        machine.run_until(machine.current_stream(device).record_event())

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    contents = [torch.zeros(3, 5), torch.zeros(7)]
    tensors = [on_device(c, d, machine, []) for c, d in zip(contents, DEVICES, strict=True)]
    for content, device in zip(contents, DEVICES, strict=True):
        machine.current_stream(device).enqueue(lambda content=content: content.fill_(4))  # type: ignore[misc]

    monkeypatch.setattr(State, "given", tensors)
    part = stage(State({"step": 1}), CkptID(1, 0, ""), BufferPool()).seal(1, "x")
    verified(part.buffer, "it")  # its checksums are those of what was copied, too
    assert sorted(map(str, waited)) == ["cuda:0", "cuda:1"]
    assert part.buffer.memory[:].count(torch.full((1,), 4.0).numpy().tobytes()) >= 22


def as_it_is(tensor: Any) -> Any:
    """Without what ``detach`` would make of it."""
    tensor.detach = lambda: tensor
    return tensor
