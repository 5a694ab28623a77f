"""The Coordinator falls silent: who takes over, and what the old one does when it wakes."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from harness import JOB_ID, RANK, LocalJob, is_alive, until

from nvrx_slurm import journal
from nvrx_slurm.coordinator.lease import Fence, Lease, LeaseFile
from nvrx_slurm.journal import JournalWriter

Jobs = Callable[..., LocalJob]
pytestmark = pytest.mark.timeout(400)
QUICK = ("--warm-start", "off", "--workers-stop-timeout", "300ms")
HOST = {"SLURMD_NODENAME": "n1"}
TAKEOVER_S = 120.0

TRAINS = (
    RANK
    + """
write(f"ready{rank}.{cycle}")
wait_for("end")
"""
)


def lease_of(run: LocalJob) -> Lease:
    found = LeaseFile(run.run_dir).read()
    assert found is not None
    return found


def wait_for_cycle(run: LocalJob, cycle: int) -> None:
    for rank in (0, 1):
        until(f"rank {rank} of {cycle}", (run.root / f"ready{rank}.{cycle}").exists, TAKEOVER_S)


def no_rank_is_left(run: LocalJob, cycle: int = 0) -> None:
    until("no rank is left", lambda: not run.ranks(0, 1, cycle=cycle), 15)


def told(run: LocalJob) -> list[journal.Event]:
    """The events of the journal but the first cycle's attribution, which comes when it is ready."""
    return [record.event for record in run.records if not isinstance(record.event, journal.CycleAttributed)]


def test_w21_a_standby_takes_over_from_a_coordinator_that_stands_still_and_it_only_waits(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--standby-coordinator", "--spares", "1", nodes=3, ranks=1, **HOST).start()
    wait_for_cycle(run, 0)
    run.signal(signal.SIGSTOP)
    no_rank_is_left(run)
    lost = run.wait_for(journal.CoordinatorLost, patience_s=TAKEOVER_S)
    assert (lost.host, lost.fence) == ("n1", f"{JOB_ID}.0.1")
    wait_for_cycle(run, 1)
    assert run.events(journal.CycleStarted)[-1].nodes == ["n2", "n3"]
    assert (lease_of(run).host, lease_of(run).fence) == (lost.successor, lost.fence)
    token = run.named("nvrx-agent", "n2").environ()["NVRX_TOKEN"]
    for path in run.root.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes(), path

    # when it wakes, it writes nothing: no fault of a rank, no second start of what runs
    run.wait_for(journal.WorkersStarted, 4)
    before = told(run)
    run.signal(signal.SIGCONT)
    until("it has noticed", lambda: "another host has taken over" in run.stderr)
    assert told(run) == before
    assert len(run.ranks(0, 1, cycle=1)) == 2, "it has ended nothing"
    run.touch("end")

    # then it ends with the successor's exit code
    assert run.wait() == 0
    assert [event.code for event in run.events(journal.JobEnded)] == [0]
    assert run.events(journal.Requeued) == run.events(journal.ExitDeferred) == []
    assert run.nothing_is_left(15)


def test_w21_a_node_that_takes_over_and_dies_is_followed_by_another(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--standby-coordinator", "--spares", "2", nodes=4, ranks=1, **HOST).start()
    wait_for_cycle(run, 0)
    run.signal(signal.SIGSTOP)
    first = run.wait_for(journal.CoordinatorLost, patience_s=TAKEOVER_S)
    wait_for_cycle(run, 1)
    # As a host that stands still: nobody refuses a connection.
    run.named("nvrx-srun", first.successor).suspend()
    second = run.wait_for(journal.CoordinatorLost, 2, patience_s=TAKEOVER_S)
    assert (second.host, second.fence) == (first.successor, f"{JOB_ID}.0.2")
    wait_for_cycle(run, 2)
    assert set(run.events(journal.CycleStarted)[-1].nodes) == {"n2", "n3", "n4"} - {first.successor}
    run.touch("end")
    until("the end", lambda: run.events(journal.JobEnded))
    assert run.events(journal.JobEnded)[0].code == 0


def test_w21_without_a_standby_a_job_whose_host_answers_slurm_is_left_to_it(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, "--rejoin-timeout", "0", nodes=2, ranks=1, **HOST).start()
    wait_for_cycle(run, 0)
    run.signal(signal.SIGSTOP)
    no_rank_is_left(run)
    watcher = run.named("nvrx-successor", "n2")
    until("it has asked Slurm", lambda: "show node n1" in (run.slurm / "calls").read_text(), TAKEOVER_S)
    assert is_alive(watcher)
    assert "requeue" not in (run.slurm / "calls").read_text()
    assert lease_of(run).fence == f"{JOB_ID}.0.0", "nobody has claimed anything"
    # It wakes: its own decision counts.
    run.signal(signal.SIGCONT)
    assert run.wait() == 75
    assert run.nothing_is_left(15)


def test_w21_without_a_standby_a_job_whose_host_slurm_misses_is_requeued_once(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, nodes=3, ranks=1, **HOST).start()
    wait_for_cycle(run, 0)
    (run.slurm / "node_state").write_text("DOWN*")
    run.signal(signal.SIGSTOP)
    requeued = run.wait_for(journal.Requeued, patience_s=TAKEOVER_S)
    assert requeued.excluded == ["n1"]
    assert (run.slurm / "calls").read_text().count("requeuehold") == 1
    until("the other node has left", lambda: not run._named("nvrx-successor", "n3"), 60)
    assert (run.slurm / "calls").read_text().count("requeuehold") == 1
    before = len(run.records)
    run.signal(signal.SIGCONT)
    run.wait()
    assert len(run.records) == before, "the old one writes nothing"
    assert (run.slurm / "calls").read_text().count("requeuehold") == 1
    assert run.nothing_is_left(15)


def test_w20_a_coordinator_that_is_killed_takes_everything_along(job: Jobs) -> None:
    """Its host lives and refuses connections: nobody waits for a lease, and Slurm ends the job."""
    run = job(TRAINS, *QUICK, "--standby-coordinator", nodes=2, ranks=1, **HOST).start()
    wait_for_cycle(run, 0)
    run.signal(signal.SIGKILL)
    assert run.nothing_is_left(15)
    assert run.events(journal.CoordinatorLost) == []


def test_a_start_that_slurm_has_replaced_refuses_to_run(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, ranks=1)
    (run.slurm / "restarts").write_text("2")
    assert run.run() == 2
    assert f"Slurm has started job {JOB_ID} again since" in run.stderr
    assert not run.run_dir.exists()


def test_a_running_coordinator_of_an_earlier_start_ends_and_touches_nothing(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, nodes=2, ranks=1).start()
    wait_for_cycle(run, 0)
    newer = Lease(fence=f"{JOB_ID}.1.0", counter=1, host="n9", address="10.0.0.9:1")
    LeaseFile(run.run_dir).write(newer)
    before = list(run.records)
    assert run.wait(30) == 1
    assert "job was started again meanwhile" in run.stderr
    assert lease_of(run) == newer
    assert run.records == before
    assert "requeue" not in (run.slurm / "calls").read_text()
    assert run.nothing_is_left()


def test_a_start_that_only_has_to_tell_the_exit_code_does_nothing_else(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, ranks=1, SLURM_RESTART_COUNT="1")
    run.run_dir.mkdir(mode=0o700)
    log = JournalWriter(run.run_dir / "journal.jsonl", JOB_ID, 0)
    log.append(0, journal.ExitDeferred(code=16))
    log.close()
    assert run.run() == 16
    assert "this start only tells Slurm" in run.stderr
    assert [type(event).__name__ for event in (r.event for r in run.records)] == [
        "ExitDeferred",
        "ExitReported",
    ]
    assert not (run.root / "srun_calls").exists()


def test_the_lease_moves_while_a_job_runs_and_tells_how_it_ended(job: Jobs) -> None:
    run = job(TRAINS, *QUICK, ranks=1).start()
    run.wait_for_file("ready0.0")
    first = lease_of(run)
    assert Fence.parse(first.fence) == Fence(JOB_ID, 0, 0)
    until("it is renewed", lambda: lease_of(run).counter > first.counter, 20)
    run.touch("end")
    assert run.wait() == 0
    assert lease_of(run).ended == 0
