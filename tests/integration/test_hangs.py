"""Ranks that hang in every way: found in time, evidence kept, the job goes on. Real processes, no Slurm."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import BIN, HERE, JOB_ID, Event, LocalJob

from nvrx_slurm import linux
from nvrx_slurm.agent.evidence import examine
from nvrx_slurm.journal import (
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    HangEvidence,
    TimeoutsCalculated,
    TracesKept,
    WorkersStopped,
)

MakeJob = Callable[..., LocalJob]
TIMEOUT_S = 2.0
RECORDS = "nvrx_slurm.agent.hang_records"
SOON_S = 20.0
"""Not the minute for which ranks hang. How soon it is on a calm machine, benchmarks/recovery.py measures."""


# The ranks wait for each other once a step, as a collective would make them do. In cycle 0 rank 1 hangs.
PREAMBLE = """
import ctypes, os, signal, sys, time
from pathlib import Path
from nvrx_slurm.fault_tolerance import RankMonitorClient

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cycle = os.environ["TORCHELASTIC_RESTART_COUNT"]
meeting = Path(os.environ["TEST_FOLDER"])
client = RankMonitorClient()

def meet(step):
    (meeting / f"meet.{cycle}.{step}.{rank}").touch()
    while sum(1 for r in range(world) if (meeting / f"meet.{cycle}.{step}.{r}").exists()) < world:
        time.sleep(0.002)

def culprit(step):
    return cycle == "0" and rank == 1 and step == 3

def note_hang():
    if not (meeting / "hang").exists():
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
meet("start")
for step in range(6):
    if culprit(step):
        {hang}()
    if culprit(step + 1):
        note_hang()  # its deadline runs from this heartbeat, its last
    client.send_heartbeat(step=step)
    meet(step)
client.shutdown_workload_monitoring()
"""


def first(job: LocalJob, kind: type[Event]) -> tuple[float, Event]:
    for record in job.records:
        if isinstance(record.event, kind):
            return record.ts, record.event
    raise AssertionError(f"no {kind.__name__}:\n{job.stderr}")


def last(job: LocalJob, kind: type[Event], cycle: int) -> Event:
    return [r.event for r in job.records if isinstance(r.event, kind) and r.cycle == cycle][-1]


def hung_at(job: LocalJob) -> float:
    return float((job.root / "hang").read_text())


HANGS = {
    "hang_in_python": "R",
    "hang_in_c_holding_the_gil": "S",
    "hang_in_c_without_the_gil": "S",
    "be_stopped": "T",
}
"""How, and the state of the process."""


@pytest.mark.parametrize("hang", HANGS)
def test_a_hung_rank_is_found_in_time_its_stacks_are_kept_and_all_restart(job: MakeJob, hang: str) -> None:
    script = PREAMBLE + HEARTBEATS.format(hang=hang)
    it = job(script, "--heartbeat-timeout", f"{TIMEOUT_S}s", nodes=2, ranks=1)
    it.set_in_agents(RECORDS, _EVIDENCE_S=SOON_S)
    assert it.run() == 0, it.stderr

    at, fault = first(it, FaultDetected)
    assert (fault.kind, fault.rank) == (FaultKind.HANG, 1), it.stderr
    assert fault.detail.startswith(f"no heartbeat for {TIMEOUT_S:g} s; ")
    assert 0 <= at - hung_at(it) - TIMEOUT_S < SOON_S, it.stderr

    _, found = first(it, HangEvidence)
    assert (found.rank, found.source, found.process_state) == (1, "faulthandler", HANGS[hang])
    assert hang in found.stacks
    assert found.file == "cycles/0/rank_1.stacks"
    file = it.run_dir / found.file
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"in {hang}" in file.read_text()

    stopped, _ = first(it, WorkersStopped)
    assert stopped - at < SOON_S, it.stderr
    assert len(it.events(CycleStarted)) == 2, it.stderr


def test_w02_w05_an_outer_section_is_enforced_while_an_inner_one_is_open(job: MakeJob) -> None:
    """W2 and W5, with processes; no section has a magic name, no heartbeat is ever sent."""
    script = """
client.init_workload_monitoring()
if cycle == "0" and rank == 1:
    note_hang()
    client.start_section("outer")
    client.start_section("inner")
    time.sleep(60)
"""
    options = ("--ft-rank-section-timeouts", "outer:0.4,inner:50", "--ft-rank-out-of-section-timeout", "40")
    it = job(PREAMBLE + script, *options)
    assert it.run() == 0, it.stderr
    at, fault = first(it, FaultDetected)
    assert fault.detail.startswith("section 'outer' open for 0.4 s; ")
    assert 0 <= at - hung_at(it) - 0.4 < SOON_S, it.stderr
    _, found = first(it, HangEvidence)
    assert set(found.sections) == {"outer", "inner"}
    assert found.sections["outer"] >= 0.4


def test_a_rank_outside_of_all_sections_for_too_long_is_hung(job: MakeJob, tmp_path: Path) -> None:
    script = """
client.init_workload_monitoring()
client.start_section("forward")
if cycle == "0":
    note_hang()
client.end_section("forward")
if cycle == "0":
    time.sleep(60)
"""
    config = tmp_path / "ft.yaml"
    config.write_text(
        "plugins:\n- fault_tolerance:\n    rank_section_timeouts: {forward: 9}\n"
        "    rank_out_of_section_timeout: 30\n"
    )
    options = ("--ft-cfg-path", str(config), "--ft-rank-out-of-section-timeout", "0.4")
    it = job(PREAMBLE + script, *options, ranks=1)
    assert it.run() == 0, it.stderr
    at, fault = first(it, FaultDetected)
    assert fault.detail.startswith("no section open for 0.4 s; ")
    assert 0 <= at - hung_at(it) - 0.4 < SOON_S, it.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fault_tolerance: {rank_heartbeat_timout: 3}", "ft.yaml: unknown key 'rank_heartbeat_timout'"),
        ("fault_tolerance: {rank_heartbeat_timeout: soon}", "ft.yaml: rank_heartbeat_timeout: 'soon'"),
        ("other: 1", "ft.yaml: there is no mapping 'fault_tolerance'"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_starts(
    job: MakeJob, tmp_path: Path, text: str, says: str
) -> None:
    """W14: there it is passed over, and hangs are not looked for."""
    (tmp_path / "ft.yaml").write_text(text)
    it = job("", "--ft-cfg-path", str(tmp_path / "ft.yaml"))
    assert it.run() == 2
    assert says in it.stderr
    assert not it.run_dir.exists()


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


def test_calculated_time_outs_are_merged_kept_and_hold_in_later_cycles_and_jobs(
    job: MakeJob, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    # With so large a factor a step that is slow because the machine is busy is no hang.
    options = ("--section-timeouts", "step:60", "--safety-factor", "100", "--run-dir", str(shared))

    def run() -> LocalJob:
        it = job(PREAMBLE + CALCULATING, *options, real_torch=True)
        it.run_dir = shared
        assert it.run(60) == 0, it.stderr
        return it

    def began_with(cycle: int) -> tuple[str, str]:
        words = it.log("rank_0", cycle).split("begins with ")[1].split()
        return words[0], words[1]

    it = run()
    saved = json.loads((shared / "ft_state.json").read_text())["current_timeouts"]
    assert stat.S_IMODE((shared / "ft_state.json").stat().st_mode) == 0o600
    ended = last(it, TimeoutsCalculated, cycle=1)
    assert saved["heartbeat"]["subsequent"] == ended.subsequent
    assert saved["section"]["section"] == ended.section
    assert 5 <= (ended.section["step"] or 0) < 60, "the slower rank decides, times the safety factor"

    assert began_with(0) == ("2700.0", "60.0")
    first_cycle = last(it, TimeoutsCalculated, cycle=0)
    assert began_with(1) == (str(first_cycle.subsequent), str(first_cycle.section["step"]))
    it = run()
    assert began_with(2) == (str(ended.subsequent), str(ended.section["step"]))

    (shared / "ft_state.json").write_text("{}")
    refused = job("", *options)
    assert refused.run() == 2
    assert "ft_state.json: version None, 1 is accepted; remove it" in refused.stderr


def test_w01_a_job_whose_cycle_ends_before_the_first_heartbeat_goes_on(job: MakeJob) -> None:
    """W1: there every later cycle fails at its first heartbeat."""
    script = """
client.init_workload_monitoring()
if cycle != "1":
    client.send_heartbeat(step=1)
    meet(0)
if cycle in "01":
    while not (meeting / f"seen.{cycle}").exists():
        time.sleep(0.01)
    sys.exit(3 if rank else 0)
client.send_heartbeat(step=2)
"""
    it = job(PREAMBLE + script).start()
    it.wait_for(FirstStep)
    it.touch("seen.0"), it.touch("seen.1")
    assert it.wait() == 0, it.stderr
    assert len(it.events(CycleStarted)) == 3
    assert [r.cycle for r in it.records if isinstance(r.event, FirstStep)] == [0, 2]
    assert {fault.kind for fault in it.events(FaultDetected)} == {FaultKind.EXIT}


def test_py_spy_is_asked_first_where_it_is_installed(job: MakeJob, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "py-spy"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "Process $3: stacks by py-spy"\n')
    tool.chmod(0o755)
    path = f"{tool.parent}:{HERE / 'stand_ins'}:{BIN}:{os.environ['PATH']}"
    it = job(
        PREAMBLE + HEARTBEATS.format(hang="hang_in_python"), "--heartbeat-timeout", f"{TIMEOUT_S}s", PATH=path
    )
    assert it.run() == 0, it.stderr
    _, found = first(it, HangEvidence)
    assert (found.source, found.stacks.strip()) == ("py-spy", f"Process {found.pid}: stacks by py-spy")


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
client.init_workload_monitoring()
for step in range(4):
    if cycle == "0" and rank == 3 and step == 2:
        note_hang()
        ctypes.PyDLL(None).sleep(60)
    dist.all_reduce(torch.ones(2))
    client.send_heartbeat(step=step)
client.shutdown_workload_monitoring()
dist.destroy_process_group()
"""


def test_the_flight_recorder_of_every_rank_of_a_real_hang_is_kept_before_anything_is_killed(
    job: MakeJob,
) -> None:
    """The culprit holds the GIL, the others wait in gloo for it; all are on two nodes."""
    it = job(PREAMBLE + GLOO, "--heartbeat-timeout", "5s", nodes=2, ranks=2, real_torch=True)
    it.set_in_agents(RECORDS, _TRACE_S=SOON_S)
    assert it.run(250) == 0, it.stderr
    assert first(it, FaultDetected)[1].kind is FaultKind.HANG
    kept = {event.node: event for event in it.events(TracesKept)}
    assert {node: event.ranks for node, event in kept.items()} == {"n1": [0, 1], "n2": [2, 3]}
    assert all(event.missing == {} for event in kept.values()), kept

    folder = it.run_dir / kept["n1"].folder
    assert folder == it.run_dir / "cycles" / "0" / "flight_recorder"
    enqueued = []
    for rank in range(4):
        trace = json.loads((folder / f"rank_{rank}").read_text())
        enqueued.append(trace["pg_status"]["0"]["last_enqueued_collective"])
        assert {entry["profiling_name"] for entry in trace["entries"]} == {"gloo:all_reduce"}
        manifest = json.loads((folder / f"rank_{rank}.manifest.json").read_text())
        assert (manifest["rank"], manifest["node"]) == (rank, "n1" if rank < 2 else "n2")
        assert (manifest["job"], manifest["cycle"]) == (JOB_ID, 0)
        assert manifest["pid"] == it.has_started(rank)
    assert enqueued == ["3", "3", "3", "2"], "the culprit has not come to the third collective"


def test_a_rank_without_a_client_has_no_trace_and_that_is_said(job: MakeJob) -> None:
    script = """
if rank == 1:
    time.sleep(60 if cycle == "0" else 0)
else:
    client.init_workload_monitoring()
    client.send_heartbeat()
    time.sleep(60 if cycle == "0" else 0)
"""
    it = job(PREAMBLE + script, "--heartbeat-timeout", f"{TIMEOUT_S}s")
    assert it.run() == 0, it.stderr
    _, kept = first(it, TracesKept)
    assert (kept.ranks, set(kept.missing)) == ([], {0, 1})
    assert "it has no RankMonitorClient, or has not imported torch.distributed" in kept.missing[1]


# --- one process, examined ---------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[Callable[..., int]]:
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


def test_a_process_without_a_handler_is_not_killed_by_the_question(
    tmp_path: Path, sleeper: Callable[..., int]
) -> None:
    pid = sleeper()
    found = examine(pid, tmp_path / "x.stacks", None, 0.5)
    assert (found.source, found.stacks) == ("", "")
    assert "no handler" in found.note
    assert linux.process_state(pid) in ("R", "S")


@pytest.mark.parametrize(
    ("tool", "note"),
    [
        ("echo 'Permission denied' >&2; exit 1", "py-spy failed: Permission denied"),
        ("sleep 60", "py-spy did not answer within"),
    ],
)
def test_where_py_spy_fails_faulthandler_is_asked_in_the_time_that_is_left(
    tmp_path: Path,
    sleeper: Callable[..., int],
    tool: str,
    note: str,
) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(f"#!/bin/sh\n{tool}\n")
    py_spy.chmod(0o755)
    pid = sleeper(str(tmp_path / "x.page"))
    began = time.monotonic()
    found = examine(pid, tmp_path / "x.stacks", str(py_spy), 4.0)
    assert time.monotonic() - began < 20, "not the 60 s of the tool"
    assert found.source == "faulthandler"
    assert "wait_for_ever" in found.stacks
    assert note in found.note


def test_a_process_that_does_not_answer_costs_no_more_than_the_time_given(
    tmp_path: Path, sleeper: Callable[..., int]
) -> None:
    pid = sleeper(str(tmp_path / "x.page"))
    began = time.monotonic()
    found = examine(pid, tmp_path / "elsewhere.stacks", None, 0.3)
    assert time.monotonic() - began < 20
    assert "did not answer" in found.note
