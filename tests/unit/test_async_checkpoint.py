"""Saves in the background: exact, whole or absent, and never a hang."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_storage import same, state

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt import copying, snapshot, worker, worker_process
from nvrx_slurm.checkpointing.async_ckpt.arena import Arena, ArenaPool, OutOfMemoryError
from nvrx_slurm.checkpointing.async_ckpt.core import (
    AsyncCallsQueue,
    AsyncRequest,
    AsyncSaveError,
    SnapshotMode,
    WhenFull,
    abort_nvrx_checkpoint,
    ensure_snapshotted,
)
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from nvrx_slurm.checkpointing.async_ckpt.worker import patiently
from nvrx_slurm.checkpointing.storage.filling import Filling
from nvrx_slurm.checkpointing.storage.image import ImageSpec
from nvrx_slurm.checkpointing.storage.pace import Pace
from nvrx_slurm.linux import process_state

MANY = 16
SIZE = 400_000  # 1.5 MiB: copied while training goes on


@pytest.fixture(scope="module")
def queue() -> Iterator[AsyncCallsQueue]:
    """One worker for all tests that leave it whole."""
    queue = AsyncCallsQueue()
    yield queue
    queue.close()


@pytest.fixture
def checkpoint(queue: AsyncCallsQueue) -> TorchAsyncCheckpoint:
    checkpoint = TorchAsyncCheckpoint()
    checkpoint._queue = queue
    return checkpoint


class Special(torch.Tensor):
    pass


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


def write_sum(path: Path, tensors: list[torch.Tensor], *, scale: int = 1) -> None:
    path.write_text(str(scale * sum(tensor.sum().item() for tensor in tensors)))


def write_own_priority(path: Path) -> None:
    number = {"x86_64": 252, "aarch64": 31}[platform.machine()]  # ioprio_get(2)
    io = ctypes.CDLL(None).syscall(number, 1, 0) >> 13
    path.write_text(f"{os.nice(0)} {io} {os.sched_getaffinity(0)}")


def wait_for(go: Path, _tensor: torch.Tensor) -> None:
    while not go.exists():
        time.sleep(0.005)


def fail(_path: Path) -> None:
    raise ArithmeticError("no such luck")


def die(_path: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def worker_of(queue: AsyncCallsQueue) -> int:
    return int(queue._caller._current.pid)  # type: ignore[union-attr]


class TestSnapshot:
    @pytest.mark.parametrize("persistent", [True, False])
    def test_strict_what_changes_after_the_call_is_not_in_the_checkpoint(
        self, tmp_path: Path, persistent: bool
    ) -> None:
        checkpoint = TorchAsyncCheckpoint(persistent, snapshot_mode=SnapshotMode.STRICT)
        tensors = {str(i): torch.full((SIZE,), float(i)) for i in range(MANY)}
        for save in range(3):
            checkpoint.async_save(tensors, tmp_path / f"{save}.pt")
            for tensor in tensors.values():
                tensor += 100  # at once, and on all of it
        checkpoint.close()
        for save in range(3):
            loaded = torch.load(tmp_path / f"{save}.pt", weights_only=True)
            assert [set(loaded[str(i)].tolist()) for i in range(MANY)] == [
                {i + 100 * save} for i in range(MANY)
            ]

    def test_tiny_tensors_for_which_there_is_no_room_among_those_copied_at_once_are_saved(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(snapshot, "_SMALL_IN_ALL", 1 << 10)
        state = {"full": torch.zeros(1 << 8), "step": torch.tensor(3.0), "flags": torch.ones(63).bool()}
        checkpoint.async_save(state, tmp_path / "c.pt")
        checkpoint.finalize_async_save(blocking=True)
        assert same(storage.load(tmp_path / "c.pt"), state)

    def test_overlapped_an_optimizer_step_waits_until_its_parameters_are_copied(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        parameters = [torch.nn.Parameter(torch.full((SIZE,), float(i))) for i in range(MANY)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        expected = []
        for save in range(4):
            content = {"parameters": parameters, "optimizer": optimizer.state_dict()}
            expected.append(torch.save(content, tmp_path / f"expected{save}.pt"))
            checkpoint.async_save(content, tmp_path / f"{save}.pt")
            for parameter in parameters:
                parameter.grad = torch.ones(SIZE)
            optimizer.step()
        checkpoint.finalize_async_save(blocking=True)
        for save in range(4):
            want, have = (torch.load(tmp_path / f"{name}{save}.pt") for name in ("expected", ""))
            assert all(map(torch.equal, want["parameters"], have["parameters"]))
            assert same(want["optimizer"]["param_groups"], have["optimizer"]["param_groups"])
            for index, moments in want["optimizer"]["state"].items():
                assert all(torch.equal(moments[k], have["optimizer"]["state"][index][k]) for k in moments)

    def test_overlapped_ensure_snapshotted_makes_any_other_change_safe(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        tensors = [torch.zeros(SIZE) for _ in range(MANY)]
        checkpoint.async_save(tensors, tmp_path / "a.pt")
        ensure_snapshotted()
        for tensor in tensors:
            tensor.data.fill_(1)  # torch does not count this
        checkpoint.finalize_async_save(blocking=True)
        assert not any(tensor.any() for tensor in torch.load(tmp_path / "a.pt"))

    def test_overlapped_a_tensor_changed_too_early_fails_the_save_rather_than_lie(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = threading.Lock()
        monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", held_copy(held))
        tensors = [torch.zeros(SIZE) for _ in range(MANY)]
        with held:
            checkpoint.async_save(tensors, tmp_path / "a.pt")
            tensors[3] += 1
        with pytest.raises(AsyncSaveError, match=r"400000, torch.float32.*ensure_snapshotted"):
            checkpoint.finalize_async_save(blocking=True)
        assert not (tmp_path / "a.pt").exists()

    @pytest.mark.parametrize("how", ["data", "numpy", "inference", "resized"])
    def test_overlapped_so_does_a_change_that_torch_does_not_count(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        held = threading.Lock()
        monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", held_copy(held))
        with torch.inference_mode(how == "inference"):
            tensors = [torch.zeros(SIZE) for _ in range(MANY)]
        with held:
            checkpoint.async_save(tensors, tmp_path / "a.pt")
            last = tensors[-1]
            if how == "data":
                last.data += 1
            elif how == "numpy":
                last.numpy()[-1:] += 1
            elif how == "inference":
                with torch.inference_mode():
                    last += 1
            else:
                last.resize_(2 * SIZE)
        with pytest.raises(AsyncSaveError, match=r"(changed|resized).*ensure_snapshotted"):
            checkpoint.finalize_async_save(blocking=True)
        assert not (tmp_path / "a.pt").exists()
        checkpoint.async_save([torch.ones(SIZE)], tmp_path / "a.pt")  # and training goes on
        checkpoint.finalize_async_save(blocking=True)
        assert torch.load(tmp_path / "a.pt")[0].all()

    def test_overlapped_a_copy_that_fails_fails_the_save_and_keeps_nobody_waiting(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_arguments: Any) -> None:
            raise RuntimeError("no such memory")

        with monkeypatch.context() as patched:
            patched.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", broken)
            checkpoint.async_save([torch.zeros(SIZE)] * MANY, tmp_path / "a.pt")
            assert checkpoint._queue._pending[0].ticket.wait(60)
            with pytest.raises(AsyncSaveError, match="no such memory"):
                checkpoint.finalize_async_save()
        checkpoint.async_save([torch.zeros(SIZE)], tmp_path / "a.pt")
        checkpoint.finalize_async_save(blocking=True)

    def test_overlapped_small_tensors_such_as_running_statistics_are_copied_at_once(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        norm = torch.nn.BatchNorm1d(8)
        checkpoint.async_save({"large": torch.zeros(SIZE), "norm": norm.state_dict()}, tmp_path / "a.pt")
        ensure_snapshotted()
        norm(torch.randn(4, 8) + 50)
        checkpoint.finalize_async_save(blocking=True)
        assert not torch.load(tmp_path / "a.pt")["norm"]["running_mean"].any()

    def test_every_kind_of_tensor_and_object_is_saved_as_torch_saves_it(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        saved = state()
        checkpoint.async_save(saved, tmp_path / "a.pt")
        checkpoint.finalize_async_save(blocking=True)
        large = saved.pop("large")
        loaded = torch.load(tmp_path / "a.pt", weights_only=True)
        assert torch.equal(loaded.pop("large"), large)
        assert same(saved, loaded)
        assert storage.verify_file(tmp_path / "a.pt") is storage.Verification.INTACT

    def test_a_subclass_of_tensor_is_saved_as_itself(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        checkpoint.async_save({"a": torch.arange(4.0).as_subclass(Special)}, tmp_path / "a.pt")
        checkpoint.finalize_async_save(blocking=True)
        loaded = storage.load(tmp_path / "a.pt", weights_only=False)["a"]
        assert type(loaded) is Special
        assert loaded.sum() == 6

    def test_memory_is_allocated_once_and_the_users_tensors_are_left_alone(self, tmp_path: Path) -> None:
        tensors = [torch.zeros(SIZE) for _ in range(64)]
        checkpoint = TorchAsyncCheckpoint()
        checkpoint.async_save(tensors, tmp_path / "a.pt")
        checkpoint.finalize_async_save(blocking=True)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            checkpoint.async_save(tensors, tmp_path / "a.pt")
            checkpoint.finalize_async_save(blocking=True)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not any(tensor.is_shared() for tensor in tensors)
        checkpoint.close()


def held_copy(held: threading.Lock) -> Callable[..., None]:
    """What copies memory, but for the copier not while the lock is held by the test."""
    real = copying.copy

    def copy(*arguments: Any) -> None:
        with held if threading.current_thread().name == "nvrx-copier" else contextlib.nullcontext():
            real(*arguments)

    return copy


class TestQueue:
    def test_saves_are_finalized_in_order_with_their_own_indices(
        self, tmp_path: Path, queue: AsyncCallsQueue
    ) -> None:
        order: list[int] = []
        first = queue._last_index + 1
        for i in range(3):
            request = AsyncRequest(write_text, (tmp_path / str(i), f"text {i}"), [partial(order.append, i)])
            assert queue.schedule_async_request(request) == first + i
        assert queue.get_num_unfinalized_calls() == 3
        assert queue.maybe_finalize_async_calls(blocking=True) == [first, first + 1, first + 2]
        assert order == [0, 1, 2]
        assert [(tmp_path / str(i)).read_text() for i in range(3)] == ["text 0", "text 1", "text 2"]

    def test_tensors_in_any_call_are_taken_as_they_were(self, tmp_path: Path, queue: AsyncCallsQueue) -> None:
        tensors = [torch.ones(SIZE), torch.ones(3)]
        request = AsyncRequest(write_sum, (tmp_path / "sum", tensors), [], {"scale": 2})
        queue.schedule_async_request(request)
        ensure_snapshotted()
        tensors[0].zero_()
        queue.maybe_finalize_async_calls(blocking=True)
        assert (tmp_path / "sum").read_text() == str(2.0 * (SIZE + 3))

    def test_what_preload_returns_becomes_the_second_argument(
        self, tmp_path: Path, queue: AsyncCallsQueue
    ) -> None:
        request = AsyncRequest(write_text, [tmp_path / "a", None], [], preload_fn=partial(str, 42))
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
        assert (tmp_path / "a").read_text() == "42"

    def test_a_request_without_function_is_finalized_all_the_same(self, queue: AsyncCallsQueue) -> None:
        called: list[bool] = []
        queue.schedule_async_request(AsyncRequest(None, (), [lambda: called.append(True)]))
        queue.maybe_finalize_async_calls()
        assert called == [True]

    def test_a_scheduled_request_takes_no_more_finalizers(self) -> None:
        request = AsyncRequest(None, (), [])
        request.add_finalize_fn(int)
        with pytest.raises(RuntimeError, match="scheduled"):
            request.freeze().add_finalize_fn(int)

    def test_done_synchronously_it_needs_no_process_group(self, tmp_path: Path) -> None:
        called: list[bool] = []
        AsyncRequest(write_text, (tmp_path / "a", "x"), [lambda: called.append(True)]).execute_sync()
        assert called == [True]
        assert (tmp_path / "a").read_text() == "x"

    def test_a_warmed_up_worker_is_taken_by_the_first_queue(self, tmp_path: Path) -> None:
        AsyncCallsQueue.warmup_persistent_caller(0)
        warm = AsyncCallsQueue._warm._current.pid  # type: ignore[union-attr]
        checkpoint = TorchAsyncCheckpoint()
        checkpoint.async_save({}, tmp_path / "a")
        assert worker_of(checkpoint._queue) == warm
        checkpoint.close()

    @pytest.mark.parametrize("keywords", [{"cpu_priority": 20}, {"io_priority": 4}])
    def test_a_priority_that_there_is_not_is_refused(self, keywords: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="is accepted"):
            AsyncCallsQueue(**keywords)  # type: ignore[arg-type]


class TestFaults:
    """Each is an error at the next finalize; then training goes on and saves again."""

    def saves_again(self, checkpoint: TorchAsyncCheckpoint, path: Path) -> bool:
        checkpoint.async_save({"a": torch.ones(2)}, path)
        checkpoint.finalize_async_save(blocking=True)
        return bool(torch.load(path)["a"].sum() == 2)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (fail, "ArithmeticError: no such luck"),
            (die, "killed by SIGKILL before the checkpoint was written"),
            (lambda _path: None, "pickle"),
        ],
        ids=["exception", "killed worker", "unpicklable"],
    )
    def test_a_call_that_goes_wrong(
        self,
        tmp_path: Path,
        checkpoint: TorchAsyncCheckpoint,
        function: Callable[[Path], None],
        message: str,
    ) -> None:
        finalized: list[bool] = []
        request = AsyncRequest(function, (tmp_path / "a",), [lambda: finalized.append(True)])
        checkpoint._queue.schedule_async_request(request)
        with pytest.raises(AsyncSaveError, match=message):
            checkpoint.finalize_async_save(blocking=True)
        assert finalized == []
        assert checkpoint._queue.get_num_unfinalized_calls() == 0
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_an_object_that_cannot_be_pickled(self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint) -> None:
        checkpoint.async_save({"lock": threading.Lock()}, tmp_path / "a")
        with pytest.raises(AsyncSaveError, match="lock"):
            checkpoint.finalize_async_save(blocking=True)
        assert list(tmp_path.iterdir()) == []
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_a_worker_that_the_kernel_holds_is_given_up(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_process, "LOOK_S", 0.05)
        monkeypatch.setattr(worker_process, "STALL_S", 0.2)
        assert self.saves_again(checkpoint, tmp_path / "a")
        worker = checkpoint._queue._caller._current  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGSTOP)
        checkpoint.async_save({"a": torch.ones(2)}, tmp_path / "b")
        with pytest.raises(AsyncSaveError, match=r"held by the kernel for .*threads in state T"):
            checkpoint.finalize_async_save(blocking=True)
        assert ended(worker.pid)
        assert self.saves_again(checkpoint, tmp_path / "c")

    def test_a_worker_that_dies_while_it_is_idle_is_replaced(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        assert self.saves_again(checkpoint, tmp_path / "a")
        worker = checkpoint._queue._caller._current  # type: ignore[union-attr]
        os.kill(worker.pid, signal.SIGKILL)
        worker._reader.join(100)
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_a_worker_that_dies_during_the_copy_leaves_the_memory_to_the_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        held = threading.Lock()
        monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.copying.copy", held_copy(held))
        checkpoint = TorchAsyncCheckpoint()
        with held:
            checkpoint.async_save([torch.zeros(SIZE) for _ in range(MANY)], tmp_path / "a.pt")
            worker = checkpoint._queue._caller._current  # type: ignore[union-attr]
            os.kill(worker.pid, signal.SIGKILL)
            worker._reader.join(100)
            assert len(checkpoint._queue._pool._in_use) == 1
        with pytest.raises(AsyncSaveError, match="SIGKILL"):
            checkpoint.finalize_async_save(blocking=True)
        assert checkpoint._queue._pool._in_use == []
        assert list(tmp_path.iterdir()) == []
        assert self.saves_again(checkpoint, tmp_path / "b")
        checkpoint.close()

    def test_a_worker_for_one_save_tells_as_well_what_went_wrong(
        self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint
    ) -> None:
        single = TorchAsyncCheckpoint(persistent_queue=False)
        single.async_save({}, tmp_path / "missing" / "a")
        single._queue.schedule_async_request(AsyncRequest(die, (tmp_path,), []))
        for message in ("No such file or directory", "killed by SIGKILL"):
            with pytest.raises(AsyncSaveError, match=message):
                single.finalize_async_save(blocking=True)
        assert self.saves_again(single, tmp_path / "b")
        assert self.saves_again(checkpoint, tmp_path / "c")  # another one of the same process
        single.close()

    def test_a_missing_directory(self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint) -> None:
        checkpoint.async_save({}, tmp_path / "missing" / "a")
        with pytest.raises(AsyncSaveError, match="No such file or directory"):
            checkpoint.finalize_async_save(blocking=True)
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_a_directory_that_takes_no_files(self, checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
        checkpoint.async_save({}, Path("/proc/a.pt"))  # read-only even for root
        with pytest.raises(AsyncSaveError, match=r"Error: \[Errno"):
            checkpoint.finalize_async_save(blocking=True)
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_a_path_that_is_no_text(self, tmp_path: Path, checkpoint: TorchAsyncCheckpoint) -> None:
        checkpoint.async_save({}, tmp_path / os.fsdecode(b"\xff.pt"))
        with pytest.raises(AsyncSaveError, match="UnicodeEncodeError"):
            checkpoint.finalize_async_save(blocking=True)
        assert self.saves_again(checkpoint, tmp_path / "b")

    def test_an_open_file_is_refused_at_the_call(self, checkpoint: TorchAsyncCheckpoint) -> None:
        with pytest.raises(TypeError, match="takes a path"):
            checkpoint.async_save({}, sys.stdout)  # type: ignore[arg-type]

    def test_an_aborted_save_is_forgotten_with_its_finalizers(self, tmp_path: Path) -> None:
        queue = AsyncCallsQueue()
        finalized: list[bool] = []
        queue.schedule_async_request(
            AsyncRequest(write_text, (tmp_path / "a", "x"), [lambda: finalized.append(True)])
        )
        worker = worker_of(queue)
        abort_nvrx_checkpoint()
        assert queue.get_num_unfinalized_calls() == 0
        assert queue.maybe_finalize_async_calls(blocking=True) == []
        assert finalized == []
        assert not Path(f"/proc/{worker}").exists()
        assert queue.schedule_async_request(AsyncRequest(write_text, (tmp_path / "b", "y"), [])) == 0
        queue.close()
        assert (tmp_path / "b").read_text() == "y"

    def test_close_after_the_workers_death_does_not_hang(self, tmp_path: Path) -> None:
        queue = AsyncCallsQueue()
        queue.schedule_async_request(AsyncRequest(die, (tmp_path,), []))
        with pytest.raises(AsyncSaveError, match="SIGKILL"):
            queue.close()
        queue.close()


def ended(pid: int) -> bool:
    """Wait until a process that is not ours has ended, though nobody may have reaped it."""
    deadline = time.monotonic() + 20
    while process_state(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.01)
    return process_state(pid) in ("", "Z")


class TestTrainerEnds:
    def test_killed_after_a_save_was_copied_the_worker_still_writes_it_and_ends(self, tmp_path: Path) -> None:
        program = (
            "import os, signal, sys, torch\n"
            "from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint\n"
            "checkpoint = TorchAsyncCheckpoint()\n"
            "checkpoint.async_save({'a': torch.ones(1000)}, sys.argv[1])\n"
            "checkpoint.ensure_snapshotted()\n"
            "print(checkpoint._queue._caller._current.pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "a.pt"], stdout=subprocess.PIPE, text=True, timeout=250
        )
        assert done.returncode == -signal.SIGKILL
        # The worker has inherited standard output, so run() has waited for its end, or nearly.
        assert ended(int(done.stdout))
        assert torch.load(tmp_path / "a.pt")["a"].sum() == 1000

    @pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
    def test_a_program_that_ends_without_waiting_still_has_its_last_save(
        self, tmp_path: Path, end: str
    ) -> None:
        program = (
            "import sys, torch\n"
            "from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint\n"
            "TorchAsyncCheckpoint().async_save({'a': torch.ones(10 << 20)}, sys.argv[1])\n"
            f"{end}"
        )
        subprocess.run(
            [sys.executable, "-c", program, tmp_path / "a.pt"], capture_output=True, timeout=250, check=False
        )  # returns when the worker has ended, which has inherited standard output
        assert torch.load(tmp_path / "a.pt")["a"].sum() == 10 << 20

    def test_killed_during_the_copy_nothing_is_left_and_the_worker_ends(self, tmp_path: Path) -> None:
        program = (
            "import ctypes, os, signal, sys, threading, torch\n"
            "from nvrx_slurm.checkpointing.async_ckpt import snapshot, torch_ckpt\n"
            "held, real = threading.Event(), snapshot.Snapshot._copy\n"
            "def copy(self, pieces):\n"
            "    if pieces[-1].target > 20 << 20: held.set(); threading.Event().wait()\n"
            "    real(self, pieces)\n"
            "snapshot.Snapshot._copy = copy\n"
            "checkpoint = torch_ckpt.TorchAsyncCheckpoint()\n"
            "checkpoint.async_save({'a': torch.ones(10 << 20)}, sys.argv[1])\n"
            "held.wait()\n"
            "print(checkpoint._queue._caller._current.pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "a.pt"], stdout=subprocess.PIPE, text=True, timeout=250
        )
        assert done.returncode == -signal.SIGKILL
        assert ended(int(done.stdout))
        assert list(tmp_path.iterdir()) == []


class TestWriting:
    def test_a_passing_error_is_tried_again_after_a_growing_while(self) -> None:
        errors = iter([errno.EIO, errno.ESTALE])
        waits: list[float] = []

        def write() -> None:
            for number in errors:
                raise OSError(number, os.strerror(number))

        patiently(write, waits.append)
        assert waits == [1.0, 4.0]

    @pytest.mark.parametrize("number", [errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR, None])
    def test_so_is_each_that_a_busy_store_may_answer(self, number: int | None) -> None:
        answers = iter([ConnectionResetError("reset") if number is None else OSError(number, "once")])
        waits: list[float] = []

        def write() -> None:
            for error in answers:
                raise error

        patiently(write, waits.append)
        assert waits == [1.0]

    @pytest.mark.parametrize(
        ("number", "tries"),
        [(errno.EIO, 4), (errno.EBUSY, 4), (errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EROFS, 1)],
    )
    def test_a_lasting_error_is_raised_a_full_disk_at_once(self, number: int, tries: int) -> None:
        tried: list[int] = []

        def write() -> None:
            tried.append(number)
            raise OSError(number, os.strerror(number))

        with pytest.raises(OSError, match=os.strerror(number)):
            patiently(write, lambda _seconds: None)
        assert len(tried) == tries

    def test_the_files_of_one_save_are_written_at_the_same_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        together = threading.Barrier(2)
        monkeypatch.setattr(worker, "write_image", lambda *_arguments, **_how: together.wait(100))
        specs = tuple(ImageSpec(str(tmp_path / name), 0, 1, (), None) for name in "ab")
        ours, theirs = socket.socketpair()
        with ours, theirs, mmap.mmap(-1, 4096) as memory:
            worker._Worker(ours, os.getpid(), None)._write(specs, memory, Filling.complete())
        assert not together.broken

    def test_writers_of_all_threads_together_keep_to_the_limit(self) -> None:
        now, waits = 0.0, []
        pace = Pace(1000, clock=lambda: now, wait=waits.append)
        for _ in range(3):
            pace(500)
        now = 10.0
        pace(1)
        assert waits == [0.5, 1.0]


class TestPlacesThatTakeNoFile:
    """Errors of one line that name the file or directory as the program did."""

    def error(self, checkpoint: TorchAsyncCheckpoint, path: Path) -> str:
        checkpoint.async_save({"w": torch.ones(3)}, path)
        with pytest.raises(AsyncSaveError) as raised:
            checkpoint.finalize_async_save(blocking=True)
        return str(raised.value)

    def test_a_directory_that_is_not_there(self, checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
        error = self.error(checkpoint, tmp_path / "absent" / "a.pt")
        assert error.endswith(f"No such file or directory: '{tmp_path}/absent'")

    def test_a_file_in_the_place_of_the_directory(
        self, checkpoint: TorchAsyncCheckpoint, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        error = self.error(checkpoint, tmp_path / "file" / "a.pt")
        assert error.endswith(f"Not a directory: '{tmp_path}/file/a.pt'")

    def test_a_directory_in_the_place_of_the_file(
        self, checkpoint: TorchAsyncCheckpoint, tmp_path: Path
    ) -> None:
        error = self.error(checkpoint, tmp_path)
        assert error.endswith(f"it is a directory, not a file: '{tmp_path}'")

    def test_what_is_no_file_stays(self, checkpoint: TorchAsyncCheckpoint, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        error = self.error(checkpoint, tmp_path / "fifo")
        assert error.endswith(f"it is not a regular file: '{tmp_path}/fifo'")
        assert (tmp_path / "fifo").is_fifo()


class TestPriority:
    def test_the_worker_has_the_niceness_class_and_cores_that_were_asked_for(self, tmp_path: Path) -> None:
        core = min(os.sched_getaffinity(0))
        queue = AsyncCallsQueue(cpu_priority=15, io_priority=3, cpu_affinity=[core], max_bytes_per_s=1 << 30)
        queue.schedule_async_request(AsyncRequest(write_own_priority, (tmp_path / "a",), []))
        queue.close()
        assert (tmp_path / "a").read_text() == f"15 3 {{{core}}}"

    @pytest.mark.parametrize(
        "keywords", [{"cpu_affinity": [-1]}, {"max_bytes_per_s": 0}, {"max_inflight_bytes": -1}]
    )
    def test_what_there_is_not_is_refused(self, keywords: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="accepted"):
            AsyncCallsQueue(**keywords)

    @pytest.mark.parametrize(
        "keywords",
        [
            {"snapshot_mode": "strict"},
            {"when_full": "skip"},
            {"max_inflight_bytes": "1G"},
            {"max_bytes_per_s": "1G"},
            {"cpu_priority": "low"},
            {"io_priority": "idle"},
            {"cpu_affinity": "0-1"},
        ],
    )
    def test_a_value_of_another_type_is_refused_with_what_is_accepted(self, keywords: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match=f"{next(iter(keywords))} is .* accepted"):
            AsyncCallsQueue(**keywords)


class TestNoRoom:
    """A storage that can't keep up: what is being written takes all the room that there may be."""

    @pytest.fixture
    def told(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
        told: list[tuple[int, str]] = []

        class Journal:
            def report_checkpoint_held_up(self, save: int, why: str) -> None:
                told.append((save, why))

        monkeypatch.setattr("nvrx_slurm.checkpointing.async_ckpt.core.job_journal", Journal)
        return told

    def full(self, go: Path, when_full: WhenFull) -> AsyncCallsQueue:
        queue = AsyncCallsQueue(max_inflight_bytes=20 << 20, when_full=when_full)
        queue.schedule_async_request(AsyncRequest(wait_for, (go, torch.zeros(SIZE)), []))
        return queue

    def test_skip_there_is_no_such_save_and_its_finalizers_are_not_run(
        self, tmp_path: Path, told: list[tuple[int, str]]
    ) -> None:
        queue = self.full(tmp_path / "go", WhenFull.SKIP)
        finalized: list[int] = []
        skipped = AsyncRequest(
            write_sum, (tmp_path / "a", [torch.ones(SIZE)]), [partial(finalized.append, 1)]
        )
        assert queue.schedule_async_request(skipped) == 1
        (tmp_path / "go").touch()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert finalized == []
        assert not (tmp_path / "a").exists()
        assert told == [(1, "skipped: no room for another snapshot beside 1 that are being written")]
        assert queue.schedule_async_request(skipped) == 2
        queue.close()
        assert finalized == [1]

    def test_fail_it_is_an_error_at_the_next_finalize(
        self, tmp_path: Path, told: list[tuple[int, str]]
    ) -> None:
        queue = self.full(tmp_path / "go", WhenFull.FAIL)
        queue.schedule_async_request(AsyncRequest(write_sum, (tmp_path / "a", [torch.ones(SIZE)]), []))
        (tmp_path / "go").touch()
        with pytest.raises(AsyncSaveError, match="save 1 failed on this rank: no room for another snapshot"):
            queue.maybe_finalize_async_calls(blocking=True)
        assert told[0][1].startswith("failed: no room")
        queue.close()

    def test_wait_training_goes_on_when_there_is_room(
        self, tmp_path: Path, told: list[tuple[int, str]]
    ) -> None:
        queue = self.full(tmp_path / "go", WhenFull.WAIT)
        threading.Timer(0.2, (tmp_path / "go").touch).start()
        queue.schedule_async_request(AsyncRequest(write_sum, (tmp_path / "a", [torch.ones(SIZE)]), []))
        assert (tmp_path / "go").exists()
        assert told[0][0] == 1
        assert told[0][1].startswith("waited ")
        queue.close()
        assert (tmp_path / "a").read_text() == str(float(SIZE))


class TestArenaPool:
    def test_prepared_memory_is_what_the_first_snapshot_gets(self) -> None:
        pool = ArenaPool()
        pool.prepare(100)
        (arena,) = pool._free
        assert pool.acquire(50) is arena

    def test_who_needs_more_memory_than_may_be_used_waits_for_a_release(self) -> None:
        pool = ArenaPool(count=1)
        first = pool.acquire(10)
        taken: list[Arena] = []
        waiting = threading.Thread(target=lambda: taken.append(pool.acquire(10)))
        waiting.start()
        assert taken == []
        pool.release(first)
        waiting.join(100)
        assert taken == [first]

    def test_one_snapshot_that_can_never_fit_is_refused(self) -> None:
        with pytest.raises(OutOfMemoryError, match="max_inflight_bytes"):
            ArenaPool(max_bytes=10 << 20).acquire(11 << 20)
        with pytest.raises(OutOfMemoryError, match="no memory"):
            ArenaPool(memory_available=lambda: 1 << 30).acquire(1 << 30)
