"""A real Coordinator, real agents and real ranks on this machine: what breaks, and what comes of it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable

import psutil
import pytest
from harness import RANK, LocalJob, is_alive, until

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind, VerdictAction

Jobs = Callable[..., LocalJob]
COLD = ("--warm-start", "off")
QUICK_STOP = ("--workers-stop-timeout", "300ms")
STAY_AWAY = ("--rejoin-timeout", "0")


def only(events: list[journal.FaultDetected]) -> journal.FaultDetected:
    (event,) = events
    return event


def test_a_job_whose_ranks_all_exit_with_0_exits_with_0(job: Jobs) -> None:
    script = (
        RANK
        + """
print(f"rank {rank} of {os.environ['WORLD_SIZE']} on {os.environ['SLURMD_NODENAME']}")
"""
    )
    run = job(script, *COLD, nodes=2)
    assert run.run() == 0
    for rank in range(4):
        assert run.log(f"rank_{rank}") == f"rank {rank} of 4 on n{rank // 2 + 1}\n"
    assert run.events(journal.JobEnded) == [journal.JobEnded(code=0, why="all 4 ranks exited with 0")]
    assert run.events(journal.FaultDetected) == []
    assert run.nothing_is_left()


def test_a_rank_that_fails_once_restarts_all_and_the_job_succeeds(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"rank{rank}.cycle{cycle}")
if cycle == 0:
    if rank == 1:
        sys.exit(3)
    signal.pause()
"""
    )
    run = job(script, *COLD, *QUICK_STOP, nodes=2)
    assert run.run() == 0
    fault = only(run.events(journal.FaultDetected))
    assert (fault.kind, fault.node, fault.rank, fault.exit) == (FaultKind.EXIT, "n1", 1, 3)
    assert [verdict.action for verdict in run.events(journal.Verdict)] == [VerdictAction.RESTART]
    assert len(run.events(journal.CycleStarted)) == 2
    assert all((run.root / f"rank{rank}.cycle1").exists() for rank in range(4))
    assert run.nothing_is_left()


def test_a_rank_that_always_fails_uses_up_the_budget(job: Jobs) -> None:
    script = (
        RANK
        + """
if rank == 1:
    sys.exit(3)
signal.pause()
"""
    )
    run = job(script, *COLD, "--max-restarts", "2")
    assert run.run() == 1
    assert len(run.events(journal.CycleStarted)) == 3
    ended = run.events(journal.JobEnded)[0]
    assert ended.why == "restart budget of 2 used up: rank 1 on n1 exited with 3"
    assert run.nothing_is_left()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_rank_killed_by_a_signal_is_the_culprit(job: Jobs, name: str) -> None:
    script = (
        RANK
        + """
if cycle == 0:
    write(f"ready{rank}")
    signal.pause()
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    run.rank(1).send_signal(signal.Signals[name])
    assert run.wait() == 0
    fault = only(run.events(journal.FaultDetected))
    assert (fault.kind, fault.rank, fault.signal) == (FaultKind.SIGNAL, 1, name)
    assert run.nothing_is_left()


def test_ranks_may_finish_at_different_times(job: Jobs) -> None:
    script = (
        RANK
        + """
if rank:
    wait_for("go_on")
"""
    )
    run = job(script, *COLD, nodes=2).start()
    until("rank 0 has ended", lambda: run.has_started(0) and not run.ranks(0))
    run.touch("go_on")
    assert run.wait() == 0
    assert run.events(journal.FaultDetected) == []


# --- hangs -------------------------------------------------------------------------------------------

TRAINS = (
    RANK
    + """
from nvrx_slurm.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
for step in range(3):
    client.send_heartbeat(step=step)
"""
)
SHORT = ("--heartbeat-timeout", "1s", "--initial-heartbeat-timeout", "1s")


@pytest.mark.parametrize(
    ("hangs", "evidence"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", "its process is stopped"),
        ("time.sleep(60)", "it is behind the others, with 3 heartbeats"),
    ],
)
def test_a_rank_that_hangs_is_found_and_all_restart(job: Jobs, hangs: str, evidence: str) -> None:
    # The others go on until it hangs, and fall silent after it, however much later than they it was started.
    script = (
        TRAINS
        + f"""
if cycle == 0:
    if rank == 2:
        write("hangs")
        {hangs}
    while not os.path.exists(folder + "/hangs"):
        client.send_heartbeat(step=2)
        time.sleep(0.01)
    client.send_heartbeat(step=3)
    signal.pause()
client.shutdown_workload_monitoring()
"""
    )
    run = job(script, *COLD, *SHORT, *QUICK_STOP, nodes=2)
    assert run.run() == 0
    fault = only(run.events(journal.FaultDetected))
    assert (fault.kind, fault.node, fault.rank) == (FaultKind.HANG, "n2", 2)
    assert fault.detail.endswith(evidence)
    assert run.nothing_is_left()


def test_a_rank_without_a_first_heartbeat_hangs_too(job: Jobs) -> None:
    script = (
        RANK
        + """
from nvrx_slurm.fault_tolerance import RankMonitorClient

client = RankMonitorClient()
client.init_workload_monitoring()
if cycle == 0 and rank == 0:
    time.sleep(60)
client.send_heartbeat()
client.shutdown_workload_monitoring()
"""
    )
    run = job(script, *COLD, "--initial-heartbeat-timeout", "1s")
    assert run.run() == 0
    assert only(run.events(journal.FaultDetected)).rank == 0


def test_who_is_not_monitored_has_no_deadline(job: Jobs) -> None:
    script = (
        TRAINS
        + """
client.shutdown_workload_monitoring()
time.sleep(1.5)
"""
    )
    run = job(script, *COLD, *SHORT)
    assert run.run() == 0
    assert run.events(journal.FaultDetected) == []


# --- stopping ----------------------------------------------------------------------------------------

BREEDS = (
    RANK
    + """
def spawn(*how):
    subprocess.Popen([sys.executable, "-c", *how], stdin=subprocess.DEVNULL)

sleeper = "import time; time.sleep(600)"
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
daemon = f"import os, time; os.setsid(); os.fork() and os._exit(0); os.fork() and os._exit(0); {deaf}"
spawn(sleeper)
spawn(deaf)
spawn(daemon)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
"""
)


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

WAITS = (
    RANK
    + """
write(f"ready{rank}.{cycle}")
while True:
    time.sleep(60)
"""
)


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


# --- processes of ours that die ----------------------------------------------------------------------


def test_w20_a_dead_agent_is_a_lost_node_and_the_guardian_clears_up(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=3, ranks=1).start()
    for rank in range(3):
        run.wait_for_file(f"ready{rank}.0")
    on_n3 = run.on("n3")
    run.named("nvrx-agent", "n3").kill()
    assert run.wait() == 75
    # The job does not wait for the guardian of a node that it has lost.
    until("n3 has cleared up", lambda: not [process for process in on_n3 if is_alive(process)])
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.node) == (FaultKind.NODE_LOST, "n3")
    assert run.nothing_is_left()


def test_a_spare_takes_the_place_of_a_dead_agent(job: Jobs) -> None:
    script = WAITS.replace("while True", "while not cycle")
    run = job(script, *COLD, "--spares", "1", nodes=3, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-agent", "n1").kill()
    second = run.wait_for(journal.CycleStarted, 2)
    assert second.nodes == ["n3", "n2"]
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_a_dead_guardian_takes_its_node_along_in_good_order(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-guardian", "n2").kill()
    assert run.wait() == 75
    assert run.nothing_is_left()


LAST_WORDS = """
import atexit, threading

if cycle == 0 and rank == 1:
    text, data = open(folder + "/text", "w"), open(folder + "/data", "wb")
    text.write("text")
    data.write(b"data")
    threading.Thread(target=lambda: (time.sleep(0.2), write("thread", "joined"))).start()
    atexit.register(lambda: (time.sleep(0.2), write("handler", "run")))
    {ends}
print("fine")
if cycle == 0:
    wait_for("never")
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("raise RuntimeError('the cause')", 1, "RuntimeError: the cause"),
        ("sys.exit('the reason')", 1, "the reason"),
        ("sys.exit(7)", 7, ""),
    ],
    ids=["exception", "words", "code"],
)
def test_a_rank_that_fails_ends_in_good_order_and_says_why(
    job: Jobs, ends: str, code: int, said: str
) -> None:
    run = job(RANK + LAST_WORDS.format(ends=ends))
    assert run.run() == 0
    (fault,) = run.events(journal.FaultDetected)
    assert (fault.kind, fault.rank, fault.exit) == (journal.FaultKind.EXIT, 1, code)
    assert fault.detail == ("RuntimeError: the cause" if "raise" in ends else "")
    assert said in run.log("rank_1", cycle=0)
    written = {name: (run.root / name).read_text() for name in ("text", "data", "thread", "handler")}
    assert written == {"text": "text", "data": "data", "thread": "joined", "handler": "run"}
    assert run.nothing_is_left()


KEPT_BY_A_THREAD = """
import threading

if cycle == 0 and rank == 1:
    threading.Thread(target=wait_for, args=["never"]).start()
    write("failed", time.time())
    {ends}
print("fine")
if cycle == 0:
    wait_for("never")
"""


@pytest.mark.parametrize(
    ("ends", "code"), [("raise RuntimeError('the cause')", 1), ("sys.exit(7)", 7)], ids=["exception", "exit"]
)
def test_a_rank_whose_main_thread_failed_but_that_lives_on_is_a_fault(
    job: Jobs, ends: str, code: int
) -> None:
    run = job(RANK + KEPT_BY_A_THREAD.format(ends=ends))
    assert run.run() == 0
    fault = next(record for record in run.records if isinstance(record.event, journal.FaultDetected))
    event = fault.event
    assert isinstance(event, journal.FaultDetected)
    assert (event.kind, event.rank, event.exit) == (journal.FaultKind.EXIT, 1, code)
    assert "its main thread has failed, but threads or exit handlers keep its process" in event.detail
    assert ("RuntimeError: the cause" in event.detail) == (code == 1)
    assert fault.ts - float(run.wait_for_file("failed")) < 30, "not the 60 s of the thread"
    assert run.log("rank_1", cycle=1) == "fine\n"
    assert run.nothing_is_left()


def test_with_the_exception_hook_a_failed_rank_is_gone_after_its_traceback(job: Jobs) -> None:
    failing = KEPT_BY_A_THREAD.format(ends="raise RuntimeError('the cause')")
    run = job(RANK + failing, "--ft-install-exception-hook", "true")
    assert run.run() == 0
    (fault,) = run.events(journal.FaultDetected)
    assert (fault.rank, fault.exit) == (1, 1)
    assert "lives on" not in fault.detail
    assert "keep its process" not in fault.detail
    assert run.log("rank_1").endswith("RuntimeError: the cause\n")


def test_a_worker_server_that_is_stopped_is_continued(job: Jobs) -> None:
    run = job(RANK + 'wait_for("end") if cycle == 0 and rank == 0 else None').start()
    rank = run.rank(0)
    server = run.named("nvrx-warm")
    server.suspend()
    until("it is seen", lambda: "somebody has stopped the worker server" in run.stderr)
    until("the server goes on", lambda: server.status() != psutil.STATUS_STOPPED)
    rank.kill()
    assert run.wait() == 0
    assert "somebody has stopped the worker server: continued" in run.stderr
    assert [fault.signal for fault in run.events(journal.FaultDetected)] == ["SIGKILL"]


@pytest.mark.parametrize("warm", ["on", "off"])
def test_a_dead_worker_server_is_replaced_on_the_same_node(job: Jobs, warm: str) -> None:
    script = BREEDS + WAITS.replace("while True", "while not cycle")
    run = job(script, "--warm-start", warm, *QUICK_STOP, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.named("nvrx-warm", "n2").kill()
    assert run.wait() == 0
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.rank) == (FaultKind.SIGNAL, 1)
    assert "worker server" in verdict.why
    assert [started.nodes for started in run.events(journal.CycleStarted)] == [["n1", "n2"]] * 2
    assert run.nothing_is_left()


def test_an_agent_that_is_asked_to_go_stops_the_others_before_its_own_ranks_have_ended(job: Jobs) -> None:
    script = (
        RANK
        + """
def save(*_):
    write(f"saves{rank}")
    if rank == 1:
        wait_for("go_on")
    write(f"saved{rank}")
    sys.exit(0)

if cycle == 0:
    signal.signal(signal.SIGTERM, save)
    write(f"ready{rank}")
    while True:
        time.sleep(60)
"""
    )
    run = job(script, *COLD, "--spares", "1", nodes=3, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    run.named("nvrx-agent", "n2").send_signal(signal.SIGTERM)
    run.wait_for_file("saves1"), run.wait_for_file("saved0")
    assert len(run.events(journal.CycleStarted)) == 1, "ranks of the former cycle are still there"
    run.touch("go_on")
    assert run.wait() == 0
    assert (run.root / "saved1").exists()
    assert run.events(journal.CycleStarted)[1].nodes == ["n1", "n3"]
    (verdict,) = run.events(journal.Verdict)
    assert verdict.why == "node n2 lost (the agent received SIGTERM)"
    assert run.nothing_is_left()


def test_what_an_agent_says_last_is_heard_however_soon_it_goes(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, "--spares", "3", nodes=4, ranks=1).start()
    run.wait_for_file("ready0")
    for node in ("n2", "n3", "n4"):
        run.named("nvrx-agent", node).send_signal(signal.SIGTERM)
    run.wait_for(journal.NodeLost, 3)
    assert {lost.why for lost in run.events(journal.NodeLost)} == {"the agent received SIGTERM"}
    run.touch("go_on")
    assert run.wait() == 0


def test_a_worker_server_that_dies_at_once_is_not_started_over_and_over(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--max-restarts", "1", ranks=1)
    (run.root / "site").mkdir()
    (run.root / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'nvrx_slurm.agent.worker_server' in sys.orig_argv:\n"
        f"    open('{run.root}/starts', 'a').write('x')\n"
        "    os._exit(1)\n"
    )
    run.environment_of_agents(PYTHONPATH=f"{run.root}/site:{run.stub_torch}")
    assert run.run() == 1
    assert "worker server" in run.events(journal.JobEnded)[0].why
    assert len(run.wait_for_file("starts")) < 8
    assert run.nothing_is_left()


def test_w20_nothing_survives_a_dead_coordinator(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert run.nothing_is_left()


def test_a_job_goes_on_without_its_srun(job: Jobs) -> None:
    script = (
        RANK
        + """
write(f"ready{rank}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    srun = run.running("stand_ins/srun")
    srun.kill()
    until("srun has ended", lambda: not is_alive(srun))
    run.touch("go_on")
    assert run.wait() == 0
    assert run.nothing_is_left()


def test_a_dead_store_restarts_all_ranks_with_a_new_one(job: Jobs) -> None:
    script = (
        RANK
        + """
import torch.distributed as dist

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.set(f"here{rank}", "yes")
store.wait(["here0", "here1"])
write(f"met{rank}.{cycle}", os.environ["MASTER_PORT"])
while not cycle:
    time.sleep(60)
"""
    )
    run = job(script, *COLD, nodes=2, ranks=1, real_torch=True).start()
    first = run.wait_for_file("met0.0"), run.wait_for_file("met1.0")
    run.running("store_process").kill()
    assert run.wait() == 0
    second = run.wait_for_file("met0.1"), run.wait_for_file("met1.1")
    assert first[0] == first[1]
    assert second[0] == second[1] != first[0]
    (verdict,) = run.events(journal.Verdict)
    assert "rendezvous store" in verdict.why
    assert run.nothing_is_left()


# --- nodes that do not answer ------------------------------------------------------------------------


def test_a_silent_node_is_lost_and_ends_its_ranks_when_it_wakes(job: Jobs) -> None:
    script = (
        BREEDS
        + """
write(f"ready{rank}.{cycle}")
wait_for("go_on")
"""
    )
    run = job(script, *COLD, "--spares", "1", *QUICK_STOP, nodes=3, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    agent = run.named("nvrx-agent", "n2")
    on_n2 = run.on("n2")
    agent.suspend()
    # 4.5 s where the machine has time.
    second = run.wait_for(journal.CycleStarted, 2)
    assert second.nodes == ["n1", "n3"]
    with contextlib.suppress(psutil.NoSuchProcess):  # its guardian may have lost patience with it
        agent.resume()
    until("n2 has cleared up", lambda: not [p for p in on_n2 if is_alive(p)])
    run.touch("go_on")
    assert run.wait() == 0
    (verdict,) = run.events(journal.Verdict)
    assert (verdict.kind, verdict.node) == (FaultKind.NODE_LOST, "n2")
    assert run.nothing_is_left()


def test_a_silent_coordinator_is_given_up_by_its_agents(job: Jobs) -> None:
    run = job(BREEDS + WAITS, *COLD, *QUICK_STOP, *STAY_AWAY, nodes=2, ranks=1).start()
    run.wait_for_file("ready0.0"), run.wait_for_file("ready1.0")
    run.signal(signal.SIGSTOP)
    until("no rank is left", lambda: not run.ranks(0, 1))
    run.signal(signal.SIGCONT)
    assert run.wait() == 75
    assert run.nothing_is_left()


# --- what cannot be started --------------------------------------------------------------------------


def test_a_store_that_cannot_come_up_fails_the_job_with_its_words(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--max-restarts", "1", ranks=1)
    broken = run.root / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise OSError('libtorch.so: file too short')")
    run.environment_of_coordinator(PYTHONPATH=str(broken.parent))
    assert run.run() == 1
    assert "OSError: libtorch.so: file too short" in run.events(journal.JobEnded)[0].why
    assert run.nothing_is_left()


def test_an_error_in_the_coordinator_itself_ends_the_job_and_is_told(job: Jobs) -> None:
    """Logged by the event loop and forgotten, it would leave a job that waits for ever."""
    run = job(RANK, *COLD, ranks=1)
    (run.root / "site").mkdir()
    (run.root / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "if any(word.endswith('nvrx-srun') for word in sys.orig_argv):\n"
        "    from nvrx_slurm.coordinator.running_cycle import RunningCycle\n"
        "    RunningCycle.is_alive = lambda *_: 1 / 0\n"
    )
    run.environment_of_coordinator(PYTHONPATH=f"{run.root}/site:{run.stub_torch}")
    assert run.run() == 1
    (ended,) = run.events(journal.JobEnded)
    assert ended.why.startswith("an error in nvrx-srun itself: ZeroDivisionError")
    assert "Traceback" in run.stderr
    assert run.nothing_is_left()


def test_what_torch_prints_on_import_is_not_taken_for_a_port(job: Jobs) -> None:
    run = job(RANK + "write('port', os.environ['MASTER_PORT'])", *COLD, ranks=1)
    chatty = run.root / "chatty" / "torch"
    chatty.mkdir(parents=True)
    (chatty / "__init__.py").write_text("print('29500 is a nice port')")
    (chatty / "distributed.py").write_text((run.stub_torch / "torch" / "distributed.py").read_text())
    run.environment_of_coordinator(PYTHONPATH=str(chatty.parent))
    assert run.run() == 0
    assert run.wait_for_file("port") != "29500"


def test_a_missing_srun_fails_the_job(job: Jobs) -> None:
    run = job(WAITS, *COLD, ranks=1)
    tools = run.root / "tools"
    tools.mkdir()
    (tools / "scontrol").symlink_to(run.stand_ins / "scontrol")
    run.environment_of_coordinator(PATH=f"{tools}:/bin:/usr/bin")
    assert run.run() == 1
    assert run.events(journal.JobEnded)[0].why.startswith("no agent ever joined: srun")
    assert run.nothing_is_left()


def test_an_agent_that_cannot_take_part_says_why(job: Jobs) -> None:
    run = job(WAITS, *COLD, "--nproc-per-node", "gpu")
    assert run.run() == 2
    (ended,) = run.events(journal.JobEnded)
    assert ended.why == "n1: --nproc-per-node=gpu, but Slurm has given this job no GPU on this node"
    assert run.nothing_is_left()


def test_a_node_whose_agent_never_comes_is_replaced_by_a_spare(job: Jobs) -> None:
    run = job(RANK, *COLD, "--spares", "1", nodes=3, ranks=1, TEST_ABSENT_NODES="n2")
    assert run.run() == 0
    assert run.events(journal.CycleStarted)[0].nodes == ["n1", "n3"]


def test_a_private_directory_that_is_gone_costs_no_more_than_its_node(job: Jobs) -> None:
    script = (
        RANK
        + """
if cycle == 0:
    write(f"ready{rank}")
    wait_for("go_on")
    sys.exit(1)
"""
    )
    run = job(script, *COLD, "--spares", "1", "--max-restarts", "3", nodes=2, ranks=1).start()
    run.wait_for_file("ready0")
    on_n1 = run.private_dir_of("n1")
    for path in on_n1.iterdir():
        path.unlink()
    on_n1.rmdir()
    run.touch("go_on")
    assert run.wait() == 0
    assert len(run.events(journal.CycleStarted)) <= 3
    assert run.nothing_is_left()
