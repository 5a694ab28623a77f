"""A job whose cycles are attributed in the background: real processes, no Slurm."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from harness import BIN, RANK, LocalJob, is_alive, until

from nvrx_slurm import journal
from nvrx_slurm.attribution.history import read_history
from nvrx_slurm.coordinator import attributor
from nvrx_slurm.coordinator.attributor import Attributor
from nvrx_slurm.journal import CycleAttributed, CycleStarted, FaultKind, JobEnded, Record, Verdict
from tests.attribution_server import recommends, serving

MakeJob = Callable[..., LocalJob]
ON = ("--ft-attribution", "on")
NO_RESTART = (*ON, "--ft-attribution-stop-action", "no-restart")


def make_silent(pipe: Path) -> None:
    """Make a pipe whose writer never writes, for as long as this process is there."""
    os.mkfifo(pipe)
    os.open(pipe, os.O_RDWR | os.O_CLOEXEC)


def report(job: LocalJob) -> str:
    command = [str(BIN / "nvrx-report"), str(job.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    return " ".join(done.stdout.split())


def test_a_missing_module_ends_the_job_in_its_second_try(job: MakeJob) -> None:
    script = RANK + "if cycle == 0:\n    import no_such_module\nwait_for('what nobody makes')"
    it = job(script, *NO_RESTART, "--max-restarts", "50")
    assert it.run() == 93, it.stderr
    assert len(it.events(CycleStarted)) == 2
    (found,) = it.events(CycleAttributed)
    assert (found.category, found.rule) == ("code.import", "4-deterministic"), it.stderr
    assert found.where.startswith("cycles/0/merged.log:")
    assert it.events(Verdict)[-1].rule == "4-deterministic"
    assert "no other try after cycle 0: a module is missing" in it.events(JobEnded)[0].why
    # The restart did not wait for it.
    events = [type(record.event) for record in it.records]
    assert events.index(CycleAttributed) > len(events) - 1 - events[::-1].index(CycleStarted)
    assert it.nothing_is_left()


def test_a_program_that_fails_at_once_has_two_tries(job: MakeJob) -> None:
    it = job(
        RANK + "import no_such_module", *NO_RESTART, "--max-restarts", "50", "--max-no-progress-cycles", "0"
    )
    assert it.run() == 93, it.stderr
    assert len(it.events(CycleStarted)) == 2, it.stderr


def test_an_exception_that_repeats_without_progress_ends_the_job_after_its_second_try(job: MakeJob) -> None:
    script = RANK + "if cycle == 1:\n    wait_for('go')\nif cycle < 2:\n    raise ValueError('bad sample')\n"
    it = job(script + "wait_for('what nobody makes')", *NO_RESTART, "--max-restarts", "50").start()
    it.wait_for(CycleAttributed)
    it.touch("go")
    assert it.wait() == 93, it.stderr
    assert [event.rule for event in it.events(CycleAttributed)] == ["11-restart", "7-repeated"]
    assert len(it.events(CycleStarted)) == 3


def test_what_is_found_is_told_kept_and_changes_nothing_unless_that_was_asked(job: MakeJob) -> None:
    script = RANK + "if cycle == 0 and rank == 1:\n    raise ValueError('bad sample')\nwait_for('go')"
    it = job(script, *ON).start()
    found = it.wait_for(CycleAttributed)
    assert (found.category, found.action) == ("code.exception", "restart")
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.node) == (1, "n1")
    it.touch("go")
    assert it.wait() == 0, it.stderr
    assert "cycle 0 attributed: the program raised an exception" in it.stderr
    assert "rank 1 on n1" in report(it)
    (attempt,) = read_history(it.run_dir)
    assert (attempt.cycle, attempt.category) == (0, "code.exception")
    assert stat.S_IMODE((it.run_dir / found.file).stat().st_mode) == 0o600
    assert it.nothing_is_left()


# Rank 2 is the last to give a sign of life, so its heartbeat is the newest; it never joins the others' call.
# Until then, and after the restart, no rank has a deadline, however slow the machine is.
GLOO = """
import os, threading, time
import torch, torch.distributed as dist
from nvrx_slurm.fault_tolerance import RankMonitorClient

rank, first = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
dist.init_process_group("gloo")
for step in range(1, 3):
    dist.all_reduce(torch.ones(1))
store = dist.distributed_c10d._get_default_store()
client = RankMonitorClient()
if first:
    if rank == 2:
        store.wait([f"waits {other}" for other in (0, 1, 3)])
    client.init_workload_monitoring()
    client.send_heartbeat(step=3)
    if rank == 2:
        threading.Event().wait()
work = dist.all_reduce(torch.ones(1), async_op=True)
store.set(f"waits {rank}", "")
work.wait()
if not first:
    client.init_workload_monitoring()
while not os.path.exists(os.environ["TEST_FOLDER"] + "/go"):
    client.send_heartbeat(step=3)
    time.sleep(0.05)
client.shutdown_workload_monitoring()
dist.destroy_process_group()
"""


def test_a_hang_in_a_collective_with_equal_heartbeats_is_blamed_on_the_rank_that_traces_show(
    job: MakeJob,
) -> None:
    it = job(GLOO, *ON, "--heartbeat-timeout", "5s", nodes=2, ranks=2, real_torch=True).start()
    found = it.wait_for(CycleAttributed)
    it.touch("go")
    assert found.category == "job.hang", it.stderr
    first = found.culprits[0]
    assert (first.rank, first.node, first.by_traces) == (2, "n2", True), (it.stderr, found)
    assert it.wait() == 0, it.stderr
    assert "cause: a rank gave no sign of life" in report(it)
    assert "rank 2 on n2: hung" in report(it)


def test_w17_a_restart_waits_for_nothing_that_attributes_nor_does_a_job_that_ends_well(
    job: MakeJob, tmp_path: Path
) -> None:
    """Neither the child, which reads a pipe whose writer is silent, nor the service ever answers."""
    make_silent(tmp_path / "rules")
    script = RANK + "if cycle == 0:\n    sys.exit(1)\nwait_for('go')"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = (*ON, "--ft-attribution-endpoint", url)
        it = job(script, *options, NVRX_ATTRIBUTION_RULES=str(tmp_path / "rules")).start()
        child = it.running("ended_cycle")
        it.wait_for(CycleStarted, 2)
        assert is_alive(child)
        it.touch("go")
        assert it.wait() == 0, it.stderr
        until("the child has ended", lambda: not is_alive(child))
    ended = it.records[-1]
    assert isinstance(ended.event, JobEnded)
    assert not it.events(CycleAttributed)


def test_a_killed_coordinator_leaves_nothing_that_attributes(job: MakeJob, tmp_path: Path) -> None:
    """The child stands still: the site's rules are a pipe whose writer is silent."""
    make_silent(tmp_path / "rules")
    script = RANK + "if cycle == 0:\n    sys.exit(1)\nwait_for('what nobody makes')"
    it = job(script, *ON, NVRX_ATTRIBUTION_RULES=str(tmp_path / "rules")).start()
    child = it.running("ended_cycle")
    it.signal(signal.SIGKILL)
    until("the child has ended", lambda: not is_alive(child))


ENDS = ["its time is over", "the job has failed", "asked to end", "the job ends well"]


@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_takes_too_long_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    make_silent(tmp_path / "rules")
    monkeypatch.setenv("NVRX_ATTRIBUTION_RULES", str(tmp_path / "rules"))
    # Only the job that has failed is held up, and only for so long.
    monkeypatch.setattr(attributor, "_LAST_S", 0.5 if end == "the job has failed" else 1000.0)
    if end == "its time is over":
        monkeypatch.setattr(attributor, "_TIMEOUT_S", 0.5)
    told: list[CycleAttributed] = []

    async def settled(_cycle: int, _rank: int | None) -> None:
        pass

    async def run() -> None:
        one = Attributor(tmp_path, settled, lambda found, _: told.append(found))
        verdict = Verdict(action=journal.VerdictAction.RESTART, rule="", why="", kind=FaultKind.EXIT)
        one.take(Record(ts=0.0, job="", attempt=0, cycle=0, event=verdict))
        while not told and (end == "its time is over" or not children()):
            await asyncio.sleep(0.01)
        if end == "asked to end":
            stop = journal.StopRequested(signal="SIGTERM")
            one.take(Record(ts=0.0, job="", attempt=0, cycle=0, event=stop))
        await one.finish(failed=end != "the job ends well")

    def children() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if is_alive(child)]

    asyncio.run(run())
    assert [found.failed for found in told] == (
        ["it took longer than 0.5 s"] if end == "its time is over" else []
    )
    until("no child is left", lambda: not children())


def test_a_service_that_says_stop_ends_the_job(job: MakeJob) -> None:
    script = RANK + "if cycle == 0:\n    sys.exit(1)\nwait_for('what nobody makes')"
    with serving(recommends("STOP", reason="the data is broken")) as server:
        it = job(
            script, "--ft-attribution-endpoint", server.url, "--ft-attribution-stop-action", "no-restart"
        )
        assert it.run() == 93, it.stderr
    (found,) = it.events(CycleAttributed)
    assert (found.by, found.action) == ("service", "stop")
    assert "no other try after cycle 0: the data is broken" in it.stderr
    assert {posted["log_path"] for posted in server.posted} == {
        str(it.run_dir / "cycles" / str(cycle) / "merged.log") for cycle in (0, 1)
    }


FAULTS = """
def save(step):
    with open("/dev/full", "w") as file:
        file.write("weights of step %d" % step)

def train():
    match cycle:
        case 0 if rank == 1:
            raise ValueError("bad sample in shard 3")
        case 1 if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2 if rank == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 3 if rank == 0:
            raise ValueError("loss is NaN at step 7")
        case 4 if rank == 0:
            save(10)
        case 5:
            import argparse
            argparse.ArgumentParser().parse_args(["--lerning-rate=3"])
        case 6:
            import no_such_module
        case 7:
            wait_for("what nobody makes")
    if cycle < 7:
        wait_for("what nobody makes")

if cycle < 8:
    train()
wait_for("go")
"""

TABLE = [
    ("code.exception", "restart", 1, "n1"),
    ("host.sigkill", "restart", 2, "n2"),
    ("host.segfault", "restart", 3, "n2"),
    ("num.loss_nan", "restart", 0, "n1"),
    ("storage.no_space", "hold", 0, "n1"),
    ("code.bad_args", "stop", None, None),
    ("code.import", "stop", None, None),
    ("slurm.node_fail", "restart_exclude", None, "n2"),
]
"""Of each cycle: the first cause, what the policy would do, and who is held to be the cause."""


def test_one_fault_after_the_other_gets_the_right_verdict(job: MakeJob, tmp_path: Path) -> None:
    options = (*ON, "--spares", "1", "--max-restarts", "50", "--max-no-progress-cycles", "0")
    policy = tmp_path / "policy.yaml"
    # That no cycle has saved anything is not what is asked about here, nor how many there were.
    policy.write_text("no_checkpoint_attempts: 99\nmax_restarts_per_hour: 99\n")
    it = job(RANK + FAULTS, *options, nodes=3, ranks=2, NVRX_ATTRIBUTION_POLICY=str(policy)).start()
    it.wait_for(CycleStarted, len(TABLE))
    until("cycle 7 runs", lambda: it.has_started(2, 7))
    it.named("nvrx-agent", "n2").kill()
    it.wait_for(CycleAttributed, len(TABLE))
    it.touch("go")
    assert it.wait() == 0, it.stderr
    found = {record.cycle: record.event for record in it.records if isinstance(record.event, CycleAttributed)}
    for cycle, (category, action, rank, node) in enumerate(TABLE):
        event = found[cycle]
        assert (event.category, event.action) == (category, action), (cycle, event)
        first = event.culprits[0]
        assert rank in (None, first.rank), (cycle, event)
        assert node in (None, first.node), (cycle, event)
    # Nobody but the lost node is to blame for what its ranks did.
    assert [event.exclude for event in found.values()] == [[]] * 7 + [["n2"]]
