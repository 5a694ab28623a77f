"""Ranks that fail or hang, and what comes of it: a real Coordinator, real agents and real ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import RANK, LocalJob, until
from programs import COLD, QUICK_STOP, TRAINS

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind, VerdictAction

Jobs = Callable[..., LocalJob]


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


# --- how a rank ends that fails -----------------------------------------------------------------------

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
