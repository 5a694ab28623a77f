"""Waiting for the memory of this job's GPUs between two cycles, and for nobody else's (W25)."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import pytest

from nvrx_slurm.agent.gpu_memory import GpuMemory
from nvrx_slurm.agent.gpus import Gpu, GpuError, visible_devices
from nvrx_slurm.agent.node_gpus import NodeGpus
from nvrx_slurm.agent.nvml import open_gpus
from nvrx_slurm.testing import FakeGpu
from nvrx_slurm.wire.messages import GpuMemoryLeft
from nvrx_slurm.wire.node_options import NodeOptions

OURS, DYING, TENANT = 100, 101, 200
TOLERANCE_MB = 512.0
_NO_WAIT_S = 25.0
"""Less than the time-out of :func:`wait`: it was not waited for."""


def memory_of(*gpus: FakeGpu, alive: Sequence[int] = (TENANT,)) -> GpuMemory:
    return GpuMemory(gpus, TOLERANCE_MB, lambda pid: pid in alive)


def wait(memory: GpuMemory, timeout_s: float = 30.0) -> tuple[list[GpuMemoryLeft], float]:
    began = time.monotonic()
    left = memory.wait([OURS], timeout_s, threading.Event())
    return left, time.monotonic() - began


def test_a_free_gpu_costs_one_query() -> None:
    gpu = FakeGpu()
    memory = memory_of(gpu)
    asked = gpu.process_queries
    left, took = wait(memory)
    assert (left, gpu.memory_queries, gpu.process_queries - asked) == ([], 1, 0)
    assert took < _NO_WAIT_S


@pytest.mark.parametrize("pid", [OURS, DYING])
def test_memory_of_a_rank_or_of_what_dies_is_waited_for_until_it_is_free(pid: int) -> None:
    gpu, free = FakeGpu(), FakeGpu("GPU-1")
    memory = memory_of(gpu, free)
    gpu.holders[pid] = 4000.0
    threading.Timer(0.15, gpu.holders.clear).start()
    left, took = wait(memory)
    assert left == []
    assert 0.15 <= took < _NO_WAIT_S
    assert free.memory_queries == 1, "a GPU that is free is not asked again"


def test_what_is_left_when_the_time_is_over_is_told_with_its_holder() -> None:
    gpu, free = FakeGpu("GPU-7"), FakeGpu("GPU-8")
    memory = memory_of(gpu, free)
    gpu.holders.update({OURS: 4000.0, TENANT: 100.0})
    (left,), took = wait(memory, 0.25)
    assert 0.25 <= took < 25
    assert (left.gpu, left.used_mb) == ("GPU-7", 4100.0)
    assert left.waited_s == pytest.approx(took, abs=10)
    assert left.processes == [f"{OURS} (4000 MiB, gone)"]


def test_w25_another_tenant_of_the_gpu_delays_no_restart() -> None:
    """There every restart waits 50 s as long as somebody else uses more than 512 MB of the card."""
    here_all_the_time = FakeGpu(holders={TENANT: 20_000.0})
    memory = memory_of(here_all_the_time, FakeGpu("GPU-1"))
    left, took = wait(memory)
    assert left == []
    assert took < _NO_WAIT_S
    came_later = FakeGpu()
    memory = memory_of(came_later)
    came_later.holders[TENANT] = 20_000.0
    assert wait(memory)[0] == []


def test_w25_a_tenant_that_this_container_does_not_show_is_not_waited_for() -> None:
    invisible = 300
    there_before_us = FakeGpu(holders={invisible: 20_000.0})
    assert wait(memory_of(there_before_us, alive=()))[1] < _NO_WAIT_S
    came_later = FakeGpu()
    memory = memory_of(came_later, alive=())
    came_later.holders[invisible] = 20_000.0
    assert wait(memory, 0.15)[1] >= 0.15, "it may be one of ours that is dying"
    assert wait(memory)[1] < _NO_WAIT_S, "which it was not: it costs one wait"


def test_memory_that_nobody_holds_is_not_waited_for() -> None:
    gpu = FakeGpu()
    gpu.unaccounted_mb = 900.0
    assert wait(memory_of(gpu))[1] < _NO_WAIT_S


def test_where_processes_are_not_told_memory_alone_decides() -> None:
    gpu = FakeGpu()
    gpu.hides_processes = True
    gpu.unaccounted_mb = 900.0
    (left,), _ = wait(memory_of(gpu), 0.15)
    assert left.processes == []
    gpu.unaccounted_mb = 500.0
    assert wait(memory_of(gpu))[0] == []


def test_a_gpu_that_is_lost_is_not_waited_for() -> None:
    gpu = FakeGpu()
    memory = memory_of(gpu)
    gpu.broken = True
    assert wait(memory)[1] < _NO_WAIT_S


def test_an_agent_that_ends_does_not_wait() -> None:
    gpu = FakeGpu()
    memory = memory_of(gpu)
    gpu.holders[OURS] = 900.0
    given_up = threading.Event()
    given_up.set()
    began = time.monotonic()
    memory.wait([OURS], 50.0, given_up)
    assert time.monotonic() - began < 40


# --- which GPUs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,MIG-cd", "SLURM_STEP_GPUS": "0,1"}, ["GPU-ab", "MIG-cd"]),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "", "SLURM_STEP_GPUS": "0"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_JOB_ID": "1"}, []),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_GPUS": "4,5"}, ["4", "5"]),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "6"}, ["6"]),
        ({"SLURM_JOB_ID": "1"}, []),
        ({}, None),
    ],
)
def test_w25_the_gpus_of_the_job_are_those_that_its_ranks_see(
    environ: Mapping[str, str], devices: list[str] | None
) -> None:
    assert visible_devices(environ) == devices


class FakeNvml:
    """What is called of ``pynvml``, on a node with four GPUs, the last with one MIG instance."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.initialised = 0

    def nvmlInit(self) -> None:
        self.initialised += 1

    def nvmlDeviceGetCount(self) -> int:
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < 4:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-77":
            raise self.NVMLError("Not Found")
        return 77

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "MIG-77" if handle == 77 else f"GPU-{handle}{handle}{handle}"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: int) -> int:
        return {77: 3}[handle]

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        if handle == 77:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(busId=f"00000000:3{'ABCD'[handle]}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=handle * 1024 * 1024)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(pid=9, usedGpuMemory=2 * 1024 * 1024),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]


def test_nvml_finds_gpus_by_index_uuid_or_mig_instance_and_knows_where_they_are() -> None:
    gpus = open_gpus(["2", "GPU-11", "MIG-77"], FakeNvml())
    assert [(gpu.name, gpu.pci_address) for gpu in gpus] == [
        ("GPU-222", "0000:3c:00.0"),
        ("GPU-111", "0000:3b:00.0"),
        ("MIG-77", "0000:3d:00.0"),
    ]
    assert gpus[0].used_mb() == 2.0
    assert gpus[0].processes() == {9: 2.0, 8: 0.0}
    assert len(open_gpus(None, FakeNvml())) == 4


@pytest.mark.parametrize("device", ["4", "GPU-9", "MIG-1", "nonsense"])
def test_a_device_that_nvml_does_not_know_is_an_error(device: str) -> None:
    with pytest.raises(GpuError):
        open_gpus([device], FakeNvml())


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_without_a_driver_the_real_library_says_so() -> None:
    with pytest.raises(GpuError, match="NVML"):
        open_gpus(None)


# --- the agent's side --------------------------------------------------------------------------------


class Driver:
    """Stands in for NVML, and notes how often it was opened and for what."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self._gpus = gpus
        self.opened: list[Sequence[str] | None] = []

    def __call__(self, devices: Sequence[str] | None) -> list[Gpu]:
        self.opened.append(devices)
        return list(self._gpus)


def reclaim(driver: Callable[[Sequence[str] | None], list[Gpu]], **options: float) -> list[GpuMemoryLeft]:
    async def run() -> list[GpuMemoryLeft]:
        environ = {"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "5"}
        gpus = NodeGpus(environ, NodeOptions(**options), 1, open_gpus=driver)  # type: ignore[arg-type]
        await gpus.opened()
        return await gpus.reclaim([OURS]) + await gpus.reclaim([OURS])

    return asyncio.run(run())


def test_the_driver_is_opened_once_for_the_gpus_of_the_job() -> None:
    gpu = FakeGpu(holders={OURS: 900.0})
    driver = Driver(gpu)
    left = reclaim(driver, gpu_memory_reclaim_timeout_s=0.05)
    assert [found.gpu for found in left] == [gpu.name, gpu.name]
    assert driver.opened == [["5"]]


def test_a_time_out_of_0_opens_no_driver() -> None:
    driver = Driver(FakeGpu(holders={OURS: 900.0}))
    assert reclaim(driver, gpu_memory_reclaim_timeout_s=0.0) == []
    assert driver.opened == []


def test_without_a_driver_nothing_is_waited_for_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def no_driver(devices: Sequence[str] | None) -> list[Gpu]:
        raise GpuError("NVML Shared Library Not Found")

    assert reclaim(no_driver) == []
    assert "GPUs of this job cannot be asked" in caplog.text
    assert "NVML Shared Library Not Found" in caplog.text
