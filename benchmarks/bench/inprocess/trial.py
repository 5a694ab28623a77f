"""One job: its ranks started, watched until they are back or have had their time, and cleared away."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench import document, ending
from bench.inprocess import plans
from bench.inprocess.plans import RANKS, Plan
from bench.ports import free_port

WORKER = Path(__file__).with_name("worker.py")
_CLONE = Path(__file__).resolve().parents[3]
_MARKER = "NVRX_BENCH_JOB"
_POLL_S = 0.05


@dataclass(frozen=True)
class Contender:
    """Whose wrapper it is: ``who`` in the document's rows, and the Python that has it."""

    who: str
    python: str

    @property
    def environ(self) -> dict[str, str]:
        return {"NVRX_BENCH_WHO": self.who}


OURS = Contender(document.OURS, sys.executable)


def peer(environment: Path) -> Contender:
    return Contender("peer", str(environment / "bin" / "python"))


@dataclass(frozen=True)
class Outcome:
    """What became of one job."""

    who: str
    plan: Plan
    recovery_s: tuple[float, ...] = ()
    victim_survived: bool = False
    hung: bool = False
    """Processes had to be killed when its time was over."""
    begin_s: float | None = None
    end_s: float | None = None
    ping_ns: tuple[float, ...] = ()
    monitor: MonitorCost | None = None
    load: float = field(default=0.0)


@dataclass(frozen=True)
class MonitorCost:
    """What the processes beside the ranks cost, for each rank."""

    cpu_percent: float
    """Of one core."""
    uss_mib: float
    """Memory that would be free without it."""


def run(contender: Contender, plan: Plan, folder: Path, bound_s: float, *, watch_s: float = 0.0) -> Outcome:
    """Run one job.

    Args:
        contender: whose.
        plan: what its ranks do.
        folder: for its files; new.
        bound_s: so long after the last fault, or the start where there is none, it counts as hung.
        watch_s: how long to measure what monitors cost, once all ranks run.
    """
    folder.mkdir(parents=True)
    load = round(os.getloadavg()[0], 1)
    with _ranks(contender, plan, folder) as (ranks, job):
        monitor = _monitor_cost(folder, ranks, job, watch_s) if watch_s else None
        hung = not _wait(plan, folder, ranks, bound_s)
        marks = plans.read_marks(folder)
    ends = None if hung else plans.begin_and_end(marks)
    return Outcome(
        contender.who,
        plan,
        tuple(plans.recoveries(plan, marks)),
        plans.victim_survived(plan, marks),
        hung,
        *(ends or (None, None)),
        tuple(line["ns"] for each in marks for line in each.lines if line["mark"] == "pings"),
        monitor,
        load,
    )


def _wait(plan: Plan, folder: Path, ranks: list[subprocess.Popen[bytes]], bound_s: float) -> bool:
    """Tell whether all ranks ended in time."""
    start_s = 90.0
    deadline = time.monotonic() + start_s + bound_s
    seen = 0
    while time.monotonic() < deadline:
        if all(rank.poll() is not None for rank in ranks):
            return True
        faults = sum(len(marks.times("fault")) for marks in plans.read_marks(folder))
        if faults > seen:
            seen, deadline = faults, time.monotonic() + plan.soft_s + bound_s
        time.sleep(_POLL_S)
    return False


@contextlib.contextmanager
def _ranks(
    contender: Contender, plan: Plan, folder: Path
) -> Iterator[tuple[list[subprocess.Popen[bytes]], str]]:
    job = uuid.uuid4().hex
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("NVRX_", "SLURM_"))},
        **contender.environ,
        _MARKER: job,
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "error",
        "PYTHONPATH": "" if contender.who == "peer" else str(_CLONE),
    }
    with contextlib.ExitStack() as stack:
        stack.callback(_clear, job)
        log = stack.enter_context(open(folder / "log", "wb"))
        started = [
            stack.enter_context(
                ending.program(
                    [contender.python, str(WORKER), plan.to_json(), str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**environ, "RANK": str(rank)},
                )
            )
            for rank in range(RANKS)
        ]
        try:
            yield started, job
        finally:
            for rank in started:
                rank.kill()


def _of_job(job: str) -> list[psutil.Process]:
    """Return all processes of a job, those that were made daemons included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARKER) == job:
                found.append(process)
    return found


def _clear(job: str) -> None:
    for process in _of_job(job):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _monitor_cost(
    folder: Path, ranks: list[subprocess.Popen[bytes]], job: str, watch_s: float
) -> MonitorCost | None:
    while sum(bool(marks.times("enter")) for marks in plans.read_marks(folder)) < RANKS:
        if any(rank.poll() is not None for rank in ranks):
            return None
        time.sleep(_POLL_S)
    monitors = [process for process in _of_job(job) if process.pid not in {rank.pid for rank in ranks}]
    before = sum(sum(process.cpu_times()[:2]) for process in monitors)
    began = time.monotonic()
    time.sleep(watch_s)
    used = sum(sum(process.cpu_times()[:2]) for process in monitors) - before
    took = time.monotonic() - began
    memory = sum(process.memory_full_info().uss for process in monitors)
    return MonitorCost(100 * used / took / RANKS, memory / 2**20 / RANKS)
