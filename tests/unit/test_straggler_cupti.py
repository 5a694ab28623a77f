"""From the detector to the report through the real loader, with a simulated libcupti in the GPU's place."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from nvrx_slurm.straggler import CallableId, Detector, Report, Statistic, cupti
from nvrx_slurm.straggler.arrival import lateness
from nvrx_slurm.straggler.kernels import KernelTimes, NoKernelTimesError, open_activity
from nvrx_slurm.straggler.torch_profiler import TorchProfiler, torch_profiler
from tests.unit.kernel_records import SimulatedCupti, extension, simulated_library

GRAPH_LAUNCH, DRIVER_LAUNCH = 311, -652


class Fallback:
    """Stands for CUDA events."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, section: str) -> object:
        return section

    def end(self, section: str, begun: object) -> None:
        self.seen.append(section)

    def summaries(self) -> dict[str, dict[Statistic, float]]:
        return {}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCupti]:
    activity_class = extension().Activity
    sim = SimulatedCupti()
    activity = activity_class.open(str(sim.path))
    if activity.path != str(sim.path):
        pytest.skip("this process has the real libcupti open")
    monkeypatch.setenv("CUDA_HOME", str(sim.path.parent.parent))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # On a busy machine the thread that reads records may take its time.
    monkeypatch.setattr("nvrx_slurm.straggler.kernels._PATIENCE_MS", 60_000)
    yield sim
    Detector.shutdown()
    for call in (
        "cuptiSubscribe",
        "cuptiActivityEnable",
        "cuptiActivityRegisterCallbacks",
        "cuptiActivityFlushAll",
    ):
        sim.set(f"fail:{call}", 0)
    activity.attach()


def report() -> Report:
    made = Detector.generate_report()
    assert made is not None
    return made


def test_kernels_travel_from_the_launch_to_the_report(simulated: SimulatedCupti) -> None:
    Detector.initialize()
    for _ in range(100):
        with Detector.detection_section("forward"):
            simulated.launch("gemm", 50_000)
            simulated.launch("gemm", 70_000, call=DRIVER_LAUNCH)
        with Detector.detection_section("step"):
            simulated.launch("adam", 9_000, kernels=3, call=GRAPH_LAUNCH)
    simulated.launch("elsewhere", 1_000)
    found = report()
    assert found.local_kernel_summaries.keys() == {"gemm", "adam"}, "outside of sections nothing is recorded"
    gemm = found.local_kernel_summaries["gemm"]
    assert (gemm[Statistic.NUM], gemm[Statistic.MIN], gemm[Statistic.MAX]) == (200, 50.0, 70.0)
    assert gemm[Statistic.AVG] == pytest.approx(60)
    assert gemm[Statistic.STD] == pytest.approx(10)
    assert gemm[Statistic.MED] == pytest.approx(60, rel=0.01)
    assert found.local_kernel_summaries["adam"][Statistic.NUM] == 300
    assert found.gpu_individual_perf_scores == found.gpu_relative_perf_scores == {0: 1.0}


def test_a_gpu_that_becomes_slower_scores_less(simulated: SimulatedCupti) -> None:
    Detector.initialize()
    scores = []
    for ns in (10_000, 12_500, 20_000):
        with Detector.detection_section("step"):
            simulated.launch("k", ns)
            simulated.launch("ncclDevKernel_AllReduce", 1_000_000 - ns)
        scores.append(report().gpu_individual_perf_scores[0])
    assert scores == [1.0, pytest.approx(0.8, rel=0.02), pytest.approx(0.5, rel=0.02)]


def test_one_in_so_many_entries_records_kernels(simulated: SimulatedCupti) -> None:
    Detector.initialize(profiling_interval=2)
    for _ in range(10):
        with Detector.detection_section("step"):
            simulated.launch("k", 1_000)
        with Detector.detection_section("quiet", profile_cuda=False):
            simulated.launch("other", 1_000)
    found = report().local_kernel_summaries
    assert {name: times[Statistic.NUM] for name, times in found.items()} == {"k": 5}


def test_wrapped_callables_record_kernels(simulated: SimulatedCupti) -> None:
    class Model:
        def forward(self) -> None:
            simulated.launch("k", 1_000)

    Detector.initialize()
    Detector.wrap_callables([CallableId(Model, "forward")])
    Model().forward()
    assert report().local_kernel_summaries["k"][Statistic.NUM] == 1


def test_an_exception_in_a_section_ends_the_recording(simulated: SimulatedCupti) -> None:
    Detector.initialize()
    recording = []

    def fails() -> None:
        with Detector.detection_section("step"):
            recording.append(simulated.is_recording)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert recording == [True]
    assert not simulated.is_recording
    assert simulated.calls("inside") == 0


class Profiler:
    """Stands for torch's own module, which knows what is to be recorded."""

    def __init__(self) -> None:
        self._is_profiler_enabled = False
        self.on_prepare: Callable[[], None] = lambda: None

    def _prepare_profiler(self, config: object, activities: object) -> None:
        self.on_prepare()

    def _disable_profiler(self) -> None:
        pass


def kernel_times(simulated: SimulatedCupti, module: object | None = None) -> tuple[KernelTimes, Fallback]:
    fallback = Fallback()
    activity = open_activity([str(simulated.path)])
    return KernelTimes(activity, fallback, TorchProfiler(module or Profiler())), fallback


def test_kernels_are_told_apart_by_section_the_inner_one_counts(simulated: SimulatedCupti) -> None:
    times, _ = kernel_times(simulated)
    outer = times.begin("step")
    simulated.launch("k", 5_000)
    inner = times.begin("forward")
    simulated.launch("k", 5_000)
    simulated.launch("k", 5_000)
    times.end("forward", inner)
    assert simulated.is_recording, "the outer section goes on"
    # The backward pass of autograd: another thread, which knows nothing of sections.
    thread = threading.Thread(target=simulated.launch, args=("backward", 1_000))
    thread.start()
    thread.join()
    times.end("step", outer)
    times.summaries()
    found = {
        section: {name: each[Statistic.NUM] for name, each in kernels.items()}
        for section, kernels in times.section_kernels().items()
    }
    assert found == {"step": {"k": 1, "backward": 1}, "forward": {"k": 2}}


def test_who_waits_least_for_others_is_the_late_one(simulated: SimulatedCupti) -> None:
    Detector.initialize()
    with Detector.detection_section("step"):
        simulated.launch("k", 5_000)
        simulated.launch("ncclDevKernel_AllReduce", 40_000)
        simulated.launch("ncclDevKernel_AllGather", 20_000)
    found = report()
    assert found.collective_waits_us == {0: pytest.approx(30)}
    of_others = dataclasses.replace(found, collective_waits_us={0: 30.0, 1: 4.0, 2: 29.0, 3: math.nan})
    late = of_others.arrival_lateness_us()
    assert (late[0], late[1], late[2]) == (0, 26, 1)
    assert math.isnan(late[3])
    assert lateness({}) == {}


def test_torch_profiler_gets_cupti_and_gives_it_back(
    simulated: SimulatedCupti, caplog: pytest.LogCaptureFixture
) -> None:
    module = Profiler()
    times, fallback = kernel_times(simulated, module)
    before = times.begin("step")
    simulated.launch("before", 1_000)
    recording = []

    def prepare() -> None:
        recording.append(simulated.is_recording)
        simulated.take_over()

    module.on_prepare = prepare
    module._prepare_profiler(None, {ProfilerActivity.CPU, ProfilerActivity.CUDA})  # within a section of ours
    assert recording == [False], "it was given back before"
    times.end("step", before)
    assert simulated.is_recording, "for the profiler: nothing was switched off"
    for _ in range(3):
        within = times.begin("step")
        simulated.launch("seen by the profiler", 1_000)
        times.end("step", within)
    assert fallback.seen == ["step"] * 3
    flushed = simulated.calls("cuptiActivityFlushAll")
    assert times.summaries().keys() == {"before"}, "what came home is waited for"
    assert simulated.calls("cuptiActivityFlushAll") == flushed, "the profiler's buffers are left alone"
    module._disable_profiler()
    after = times.begin("step")
    simulated.launch("after", 2_000)
    times.end("step", after)
    assert times.summaries().keys() == {"after"}
    assert times.section_kernels().keys() == {"step"}, "times are by our own clock again"
    assert caplog.text.count("torch.profiler uses CUPTI") == 1
    assert simulated.calls("cuptiFinalize") == 0


def test_a_profiler_that_was_on_before_has_cupti_until_it_ends(simulated: SimulatedCupti) -> None:
    module = Profiler()
    module._is_profiler_enabled = True
    times, fallback = kernel_times(simulated, module)
    times.end("step", times.begin("step"))
    module._is_profiler_enabled = False
    times.end("step", times.begin("step"))
    assert fallback.seen == ["step"]


def test_a_detector_that_begins_within_a_trace_takes_nothing_from_it(simulated: SimulatedCupti) -> None:
    module = Profiler()
    module._is_profiler_enabled = True
    simulated.take_over()
    registered = simulated.calls("cuptiActivityRegisterCallbacks")
    times, fallback = kernel_times(simulated, module)
    times.end("step", times.begin("step"))
    assert times.summaries() == {}
    assert simulated.calls("cuptiActivityRegisterCallbacks") == registered
    assert simulated.is_recording, "for the profiler"
    assert fallback.seen == ["step"]
    module._is_profiler_enabled = False
    section = times.begin("step")
    simulated.launch("after", 1_000)
    times.end("step", section)
    assert times.summaries().keys() == {"after"}


def test_sections_that_are_left_in_another_order_keep_the_others(simulated: SimulatedCupti) -> None:
    """As a generator's, which is closed after its reader's section has begun."""
    times, _ = kernel_times(simulated)
    generator = times.begin("generator")
    reader = times.begin("reader")
    inside = simulated.calls("innermost")
    times.end("generator", generator)
    assert (simulated.calls("inside"), simulated.calls("innermost")) == (1, inside)
    simulated.launch("k", 1_000)
    times.end("reader", reader)
    assert (simulated.calls("inside"), simulated.is_recording) == (0, False)
    times.summaries()
    assert times.section_kernels().keys() == {"reader"}


def test_a_section_that_another_thread_leaves_ends_on_both(simulated: SimulatedCupti) -> None:
    times, _ = kernel_times(simulated)
    handed_over = times.begin("handed over")
    depth = []

    def elsewhere() -> None:
        own = times.begin("own")
        times.end("handed over", handed_over)
        depth.append(simulated.calls("inside"))
        times.end("own", own)
        depth.append(simulated.calls("inside"))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert depth == [1, 0]
    next_one = times.begin("next")
    assert simulated.calls("inside") == 1
    times.end("next", next_one)
    assert (simulated.calls("inside"), simulated.is_recording) == (0, False)


def test_a_buffer_that_makes_no_sense_is_counted_and_said(
    simulated: SimulatedCupti, caplog: pytest.LogCaptureFixture
) -> None:
    times, _ = kernel_times(simulated)
    section = times.begin("step")
    simulated.launch("before", 1_000)
    simulated.other_record(0)
    simulated.launch("behind it", 1_000)
    times.end("step", section)
    assert times.summaries().keys() == {"before"}
    assert "1 of CUPTI's buffers could be read in part only" in caplog.text
    section = times.begin("step")
    simulated.launch("later", 1_000)
    times.end("step", section)
    assert times.summaries().keys() == {"later"}
    assert caplog.text.count("in part only") == 1


def test_ever_new_sections_have_no_number_in_the_end(
    simulated: SimulatedCupti, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, _ = kernel_times(simulated)
    monkeypatch.setattr(KernelTimes, "_numbers", {})
    monkeypatch.setattr("nvrx_slurm.straggler.kernels._MOST_SECTIONS", 2)
    for number in range(4):
        section = times.begin(f"step {number}")
        simulated.launch("k", 1_000)
        times.end(f"step {number}", section)
    assert times.summaries()["k"][Statistic.NUM] == 4
    assert times.section_kernels().keys() == {"step 0", "step 1"}


def test_in_a_fork_it_does_nothing(simulated: SimulatedCupti) -> None:
    times, _ = kernel_times(simulated)
    entered = times.begin("step")
    child = os.fork()
    if child == 0:
        try:
            times.end("step", entered)
            times.end("inner", times.begin("inner"))
            os._exit(0 if simulated.is_recording else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    times.end("step", entered)
    assert not simulated.is_recording


def test_the_real_torch_profiler_tells_before_it_prepares_and_when_it_ends() -> None:
    watched = torch_profiler()
    told, has = [], []
    watched.before = lambda: told.append(watched.has_cupti())
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule) as profiler:
        for _ in range(4):
            has.append(watched.has_cupti())
            torch.zeros(1).add_(1)
            profiler.step()
    assert (told, has) == ([], [False] * 4), "without CUDA it leaves CUPTI alone"
    # What it is called with where there is a GPU.
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule) as profiler:
        for step in range(4):
            if step == 0:
                profiler.profiler = _of_cuda()
                profiler.acc_events = True
            has.append(watched.has_cupti())
            profiler.step()
    assert told == [False]
    assert has[4:] == [False, True, True, False]
    watched.before = lambda: None


def _of_cuda() -> Any:
    made = torch.autograd.profiler.profile(use_kineto=True, use_cpu=True)
    made.kineto_activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    return made


def test_a_tool_that_holds_cupti_leaves_cuda_events_and_that_is_said(
    simulated: SimulatedCupti, caplog: pytest.LogCaptureFixture
) -> None:
    simulated.set("fail:cuptiActivityRegisterCallbacks", 39)
    Detector.initialize()
    assert "kernels are not timed one by one, and sections by CUDA events" in caplog.text
    assert "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS" in caplog.text


def test_a_subscriber_of_before_is_found_by_trying_to_be_one() -> None:
    """In a process of its own: it is tried once."""
    extension()
    script = """
import ctypes, sys
from nvrx_slurm.straggler.kernels import KernelTimes, NoKernelTimesError, open_activity
from nvrx_slurm.straggler.torch_profiler import torch_profiler
ctypes.CDLL(sys.argv[1]).sim_set(b"fail:cuptiSubscribe", ctypes.c_long(39))
activity = open_activity(["/nowhere/libcupti.so.13", sys.argv[1]])
for _ in range(2):
    try:
        KernelTimes(activity, None, torch_profiler())
    except NoKernelTimesError as error:
        print(error)
library = ctypes.CDLL(sys.argv[1])
print(library.sim_calls(b"cuptiActivityRegisterCallbacks"), library.sim_is_recording())
library.sim_set(b"fail:cuptiSubscribe", ctypes.c_long(0))
KernelTimes(activity, None, torch_profiler())
print(activity.version, library.sim_calls(b"cuptiUnsubscribe"))
"""
    path = simulated_library()
    done = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, timeout=250, check=False
    )
    refused = f"{path}: a profiler holds CUPTI in this process"
    assert done.stdout.splitlines() == [refused, refused, "0 0", "130000 1"], done.stderr


def test_a_version_that_nobody_knows_is_refused() -> None:
    extension()
    script = """
import ctypes, sys
from nvrx_slurm.straggler.kernels import open_activity
ctypes.CDLL(sys.argv[1]).sim_set(b"version", ctypes.c_long(140000))
open_activity([sys.argv[1]])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, simulated_library()],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert "has the CUPTI API version 140000: those of CUDA 11 to 13 are known" in done.stderr


def test_cupti_that_stops_working_stops_no_training(
    simulated: SimulatedCupti, caplog: pytest.LogCaptureFixture
) -> None:
    times, fallback = kernel_times(simulated)
    simulated.set("fail:cuptiActivityEnable", 15)
    for _ in range(2):
        times.end("step", times.begin("step"))
    simulated.set("fail:cuptiActivityFlushAll", 15)
    assert times.summaries() == {}
    assert fallback.seen == ["step", "step"]
    assert caplog.text.count("CUPTI_ERROR_NOT_INITIALIZED") == 1
    simulated.set("fail:cuptiActivityEnable", 0)
    simulated.set("fail:cuptiActivityFlushAll", 0)
    section = times.begin("step")
    simulated.launch("k", 1_000)
    times.end("step", section)
    assert times.summaries()["k"][Statistic.NUM] == 1


def test_records_of_other_kinds_and_lost_ones_are_counted(
    simulated: SimulatedCupti, caplog: pytest.LogCaptureFixture
) -> None:
    times, _ = kernel_times(simulated)
    before = times.record_counts()
    section = times.begin("step")
    simulated.other_record(51)
    # More than all buffers hold, were nobody to read them; the reader may keep up.
    for _ in range(200):
        simulated.launch("k", 1_000, kernels=2000, call=GRAPH_LAUNCH)
    times.end("step", section)

    def more(name: str) -> int:
        return times.record_counts()[name] - before[name]

    taken = times.summaries()["k"][Statistic.NUM]
    # A kernel whose launch was among the dropped records is given up a period later.
    taken += times.summaries().get("k", {Statistic.NUM: 0.0})[Statistic.NUM]
    assert taken == more("kernels")
    read = sum(more(kind) for kind in ("kernels", "correlations", "launches", "unknown"))
    assert read + more("dropped") == 200 * (2000 + 2) + 1
    assert more("unknown") == 1
    assert (more("dropped") > 0) == ("CUPTI dropped" in caplog.text)


# --- where it is -----------------------------------------------------------------------------------------


def test_what_is_open_comes_first_then_torch_s_own_then_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, toolkit = tmp_path / "site-packages", tmp_path / "cuda"
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 0:0 1   /lib/libc.so.6\n7f02-7f03 r-xp 0 0:0 2   /opt/x/libcupti.so.12\n"
    )
    wanted = [
        packages / "nvidia/cu13/lib/libcupti.so.13",
        packages / "nvidia/cuda_cupti/lib/libcupti.so.12",
        toolkit / "extras/CUPTI/lib64/libcupti.so.12",
    ]
    for path in (*wanted, toolkit / "lib64" / "libcupti.so", packages / "nvidia/cu13/lib/libcupti_x.so.13"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setenv("CUDA_HOME", str(toolkit))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = list(cupti.libraries(maps, packages))
    assert found[:4] == ["/opt/x/libcupti.so.12", *map(str, wanted)]
    assert found[-1].startswith("libcupti.so.")
    assert len(found) == len(set(found))


def test_without_a_library_it_says_so(tmp_path: Path) -> None:
    extension()
    with pytest.raises(NoKernelTimesError, match="neither in torch's packages nor in the CUDA toolkit"):
        open_activity([])


def test_the_extension_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import nvrx_slurm.straggler

    monkeypatch.delattr(nvrx_slurm.straggler, "_cupti", raising=False)
    monkeypatch.setitem(sys.modules, "nvrx_slurm.straggler._cupti", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.set_level(logging.WARNING)
    Detector.initialize()
    Detector.shutdown()
    assert caplog.text.count("the extension is not built") == 1
