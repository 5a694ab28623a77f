"""What a node's hardware says of itself beside its ranks' times."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from nvrx_slurm.agent.hardware_context import HardwareContext, describe_gpu
from nvrx_slurm.health.nvml import Nvml
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.testing.health import FakeNvml


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/pressure").mkdir(parents=True)
    (tmp_path / "proc/loadavg").write_text("3.10 2.00 1.00 5/300 4711\n")
    (tmp_path / "proc/pressure/cpu").write_text(
        "some avg10=1.00 avg60=7.50 avg300=0.41 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    return tmp_path


def context(root: Path, nvml: FakeNvml, **environ: str) -> HardwareContext:
    return HardwareContext(environ, lambda: ["gpu-pcie gpu 3: x4"], lambda: nvml, root)


def test_a_rank_hears_of_its_own_gpu_and_of_the_node(root: Path) -> None:
    nvml = FakeNvml(gpus=4)
    gpu = nvml.gpus[3]
    gpu.throttle_reasons, gpu.sm_clock_mhz, gpu.temperature_c, gpu.uncorrected_ecc = 0x41, (345, 1980), 91, 2
    found = asyncio.run(context(root, nvml, CUDA_VISIBLE_DEVICES="1,3").look([1]))
    (lines,) = found.values()
    assert lines[:5] == [
        "GPU-3",
        "SM clock 345 of 1980 MHz",
        "throttled: hw thermal slowdown",
        "91 °C",
        "2 uncorrected ECC errors",
    ]
    assert lines[5].startswith("load 3.1 on ")
    assert lines[6:] == ["tasks waited for a CPU in 7.5 % of the last minute", "gpu-pcie gpu 3: x4"]


def test_gpus_may_be_named_by_uuid_and_what_one_does_not_tell_is_left_out(root: Path) -> None:
    nvml = FakeNvml(gpus=4)
    nvml.errors = {"temperature_c": 3, ("sm_clock_mhz", 2): 15}
    lines = context(root, nvml, CUDA_VISIBLE_DEVICES="GPU-2").read([0])[0]
    assert lines[:3] == ["GPU-2", "not throttled", "0 uncorrected ECC errors"]
    assert describe_gpu(nvml, 1)[1] == "SM clock 1980 of 1980 MHz"


def test_without_gpus_the_driver_is_not_asked(root: Path, tmp_path: Path) -> None:
    def refuse() -> Nvml:
        raise UnavailableError("there is no NVIDIA driver library", "libnvidia-ml.so.1")

    alone = HardwareContext({"CUDA_VISIBLE_DEVICES": ""}, list, FakeNvml, root)
    assert len(alone.read([0])[0]) == 2
    without = HardwareContext({}, list, refuse, tmp_path / "empty")
    assert without.read([0, 1]) == {0: [], 1: []}


def test_a_driver_that_is_silent_holds_up_one_thread_and_nobody_else(root: Path) -> None:
    released = threading.Event()

    class Silent(FakeNvml):
        def count(self) -> int:
            released.wait(100)
            return super().count()

    async def look() -> None:
        it = context(root, Silent(), CUDA_VISIBLE_DEVICES="0")
        first = asyncio.ensure_future(it.look([0]))
        await asyncio.sleep(0)
        assert await it.look([0]) == {}
        first.cancel()
        released.set()

    asyncio.run(look())
