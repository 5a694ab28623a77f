"""Parts of in-process restart that need no other rank: state, composition, records, limits, refusals."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.health.nvml import NvmlCode, RecoveryAction
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.inprocess import Compose, FrozenState, Mode, State, health_check
from nvrx_slurm.inprocess.abort import (
    Abort,
    AbortPersistentCheckpointProcesses,
    AbortTorchDistributed,
    AbortTransformerEngine,
)
from nvrx_slurm.inprocess.attribution import (
    Interruption,
    InterruptionRecord,
    format_interruption_records,
)
from nvrx_slurm.inprocess.environment import complaints, warn_about_environment
from nvrx_slurm.inprocess.exception import HealthCheckError, RestartAbort, TimeoutError
from nvrx_slurm.inprocess.finalize import Finalize, ThreadedFinalize
from nvrx_slurm.inprocess.flight_recorder import write_trace
from nvrx_slurm.inprocess.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    CudaHealthCheck,
    FaultCounter,
    FaultCounterExceeded,
    HealthCheck,
)
from nvrx_slurm.inprocess.initialize import Initialize, RetryController
from nvrx_slurm.inprocess.nested_restarter import (
    NestedRestarterAborted,
    NestedRestarterFinalized,
    NestedRestarterHandlingCompleted,
    NestedRestarterHandlingStarting,
)
from nvrx_slurm.inprocess.own_gpu import own_index
from nvrx_slurm.inprocess.wrapper_arguments import check_wrapper_arguments
from nvrx_slurm.testing.health import FakeNvml

FROZEN = State(0, 1, active_rank=0, active_world_size=1).freeze()


def frozen(**fields: Any) -> FrozenState:
    return dataclasses.replace(FROZEN, **fields)


class TestState:
    def test_both_kinds_have_the_same_fields(self) -> None:
        names = [[field.name for field in dataclasses.fields(kind)] for kind in (State, FrozenState)]
        assert names[0] == names[1]

    def test_it_begins_with_what_the_launcher_gave(self) -> None:
        assert State.from_env({}).freeze() == State(0, 1, initial_rank=0, initial_world_size=1).freeze()
        found = State.from_env({"RANK": "3", "WORLD_SIZE": "8"})
        assert (found.rank, found.world_size, found.initial_rank, found.initial_world_size) == (3, 8, 3, 8)
        assert (found.iteration, found.mode) == (0, Mode.INITIALIZED)

    @pytest.mark.parametrize(
        ("environ", "named"),
        [
            ({"RANK": "None"}, "RANK is 'None'"),
            ({"WORLD_SIZE": "-1"}, "WORLD_SIZE is '-1'"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ],
    )
    def test_numbers_that_are_none_are_refused(self, environ: dict[str, str], named: str) -> None:
        with pytest.raises(ValueError, match=named):
            State.from_env(environ)

    def test_a_frozen_one_holds_the_exception_itself_and_can_not_be_changed(self) -> None:
        class Uncopyable(Exception):
            def __init__(self, code: int, lock: threading.Lock) -> None:
                super().__init__("held")
                self.lock = lock

        error = Uncopyable(3, threading.Lock())
        state = State(0, 1, fn_exception=error)
        found = state.freeze()
        assert found.fn_exception is error
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.rank = 1  # type: ignore[misc]
        state.advance()
        assert (state.iteration, state.fn_exception, found.iteration) == (1, None, 0)

    def test_it_tells_the_function_its_active_numbers(self) -> None:
        environ = {"RANK": "5", "LOCAL_RANK": "1"}
        State(5, 8, active_rank=3, active_world_size=6).set_distributed_vars(environ)
        assert environ == {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1"}
        State(7, 8, active_world_size=6).set_distributed_vars(environ)
        assert environ["RANK"] == "None"


class TestCompose:
    def test_parts_are_called_from_right_to_left(self) -> None:
        assert Compose(lambda x: x + "a", lambda x: x + "b", lambda x: x + "c")("") == "cba"
        assert Compose(lambda x: x + 1, Compose(lambda x: x * 2, lambda x: x + 10))(1) == 23

    def test_it_is_of_the_nearest_class_that_all_parts_have(self) -> None:
        retry, nested = RetryController(), NestedRestarterHandlingCompleted()
        assert type(Compose(retry, retry)).__mro__[2] is RetryController
        both = Compose(retry, nested)
        assert isinstance(both, Initialize)
        assert not isinstance(both, RetryController)
        assert both.instances == (retry, nested)
        assert isinstance(Compose(both, Compose(retry)), Initialize)
        assert isinstance(Compose(Compose(retry), Compose(nested)), Initialize)
        mixed = Compose(retry, FaultCounter())
        assert not isinstance(mixed, Initialize | HealthCheck)
        assert not isinstance(Compose(retry, str), Initialize)
        assert isinstance(Compose(print, len), Compose)

    def test_a_tuple_becomes_several_arguments(self) -> None:
        assert Compose(lambda a, b: a - b, lambda x: (x, 1))(5) == 4

    def test_parts_without_parameters_hand_on_what_they_got(self) -> None:
        called = []
        compose = Compose(lambda x: x, lambda: called.append(1))
        assert compose("kept") == "kept"
        assert Compose(lambda: called.append(2), lambda: called.append(3))() is None
        assert called == [1, 3, 2]

    def test_a_part_that_loses_the_value_is_told_of(self) -> None:
        with pytest.warns(UserWarning, match="returned None"):
            Compose(lambda x: None)(1)

    @pytest.mark.parametrize("parts", [(), (3,)])
    def test_what_can_not_be_called_is_refused(self, parts: tuple[Any, ...]) -> None:
        with pytest.raises(TypeError, match="Compose"):
            Compose(*parts)


class TestAttribution:
    @given(st.lists(st.builds(InterruptionRecord, st.integers(0, 10**6), st.sampled_from(Interruption))))
    def test_records_survive_the_store(self, records: list[InterruptionRecord]) -> None:
        assert InterruptionRecord.from_str("".join(map(str, records))) == records

    @pytest.mark.parametrize(
        "text",
        ["x", "InterruptionRecord(rank=1, interruption=Interruption.NONE);", "InterruptionRecord(rank=1"],
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="at character"):
            InterruptionRecord.from_str(str(InterruptionRecord(3, Interruption.EXCEPTION)) + text)

    def test_words_for_people_name_kinds_and_ranks(self) -> None:
        records = [InterruptionRecord(rank, Interruption.TERMINATED) for rank in (5, 3, 5)]
        records.append(InterruptionRecord(0, Interruption.EXCEPTION))
        assert format_interruption_records(records) == (
            "Interruption.TERMINATED affecting ranks {3, 5}, Interruption.EXCEPTION affecting ranks {0}"
        )
        many = [InterruptionRecord(rank, Interruption.UNRESPONSIVE) for rank in range(100)]
        assert "{0, 1, 2, 3 ... 96, 97, 98, 99} (total: 100)" in format_interruption_records(many)


class TestInitialize:
    def test_so_many_iterations_and_no_more(self) -> None:
        controller = RetryController(max_iterations=2)
        for iteration in (0, 1):
            controller(frozen(iteration=iteration))
        with pytest.raises(RestartAbort, match="2 times"):
            controller(frozen(iteration=2))

    def test_too_few_ranks_end_the_job(self) -> None:
        with pytest.raises(RestartAbort, match="min_world_size is 2"):
            RetryController(min_world_size=2)(FROZEN)
        with pytest.raises(RestartAbort, match="min_active_world_size is 1"):
            RetryController()(frozen(active_world_size=0))


class TestFinalize:
    def test_it_runs_in_a_thread_and_what_it_raises_comes_out(self) -> None:
        ran: list[Any] = []

        def work(*args: int, **kwargs: int) -> None:
            ran.append((args, kwargs, threading.current_thread() is threading.main_thread()))

        finalize = ThreadedFinalize(timedelta(seconds=60), work, (1,), {"two": 2})
        assert finalize(FROZEN) is FROZEN
        assert ran == [((1,), {"two": 2}, False)]
        with pytest.raises(KeyError, match="gone"):
            ThreadedFinalize(timedelta(seconds=60), {}.__getitem__, ("gone",))(FROZEN)

    def test_one_that_hangs_is_left_behind(self) -> None:
        released = threading.Event()
        with pytest.raises(TimeoutError, match=r"finalize function wait took longer than 0.01 s"):
            ThreadedFinalize(timedelta(seconds=0.01), released.wait)(FROZEN)
        released.set()


class TestHealthCheck:
    def test_only_faults_of_this_rank_count(self) -> None:
        counter = FaultCounter(1)
        counter(frozen(fn_exception=ValueError()))
        counter(FROZEN)
        with pytest.raises(FaultCounterExceeded, match="2 times"):
            counter(frozen(fn_exception=ValueError()))
        unlimited = FaultCounter()
        for _ in range(3):
            unlimited(frozen(fn_exception=ValueError()))

    def test_without_cuda_there_is_nothing_to_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        assert CudaHealthCheck()(FROZEN) is FROZEN

    def test_a_cuda_context_that_does_not_answer_ends_its_rank(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released, asked = threading.Event(), []
        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 4,
            current_device=lambda: 0,
            synchronize=asked.append,
        )
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
        monkeypatch.setenv("LOCAL_RANK", "2")
        assert CudaHealthCheck()(FROZEN) is FROZEN
        monkeypatch.setenv("LOCAL_RANK", "4")  # every rank sees its own GPU alone
        CudaHealthCheck()(FROZEN)
        assert asked == [2, 0]
        cuda.synchronize = lambda device: released.wait()
        with pytest.raises(TimeoutError, match=r"CUDA device 0 took longer than 0\.01 s"):
            CudaHealthCheck(timedelta(seconds=0.01))(FROZEN)
        released.set()

    def test_without_gpus_all_are_healthy_although_there_is_a_local_rank(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setattr(health_check, "this_node", lambda: None)
        assert health_check.automatic_checks() == []
        assert health_check.with_automatic(None, []) is None
        for check in (ChainedGPUHealthCheck(), ChainedNVLHealthCheck(), ChainedNicHealthCheck()):
            assert check(FROZEN) is FROZEN

    @pytest.fixture
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        nvml = FakeNvml(4)
        monkeypatch.setenv("LOCAL_RANK", "2")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(health_check, "this_node", lambda: nvml)
        return nvml

    def test_a_gpu_that_needs_a_reset_ends_its_rank_alone(self, gpus: FakeNvml) -> None:
        check = ChainedGPUHealthCheck()
        gpus.gpus[1].recovery_action = RecoveryAction.GPU_RESET
        assert check(FROZEN) is FROZEN
        gpus.gpus[2].recovery_action = RecoveryAction.GPU_RESET
        with pytest.raises(HealthCheckError, match="asks for gpu reset of GPU 2"):
            check(FROZEN)
        gpus.driver = "565.57.01"
        assert check(FROZEN) is FROZEN

    def test_a_question_that_the_driver_does_not_know_is_no_fault(self, gpus: FakeNvml) -> None:
        gpus.errors["recovery_action"] = NvmlCode.NOT_SUPPORTED
        assert ChainedGPUHealthCheck()(FROZEN) is FROZEN
        gpus.errors["recovery_action"] = NvmlCode.GPU_IS_LOST
        with pytest.raises(HealthCheckError, match="GPU_IS_LOST"):
            ChainedGPUHealthCheck(1)(FROZEN)

    def test_nvlinks_end_no_rank(self, gpus: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
        check = ChainedNVLHealthCheck()
        assert check(FROZEN) is FROZEN
        gpus.errors["nvlink_active"] = NvmlCode.GPU_IS_LOST
        assert check(FROZEN) is FROZEN
        assert "can't be looked at" in caplog.text

    def test_an_adapter_next_to_the_gpu_that_loses_its_link_ends_its_rank(
        self, gpus: FakeNvml, tmp_path: Path
    ) -> None:
        def adapter(name: str, bridge: str) -> Path:
            device = tmp_path / "sys/devices/pci0000:00" / bridge / name
            counter = tmp_path / f"sys/class/infiniband/{name}/ports/1/counters/link_downed"
            for folder in (device, counter.parent):
                folder.mkdir(parents=True)
            counter.write_text("4\n")
            (tmp_path / f"sys/class/infiniband/{name}/device").symlink_to(device)
            return counter

        near, far = adapter("mlx5_0", "a"), adapter("mlx5_1", "b")
        gpu = tmp_path / "sys/devices/pci0000:00/a/gpu"
        gpu.mkdir()
        (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
        (tmp_path / f"sys/bus/pci/devices/{gpus.gpus[2].pci_bus_id}").symlink_to(gpu)
        check = ChainedNicHealthCheck(tree=Tree(tmp_path))
        far.write_text("9\n")
        assert check(FROZEN) is FROZEN
        near.write_text("5\n")
        with pytest.raises(HealthCheckError, match="mlx5_0/1 has lost its link: link_downed was 4 and is 5"):
            check(FROZEN)
        near.unlink()
        assert check(FROZEN) is FROZEN

    def test_automatic_checks_come_first(self, gpus: FakeNvml) -> None:
        automatic = health_check.automatic_checks()
        first, second = FaultCounter(), CudaHealthCheck()
        chain = health_check.with_automatic(Compose(first, second), automatic)
        assert isinstance(chain, HealthCheck)
        assert isinstance(chain, Compose)
        assert chain.instances[:2] == (first, second)
        assert [type(check) for check in chain.instances[2:]] == [
            ChainedGPUHealthCheck,
            ChainedNVLHealthCheck,
            ChainedNicHealthCheck,
        ]

    @pytest.mark.parametrize(
        ("environ", "index"),
        [
            ({}, None),
            ({"LOCAL_RANK": "1"}, 1),
            ({"LOCAL_RANK": "4"}, None),
            ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3,2"}, 2),
            ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}, 3),
            ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "GPU-1"}, 1),
            ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "MIG-1"}, None),
            ({"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}, None),
        ],
    )
    def test_the_gpu_of_a_rank(self, environ: dict[str, str], index: int | None) -> None:
        assert own_index(FakeNvml(4), environ) == index


def fake_torch(*aborts: Callable[[], Any]) -> Any:
    """A torch with an NCCL group for each of ``aborts``, and one of gloo."""
    done: list[str] = []

    class Backend:
        def __init__(self, abort: Callable[[], Any]) -> None:
            self._abort = abort

        def abort(self) -> None:
            self._abort()
            done.append("abort")

    class Group:
        def __init__(self, backend: Backend | None) -> None:
            self._backend = backend

        def _get_backend(self, device: str) -> Backend:
            assert device == "cuda"
            if self._backend is None:
                raise RuntimeError("no backend for this device")
            return self._backend

    groups = [Group(None), *(Group(Backend(abort)) for abort in aborts)]
    distributed = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_nccl_available=lambda: True,
        ProcessGroupNCCL=Backend,
        distributed_c10d=types.SimpleNamespace(_world=types.SimpleNamespace(pg_map=dict.fromkeys(groups))),
        destroy_process_group=lambda: done.append("destroy"),
    )
    return types.SimpleNamespace(distributed=distributed, device=str, done=done)


class TestAbort:
    def test_what_the_program_never_imported_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("torch", "nvrx_slurm.checkpointing.async_ckpt.core"):
            monkeypatch.setitem(sys.modules, name, None)
        everything = Compose(
            AbortPersistentCheckpointProcesses(), AbortTransformerEngine(), AbortTorchDistributed()
        )
        assert isinstance(everything, Abort)
        assert everything(FROZEN) is FROZEN

    def test_transformer_engine_and_checkpoint_workers_are_reset(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []
        modules = {
            "transformer_engine.pytorch.module.base": {"destroy_ub": lambda: called.append("ub")},
            "transformer_engine.pytorch.fp8": {
                "FP8GlobalStateManager": types.SimpleNamespace(reset=lambda: called.append("fp8"))
            },
            "nvrx_slurm.checkpointing.async_ckpt.core": {
                "abort_nvrx_checkpoint": lambda: called.append("workers")
            },
        }
        for name, content in modules.items():
            monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))
        Compose(AbortPersistentCheckpointProcesses(), AbortTransformerEngine())(FROZEN)
        assert called == ["ub", "fp8", "workers"]

    def test_one_that_hangs_is_left_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        released = threading.Event()
        name = "nvrx_slurm.checkpointing.async_ckpt.core"
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(abort_nvrx_checkpoint=released.wait))
        with pytest.raises(TimeoutError, match=r"checkpoint workers took longer than 0\.01 s"):
            AbortPersistentCheckpointProcesses(timeout=timedelta(seconds=0.01))(FROZEN)
        released.set()

    def test_communicators_are_aborted_side_by_side_before_the_groups_are_forgotten(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        both = threading.Barrier(2)
        torch = fake_torch(lambda: both.wait(60), lambda: both.wait(60))
        monkeypatch.setitem(sys.modules, "torch", torch)
        assert AbortTorchDistributed()(FROZEN) is FROZEN
        assert torch.done == ["abort", "abort", "destroy"]

    def test_a_communicator_that_hangs_or_fails_does_not_hold_up_the_restart(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        released = threading.Event()

        def broken() -> None:
            raise RuntimeError("NCCL is out of order")

        torch = fake_torch(released.wait, broken)
        monkeypatch.setitem(sys.modules, "torch", torch)
        AbortTorchDistributed(timeout=timedelta(seconds=0.05))(FROZEN)
        released.set()
        assert "could not be aborted: NCCL is out of order" in caplog.text
        assert "process groups still hang" in caplog.text

    def test_a_trace_is_written_whole(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_trace(b"{}", str(tmp_path / "traces"), 3, 7)
        (written,) = (tmp_path / "traces/iter_3").iterdir()
        assert (written.name, written.read_bytes()) == ("_dump_7.json", b"{}")
        (tmp_path / "file").touch()
        write_trace(b"{}", str(tmp_path / "file"), 3, 7)
        assert "was not written" in caplog.text


class TestNestedRestarter:
    def test_one_rank_says_what_happens(self, capsys: pytest.CaptureFixture[str]) -> None:
        completed = NestedRestarterHandlingCompleted()
        callbacks: list[Callable[[FrozenState], FrozenState]] = [
            completed,
            NestedRestarterHandlingStarting(),
            completed,
            NestedRestarterFinalized(),
            NestedRestarterAborted(),
            NestedRestarterAborted(special_rank=1),
        ]
        for callback in callbacks:
            callback(FROZEN)
        lines = capsys.readouterr().out.splitlines()
        assert [line.partition("[NestedRestarter] ")[2] for line in lines] == [
            "name=[InProcess] state=initialize",
            "name=[InProcess] state=handling stage=starting",
            "name=[InProcess] state=handling stage=completed",
            "name=[InProcess] state=finalized",
            "name=[InProcess] state=aborted",
        ]
        assert all("[ALWAYS] [InprocessRestarter.Restarter]" in line for line in lines)

    def test_a_logger_of_the_users_own(self, caplog: pytest.LogCaptureFixture) -> None:
        from nvrx_slurm.inprocess.nested_restarter import NestedRestarterCallback

        caplog.set_level(logging.INFO)
        NestedRestarterCallback("handling", "starting", logging.getLogger("mine"))(FROZEN)
        assert [record.name for record in caplog.records] == ["mine"]


class Other(Finalize):
    def __call__(self, state: FrozenState) -> FrozenState:
        return state


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


class TestWrapperArguments:
    def test_what_is_right_passes(self) -> None:
        check_wrapper_arguments(
            {
                "initialize": RetryController(),
                "abort": None,
                "soft_timeout": seconds(1),
                "hard_timeout": seconds(2),
                "barrier_timeout": seconds(3),
                "last_call_wait": seconds(0),
                "monitor_process_logfile": "/tmp/m_{rank}.log",
                "enabled": True,
                "granularity": "node",
                "active_world_size": None,
                "max_rank_faults": 0,
            }
        )

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ({"initialize": Other()}, "initialize is .*Other.*: an Initialize or None is accepted"),
            ({"finalize": Other}, r"finalize is the class Other: a Finalize .* a class: Other\(\) makes one"),
            ({"rank_assignment": None}, "rank_assignment is None .*: a RankAssignment is accepted"),
            ({"soft_timeout": 60}, r"soft_timeout is 60 of type int: .*timedelta\(seconds=60\)"),
            (
                {"hard_timeout": "90 s"},
                "hard_timeout is '90 s' of type str: a datetime.timedelta is accepted$",
            ),
            ({"hard_timeout": None}, "hard_timeout is None"),
            ({"heartbeat_interval": seconds(0)}, "heartbeat_interval is 0 s: it must be more than zero"),
            ({"last_call_wait": seconds(-1)}, "last_call_wait is -1 s: it must be zero or more"),
            (
                {"soft_timeout": seconds(90), "hard_timeout": seconds(90)},
                "soft_timeout is 90 s and hard_timeout 90 s: soft_timeout < hard_timeout is required",
            ),
            (
                {"hard_timeout": seconds(9), "barrier_timeout": seconds(8)},
                "hard_timeout is 9 s and barrier_timeout 8 s",
            ),
            (
                {"monitor_process_interval": seconds(9), "soft_timeout": seconds(8)},
                "monitor_process_interval < soft_timeout is required",
            ),
            ({"monitor_process_logfile": "m.log"}, "monitor_process_logfile is 'm.log': an absolute path"),
            ({"monitor_process_pidfile": "/tmp/{pid}"}, r"'/tmp/{pid}': {rank} is the only word"),
            ({"monitor_process_pidfile": 3}, "monitor_process_pidfile is 3"),
            ({"enabled": 1}, "enabled is 1 of type int: a bool is accepted"),
            ({"granularity": "rack"}, "granularity is 'rack': 'rank' or 'node' is accepted"),
            ({"active_world_size": 0}, "active_world_size is 0: 1 or more is accepted"),
            ({"max_rank_faults": True}, "max_rank_faults is True of type bool: an int or None is accepted"),
        ],
    )
    def test_each_refusal_is_one_sentence(self, given: dict[str, Any], sentence: str) -> None:
        with pytest.raises((TypeError, ValueError), match=sentence) as refused:
            check_wrapper_arguments(given)
        assert "\n" not in str(refused.value)


GOOD = {
    "TORCH_CPP_LOG_LEVEL": "error",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "480",
}


class TestEnvironment:
    @pytest.mark.parametrize(
        ("change", "hard_s", "nccl", "named"),
        [
            ({}, 90, (2, 27, 3), None),
            ({}, 90, None, None),
            ({"TORCH_CPP_LOG_LEVEL": ""}, 90, None, "TORCH_CPP_LOG_LEVEL is ''"),
            (
                {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"},
                90,
                (2, 27, 3),
                "TORCH_NCCL_RETHROW_CUDA_ERRORS is '1'",
            ),
            ({"TORCH_NCCL_RETHROW_CUDA_ERRORS": "1"}, 90, None, None),
            ({"NCCL_NVLS_ENABLE": ""}, 90, (2, 27, 3), "NCCL_NVLS_ENABLE is ''"),
            ({}, 480, (2, 27, 3), "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC is 480 s and hard_timeout 480 s"),
            ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, 480, (2, 27, 3), None),
            ({}, 90, (2, 26, 1), "NCCL is 2.26.1"),
            ({}, 90, (2, 28, 2), None),
            ({}, 90, (2, 28, 3), "NCCL is 2.28.3"),
            ({}, 90, (2, 28, 8), "NCCL is 2.28.8"),
            ({}, 90, (2, 28, 9), None),
        ],
    )
    def test_one_sentence_for_each_setting(
        self, change: dict[str, str], hard_s: float, nccl: tuple[int, ...] | None, named: str | None
    ) -> None:
        found = list(complaints(seconds(hard_s), {**GOOD, **change}, lambda: nccl))
        assert len(found) == (named is not None)
        assert named is None or found[0].startswith(named)

    def test_one_rank_of_a_node_says_it(self, recwarn: pytest.WarningsRecorder) -> None:
        warn_about_environment(seconds(90), {"LOCAL_RANK": "1"})
        assert not recwarn.list
        with pytest.warns(UserWarning, match="TORCH_CPP_LOG_LEVEL"):
            warn_about_environment(seconds(90), {"LOCAL_RANK": "0"})
