"""How ranks are stopped, for a restart and because the job is asked to end; real processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import psutil
import pytest
from harness import RANK, LocalJob, is_alive, until
from programs import BREEDS, COLD, QUICK_STOP, TRAINS, WAITS

from nvrx_slurm import journal

Jobs = Callable[..., LocalJob]


def brood(run: LocalJob) -> list[psutil.Process]:
    """The processes that a rank's children are, by what they run."""
    found = []
    for process in run.processes():
        with contextlib.suppress(psutil.Error):
            if "time.sleep(600)" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.mark.parametrize("warm", ["on", "off"])
def test_nothing_that_a_rank_has_started_survives_the_restart_or_the_end(job: Jobs, warm: str) -> None:
    script = (
        BREEDS
        + """
write(f"bred{rank}.{cycle}")
wait_for(f"fail{cycle}")
sys.exit(1 if cycle == 0 else 0)
"""
    )
    run = job(script, "--warm-start", warm, *QUICK_STOP, ranks=1).start()
    run.wait_for_file("bred0.0")
    until("three children", lambda: len(brood(run)) == 3)
    first = brood(run)
    run.touch("fail0")
    run.wait_for_file("bred0.1")
    assert not [process for process in first if is_alive(process)]
    until("three children", lambda: len(brood(run)) == 3)
    run.touch("fail1")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_a_rank_that_ignores_sigterm_is_killed_when_its_time_is_over(job: Jobs) -> None:
    script = (
        RANK
        + """
if cycle == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    write(f"deaf{rank}")
    if rank == 0:
        wait_for("deaf1")
        sys.exit(1)
    while True:
        time.sleep(60)
"""
    )
    run = job(script, *COLD, "--workers-stop-timeout", "700ms")
    assert run.run() == 0
    (stopped,) = run.events(journal.WorkersStopped)
    assert 0.7 <= stopped.seconds < 14, "not the 15 s that are usual"
    assert run.nothing_is_left()


def test_w19_a_rank_that_saves_after_sigterm_has_its_monitor_and_its_workers_until_the_end(job: Jobs) -> None:
    """There SIGTERM ends the monitors at once, and the last checkpoint fails with the next heartbeat."""
    script = (
        RANK
        + """
import multiprocessing
from nvrx_slurm.fault_tolerance import RankMonitorClient

def load(pipe):
    while pipe.recv():
        pipe.send("batch")

def save(*_):
    assert client._socket is not None
    for part in range(3):
        ours.send(True)
        assert ours.recv() == "batch"
        client.send_heartbeat(step=100 + part)
        time.sleep(0.2)
    client.report_checkpoint_saved(103)
    client.report_straggler(1 - rank, "load", 0.5, 7.25, 2, 3)
    client.report_straggler(77, "load", 0.5, 7.25, 2, 3)
    write(f"saved{rank}", client._socket is not None and not wait_for("all_saved"))
    sys.exit(0)

ours, theirs = multiprocessing.get_context("fork").Pipe()
multiprocessing.get_context("fork").Process(target=load, args=[theirs], daemon=True).start()
client = RankMonitorClient()
client.init_workload_monitoring()
client.send_heartbeat(step=1)
signal.signal(signal.SIGTERM, save)
write(f"ready{rank}")
while True:
    time.sleep(1)
"""
    )
    run = job(script).start()
    for rank in range(2):
        run.wait_for_file(f"ready{rank}")
    run.signal(signal.SIGTERM)
    run.wait_for(journal.CheckpointSaved, 2)
    run.wait_for(journal.StragglerReport, 2)
    run.touch("all_saved")
    assert run.wait() == 143
    assert [run.wait_for_file(f"saved{rank}") for rank in range(2)] == ["True", "True"]
    assert {saved.step for saved in run.events(journal.CheckpointSaved)} == {103}
    slow = run.events(journal.StragglerReport)
    assert {(event.rank, event.node, event.lost_ms) for event in slow} == {(0, "n1", 7.25), (1, "n1", 7.25)}
    assert "SLOW: rank 0 on n1: load takes 7.25 ms longer than elsewhere (2 of 3 reports)" in run.stderr
    assert "Error" not in run.log("rank_0") + run.log("rank_1")
    assert run.nothing_is_left()


def test_a_rank_that_saves_on_sigterm_has_the_time_to(job: Jobs) -> None:
    script = (
        RANK
        + """
def save(*_):
    time.sleep(0.3)
    write(f"saved{rank}")
    sys.exit(0)

if cycle == 0:
    signal.signal(signal.SIGTERM, save)
    write(f"ready{rank}")
    if rank == 0:
        wait_for("ready1")
        os._exit(1)
    while True:
        time.sleep(60)
"""
    )
    run = job(script, *COLD)
    assert run.run() == 0
    assert (run.root / "saved1").exists()
    (stopped,) = run.events(journal.WorkersStopped)
    assert stopped.seconds < 14, "nobody waits longer than the last rank needs"


# --- being asked to stop -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_ends_the_job_and_everything_in_it(job: Jobs, name: str, code: int) -> None:
    run = job(WAITS, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.signal(signal.Signals[name])
    assert run.wait() == code
    assert run.events(journal.StopRequested) == [journal.StopRequested(signal=name)]
    assert run.nothing_is_left()


def test_a_signal_before_the_first_cycle_ends_the_job(job: Jobs) -> None:
    run = job(WAITS, *COLD, nodes=2, TEST_ABSENT_NODES="n2").start()
    run.wait_for(journal.NodeJoined)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.nothing_is_left()


def test_a_drain_lets_every_rank_save_and_asks_for_a_requeue(job: Jobs) -> None:
    script = (
        TRAINS
        + """
write(f"ready{rank}")
while not client.should_stop():
    client.send_heartbeat()
    time.sleep(0.01)
write(f"saved{rank}")
client.shutdown_workload_monitoring()
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    run.signal(signal.SIGUSR2)
    assert run.wait() == 75
    assert (run.root / "saved0").exists()
    assert (run.root / "saved1").exists()
    assert run.nothing_is_left()


def test_a_drain_that_comes_while_the_first_cycle_starts_is_not_forgotten(job: Jobs) -> None:
    """The store is opened meanwhile, and no agent knows of the cycle yet."""
    script = (
        TRAINS
        + """
while not client.should_stop():
    client.send_heartbeat()
    time.sleep(0.01)
client.shutdown_workload_monitoring()
"""
    )
    run = job(script, *COLD, ranks=1, real_torch=True).start()
    run.wait_for(journal.CycleStarted)
    run.signal(signal.SIGUSR2)
    assert run.wait() == 75
    assert len(run.events(journal.WorkersStarted)) <= 1


def test_a_cancelled_job_says_so_and_is_not_requeued(job: Jobs) -> None:
    """scancel signals every agent, and then Slurm no longer says RUNNING."""
    run = job(WAITS, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    (run.slurm / "state").write_text("COMPLETING\n")
    run.running("stand_ins/srun").send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.events(journal.JobEnded)[0].why == "Slurm has ended the job: COMPLETING"
    assert "requeuehold" not in (run.slurm / "calls").read_text()
    assert run.nothing_is_left()


def test_ranks_that_end_well_because_they_were_signalled_have_not_finished(job: Jobs) -> None:
    script = (
        RANK
        + """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
write(f"ready{rank}")
while True:
    time.sleep(60)
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    (run.slurm / "state").write_text("CANCELLED\n")
    run.running("stand_ins/srun").send_signal(signal.SIGTERM)
    assert run.wait() == 143
