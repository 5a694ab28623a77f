"""Ranks that hang in every way: found in time, evidence kept, the job goes on. Real processes, no Slurm."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvrx_slurm import linux
from nvrx_slurm.agent.evidence import examine
from nvrx_slurm.journal import (
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    HangEvidence,
    JobEnded,
    Record,
    TimeoutsCalculated,
    Verdict,
    WorkersStopped,
    read_journal,
)

LOCAL_JOB = Path(__file__).with_name("local_job.py")
TIMEOUT_S = 0.5
ANY_SIGN_S = 0.1

# The ranks wait for each other once a step, as a collective would make them do. In cycle 0 rank 1 hangs.
PREAMBLE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from nvrx_slurm.fault_tolerance import RankMonitorClient

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
meeting = Path(os.environ["NVRX_RUN_DIR"]) / "meeting"
meeting.mkdir(exist_ok=True)
client = RankMonitorClient()

def meet(step):
    (meeting / f"{cycle}.{step}.{rank}").touch()
    while sum(1 for r in range(world) if (meeting / f"{cycle}.{step}.{r}").exists()) < world:
        time.sleep(0.002)

def culprit(step):
    return cycle == "0" and rank == 1 and step == 3

def note_hang():
    (meeting / "hang").write_text(str(time.time()))

def hang_in_python():
    note_hang()
    while True: pass

def hang_in_c_holding_the_gil():
    note_hang()
    ctypes.PyDLL(None).sleep(60)

def hang_in_c_without_the_gil():
    note_hang()
    ctypes.CDLL(None).sleep(60)

def be_stopped():
    note_hang()
    os.kill(os.getpid(), signal.SIGSTOP)

"""
HEARTBEATS = """
client.init_workload_monitoring()
for step in range(6):
    if culprit(step):
        {hang}()
    client.send_heartbeat(step=step)
    meet(step)
client.shutdown_workload_monitoring()
"""


class Outcome:
    def __init__(self, run_dir: Path, code: int, output: str) -> None:
        self.run_dir = run_dir
        self.code = code
        self.output = output
        self.records = read_journal(run_dir / "journal.jsonl")

    def all(self, kind: type) -> list[Record]:
        return [record for record in self.records if isinstance(record.event, kind)]

    def first(self, kind: type) -> Record:
        found = self.all(kind)
        assert found, f"no {kind.__name__}:\n{self.output}"
        return found[0]

    @property
    def hung_at(self) -> float:
        return float((self.run_dir / "meeting" / "hang").read_text())


def run(
    tmp_path: Path, script: str, *options: str, nodes: int = 2, slots: int = 1, path: str = ""
) -> Outcome:
    file = tmp_path / "train.py"
    file.write_text(PREAMBLE + script)
    run_dir = tmp_path / "run"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("NVRX_", "SLURM_"))}
    environ["PATH"] = path + environ["PATH"]
    job = subprocess.Popen(
        [sys.executable, str(LOCAL_JOB), str(run_dir), str(nodes), str(slots), str(file), *options],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)
            job.communicate(timeout=30)
    return Outcome(run_dir, job.returncode, output)


HANGS = {
    "hang_in_python": "R",
    "hang_in_c_holding_the_gil": "S",
    "hang_in_c_without_the_gil": "S",
    "be_stopped": "T",
}
"""How, and the state of the process."""


@pytest.mark.parametrize("hang", HANGS)
def test_a_hung_rank_is_found_in_time_its_stacks_are_kept_and_all_restart(tmp_path: Path, hang: str) -> None:
    outcome = run(tmp_path, HEARTBEATS.format(hang=hang), f"rank_heartbeat_timeout={TIMEOUT_S}")
    assert outcome.code == 0, outcome.output

    fault = outcome.first(FaultDetected)
    assert fault.event.kind is FaultKind.HANG
    assert fault.event.detail.startswith(f"no heartbeat for {TIMEOUT_S} s; ")
    assert fault.event.rank == 1
    # The deadline ran from its last heartbeat, a moment before it hung.
    assert -0.05 <= fault.ts - outcome.hung_at - TIMEOUT_S < ANY_SIGN_S

    found = outcome.first(HangEvidence).event
    assert found.rank == 1
    assert found.source == "faulthandler"
    assert found.seconds < 1
    file = outcome.run_dir / found.file
    assert found.file == f"cycles/0/rank_{found.rank}.stacks"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    text = file.read_text()
    assert found.process_state == HANGS[hang]
    assert f"in {hang}" in text
    assert hang in found.stacks

    stopped = outcome.first(WorkersStopped)
    assert stopped.ts - fault.ts < 1.5
    assert len(outcome.all(CycleStarted)) == 2
    assert outcome.first(JobEnded).event.code == 0


SECTIONS = """
client.init_workload_monitoring()
if cycle == "0" and rank == 1:
    client.start_section("outer")
    client.start_section("inner")
    note_hang()
    time.sleep(60)
"""


def test_an_outer_section_is_enforced_while_an_inner_one_is_open(tmp_path: Path) -> None:
    """W2 and W5, with processes; no section has a magic name, no heartbeat is ever sent."""
    outcome = run(
        tmp_path,
        SECTIONS,
        "rank_section_timeouts={outer: 0.4, inner: 50}",
        "rank_out_of_section_timeout=40",
    )
    assert outcome.code == 0, outcome.output
    fault = outcome.first(FaultDetected)
    assert fault.event.detail.startswith("section 'outer' open for 0.4 s; ")
    assert 0 <= fault.ts - outcome.hung_at - 0.4 < ANY_SIGN_S
    found = outcome.first(HangEvidence).event
    assert set(found.sections) == {"outer", "inner"}
    assert found.sections["outer"] >= 0.4


def test_a_rank_outside_of_all_sections_for_too_long_is_hung(tmp_path: Path) -> None:
    script = """
client.init_workload_monitoring()
client.start_section("forward")
client.end_section("forward")
if cycle == "0":
    note_hang()
    time.sleep(60)
"""
    outcome = run(
        tmp_path, script, "rank_section_timeouts={forward: 9}", "rank_out_of_section_timeout=0.4", nodes=1
    )
    assert outcome.code == 0, outcome.output
    fault = outcome.first(FaultDetected)
    assert fault.event.detail.startswith("no section open for 0.4 s; ")
    assert 0 <= fault.ts - outcome.hung_at - 0.4 < ANY_SIGN_S


CALCULATING = """
import torch.distributed as dist
dist.init_process_group("gloo")
client.init_workload_monitoring()
print("begins with", client.hb_timeouts.subsequent, client.section_timeouts.section["step"], flush=True)
for step in range(4):
    client.start_section("step")
    time.sleep(0.05 if rank else 0.02)
    client.end_section("step")
    client.send_heartbeat(step=step)
assert client.calculate_and_set_hb_timeouts()
assert client.calculate_and_set_section_timeouts()
every = [None] * world
dist.all_gather_object(every, client.state_dict())
assert every[0] == every[1], every
if cycle == "0":
    time.sleep(0.2)
    sys.exit(rank)
dist.destroy_process_group()
client.shutdown_workload_monitoring()
"""


def test_calculated_time_outs_are_merged_kept_and_hold_in_later_cycles_and_jobs(tmp_path: Path) -> None:
    options = ["rank_section_timeouts={step: 60}", "safety_factor=10"]
    outcome = run(tmp_path, CALCULATING, *options)
    assert outcome.code == 0, outcome.output
    calculated = outcome.first(TimeoutsCalculated).event
    assert calculated.subsequent is not None
    saved = json.loads((outcome.run_dir / "ft_state.json").read_text())
    last = [r.event for r in outcome.all(TimeoutsCalculated)][-1]
    assert saved["current_timeouts"]["heartbeat"]["subsequent"] == last.subsequent
    assert stat.S_IMODE((outcome.run_dir / "ft_state.json").stat().st_mode) == 0o600
    step = last.section["step"]
    assert step is not None
    assert 0.5 <= step < 5, "the slower rank decides, times the safety factor"

    def began_with(cycle: int) -> tuple[str, str]:
        log = (outcome.run_dir / f"cycles/{cycle}/rank_0.log").read_text()
        words = log.split("begins with ")[1].split()
        return words[0], words[1]

    assert began_with(0) == ("2700.0", "60.0")
    in_cycle_0 = [r.event for r in outcome.all(TimeoutsCalculated) if r.cycle == 0][-1]
    assert began_with(1) == (str(in_cycle_0.subsequent), str(in_cycle_0.section["step"]))
    again = run(tmp_path, CALCULATING, *options)
    assert again.code == 0, again.output
    assert began_with(2) == (str(last.subsequent), str(step))


def test_a_job_whose_cycle_ends_before_the_first_heartbeat_goes_on(tmp_path: Path) -> None:
    """W1: there every later cycle fails at its first heartbeat."""
    script = """
if cycle != "1":
    client.init_workload_monitoring()
    client.send_heartbeat(step=1)
    meet(0)
else:
    client.init_workload_monitoring()
if cycle in "01":
    time.sleep(0.1)
    sys.exit(3 if rank else 0)
client.send_heartbeat(step=2)
"""
    outcome = run(tmp_path, script)
    assert outcome.code == 0, outcome.output
    assert len(outcome.all(CycleStarted)) == 3
    assert [r.cycle for r in outcome.all(FirstStep)] == [0, 2]
    assert all(r.event.kind is FaultKind.EXIT for r in outcome.all(Verdict))


def test_py_spy_is_asked_first_where_it_is_installed(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "py-spy"
    tool.write_text('#!/bin/sh\necho "Process $3: stacks by py-spy"\n')
    tool.chmod(0o755)
    outcome = run(
        tmp_path,
        HEARTBEATS.format(hang="hang_in_python"),
        f"rank_heartbeat_timeout={TIMEOUT_S}",
        path=f"{tools}:",
    )
    found = outcome.first(HangEvidence).event
    assert (found.source, found.stacks.strip()) == ("py-spy", f"Process {found.pid}: stacks by py-spy")


# --- one process, examined ---------------------------------------------------------------------------


@pytest.fixture
def sleeper(tmp_path: Path):  # type: ignore[no-untyped-def]
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from nvrx_slurm.fault_tolerance.stacks import StacksOnRequest\n"
        "if len(sys.argv) > 1: stacks = StacksOnRequest(Path(sys.argv[1]))\n"
        "def wait_for_ever():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "wait_for_ever()\n"
    )
    started = []

    def start(*arguments: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_without_a_handler_is_not_killed_by_the_question(tmp_path: Path, sleeper) -> None:  # type: ignore[no-untyped-def]
    pid = sleeper()
    found = examine(pid, tmp_path / "x.stacks", None, 0.5)
    assert (found.source, found.stacks) == ("", "")
    assert "no handler" in found.note
    assert linux.process_state(pid) == "S"


@pytest.mark.parametrize(
    ("tool", "note"),
    [
        ("echo 'Permission denied' >&2; exit 1", "py-spy failed: Permission denied"),
        ("sleep 60", "py-spy did not answer within"),
    ],
)
def test_where_py_spy_fails_faulthandler_is_asked_in_the_time_that_is_left(
    tmp_path: Path,
    sleeper,  # type: ignore[no-untyped-def]
    tool: str,
    note: str,
) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(f"#!/bin/sh\n{tool}\n")
    py_spy.chmod(0o755)
    pid = sleeper(str(tmp_path / "x.page"))
    began = time.monotonic()
    found = examine(pid, tmp_path / "x.stacks", str(py_spy), 0.8)
    assert time.monotonic() - began < 1.0
    assert found.source == "faulthandler"
    assert "wait_for_ever" in found.stacks
    assert note in found.note


def test_a_process_that_does_not_answer_costs_no_more_than_the_time_given(tmp_path: Path, sleeper) -> None:  # type: ignore[no-untyped-def]
    pid = sleeper(str(tmp_path / "x.page"))
    began = time.monotonic()
    found = examine(pid, tmp_path / "elsewhere.stacks", None, 0.3)
    assert time.monotonic() - began < 0.5
    assert "did not answer" in found.note
