"""GPUs between two cycles and NUMA nodes of ranks, in real jobs; the driver is a stub that reads files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import HERE, RANK, LocalJob, until

from nvrx_slurm import journal
from nvrx_slurm.journal import CycleStarted, FaultDetected, GpuMemoryLeft

Jobs = Callable[..., LocalJob]
TRAIN = RANK + 'write(f"pid{rank}.{cycle}", os.getpid())\nif cycle == 0:\n    wait_for("end")\n'


def on_gpus(job: Jobs, *options: str) -> LocalJob:
    """A job with GPUs 3 and 4 of its node."""
    run = job(TRAIN, *options)
    run.environment_of_agents(PYTHONPATH=f"{run.stub_torch}:{HERE / 'stub_nvml'}", CUDA_VISIBLE_DEVICES="3,4")
    return run


def hold(run: LocalJob, gpu: int, *pids: int) -> None:
    new = run.root / "gpu.new"
    new.write_text("".join(f"{pid} 900\n" for pid in pids))
    new.rename(run.root / f"gpu{gpu}")


def kill_rank_1(run: LocalJob) -> int:
    """Kill it while its memory is in use, and go on to be so; return its process id."""
    pid = int(run.start().wait_for_file("pid1.0"))
    run.wait_for_file("nvml_opened")
    hold(run, 4, pid)
    os.kill(pid, signal.SIGKILL)
    run.wait_for(FaultDetected)
    return pid


def test_the_next_cycle_begins_when_the_memory_of_the_jobs_gpus_is_free(job: Jobs) -> None:
    run = on_gpus(job)
    kill_rank_1(run)
    until("the ranks are gone", lambda: not run.ranks(0, 1))
    free_at = time.time()
    hold(run, 4)
    assert run.wait() == 0, run.stderr
    began = [record.ts for record in run.records if isinstance(record.event, CycleStarted)]
    assert len(began) == 2
    assert began[1] > free_at
    assert run.events(GpuMemoryLeft) == []
    assert (run.root / "nvml_opened").read_text() == "opened\n", "once for all cycles"


def test_memory_that_does_not_get_free_costs_the_time_out_and_is_told(job: Jobs) -> None:
    run = on_gpus(job, "--ft-gpu-memory-reclaim-timeout", "300ms", "--ft-gpu-memory-tolerance-mb", "800")
    pid = kill_rank_1(run)
    assert run.wait() == 0, run.stderr
    (left,) = run.events(GpuMemoryLeft)
    assert (left.node, left.gpu, left.used_mb) == ("n1", "GPU-4", 900.0)
    assert left.processes == [f"{pid} (900 MiB, gone)"]
    assert 0.3 <= left.waited_s < 30
    assert "900 MiB of GPU-4 are still in use after" in run.stderr


@pytest.mark.parametrize(
    ("gpu", "options"),
    [(0, ()), (4, ("--gpu-memory-tolerance-mb", "1000")), (4, ("--gpu-memory-reclaim-timeout", "0"))],
    ids=["a GPU of another job", "within the tolerance", "switched off"],
)
def test_w25_nothing_else_is_waited_for(job: Jobs, gpu: int, options: tuple[str, ...]) -> None:
    run = on_gpus(job, *options).start()
    pid = int(run.wait_for_file("pid1.0"))
    hold(run, gpu, pid)
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert run.events(GpuMemoryLeft) == []


def numa_cpus(node: int) -> set[int]:
    text = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
    ranges = [part.split("-") for part in text.strip().split(",")]
    return {cpu for first, *last in ranges for cpu in range(int(first), int(last[0] if last else first) + 1)}


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0/cpulist").exists(), reason="this kernel shows no NUMA nodes"
)
@pytest.mark.parametrize("warm", ["on", "off"])
@pytest.mark.parametrize("strict", ["on", "off"])
def test_a_rank_is_bound_to_the_cpus_and_the_memory_of_its_numa_node(
    job: Jobs, warm: str, strict: str
) -> None:
    script = """
import os
print(sorted(os.sched_getaffinity(0)))
print(open("/proc/self/numa_maps").read().split()[1])
"""
    run = job(script, "--numa-bind", "auto", "--numa-bind-strict", strict, "--warm-start", warm, ranks=1)
    assert run.run() == 0, run.stderr
    cpus, policy = run.log("rank_0").splitlines()
    allowed = os.sched_getaffinity(0)
    nodes = [int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*")]
    node = min(number for number in nodes if numa_cpus(number) & allowed)
    assert cpus == str(sorted(numa_cpus(node) & allowed))
    assert policy == (f"bind:{node}" if strict == "on" else f"prefer:{node}")


def test_a_wrong_number_of_gpus_for_each_numa_node_fails_with_its_name(job: Jobs) -> None:
    run = job(RANK, "--max-restarts", "0", ranks=1)
    run.environment_of_agents(NVRX_GPUS_PER_NUMA="two")
    assert run.run() == 1
    (fault,) = run.events(FaultDetected)
    assert fault.kind is journal.FaultKind.START
    assert "NVRX_GPUS_PER_NUMA=two: a number above 0 is accepted" in fault.detail
