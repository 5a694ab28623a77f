"""A real Coordinator, real agents and real ranks: bounds, requests of ranks, the end of the time."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import RANK, LocalJob, until

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

Jobs = Callable[..., LocalJob]
COLD = ("--warm-start", "off")
CLIENT = (
    RANK
    + """
from nvrx_slurm.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest

client = RankMonitorClient()
client.init_workload_monitoring()
"""
)
SAVES = """
write(f"ready{rank}")
while not client.should_stop():
    client.send_heartbeat(step=1)
    time.sleep(0.01)
write(f"saved{rank}")
"""
SAVES_WHEN_ASKED = CLIENT + SAVES


def end_of(job: LocalJob) -> journal.JobEnded:
    (ended,) = job.events(journal.JobEnded)
    return ended


# --- progress ----------------------------------------------------------------------------------------


def test_a_script_that_fails_at_its_start_is_not_started_ten_times(job: Jobs) -> None:
    run = job("import no_such_module", *COLD)
    assert run.run() == 93
    assert len(run.events(journal.CycleStarted)) == 3
    assert end_of(run).why.startswith(
        "3 cycles in a row ended before the first step, the last by exit 1: rank "
    )
    assert run.nothing_is_left()


def test_training_that_comes_to_the_same_step_again_and_again_ends_with_93(job: Jobs) -> None:
    script = CLIENT + "client.send_heartbeat(step=7)\nsys.exit(3)\n"
    run = job(script, *COLD, "--ft-max-no-progress-cycles", "2", nodes=2, ranks=1)
    assert run.run() == 93
    # The first came further than any before.
    assert [scored.progressed for scored in run.events(journal.CycleScored)] == [True, False, False]
    assert end_of(run).why.startswith("2 cycles in a row without progress: none came beyond step 7")
    assert run.events(journal.Verdict)[-1].rule == "no-progress"


def test_the_checkpoint_iteration_file_alone_shows_progress(job: Jobs) -> None:
    """Ranks without a client, which write it as Megatron-LM does; in the fourth cycle they write no more."""
    script = (
        RANK
        + """
path = folder + "/latest_iteration"
if rank == 0 and cycle < 4:
    with open(path, "w") as file:
        file.write(str(100 + 10 * cycle))
sys.exit(3)
"""
    )
    run = job(script, *COLD, ranks=1)
    run.add_options("--ft-checkpoint-iteration-file", str(run.root / "latest_iteration"))
    assert run.run() == 93
    scored = [(event.progressed, event.step) for event in run.events(journal.CycleScored)]
    assert scored == [(True, 100), (True, 110), (True, 120), (True, 130), *[(False, 130)] * 3]
    assert "3 cycles in a row without progress: no checkpoint after step 130" in end_of(run).why


def test_restarts_within_an_hour_are_bounded(job: Jobs) -> None:
    run = job(RANK + "sys.exit(3)\n", *COLD, "--max-restarts-per-hour", "1", ranks=1)
    assert run.run() == 1
    assert end_of(run).why.startswith("1 restarts within the last hour")
    assert len(run.events(journal.CycleStarted)) == 2


# --- suspects ----------------------------------------------------------------------------------------


def test_a_node_with_many_faults_of_its_own_gives_its_place_to_a_spare(job: Jobs) -> None:
    script = (
        CLIENT
        + """
client.send_heartbeat(step=cycle)
if os.environ["SLURMD_NODENAME"] == "n2":
    os.kill(os.getpid(), signal.SIGKILL)
if cycle < 2:
    signal.pause()
"""
    )
    run = job(script, *COLD, "--spares", "1", "--exclude-after", "2", nodes=3, ranks=1)
    assert run.run() == 0
    (excluded,) = run.events(journal.NodeExcluded)
    assert (excluded.node, excluded.on_trial) == ("n2", True)
    assert run.events(journal.CycleStarted)[-1].nodes == ["n1", "n3"]
    assert run.nothing_is_left()


# --- requests of ranks -------------------------------------------------------------------------------


ASKS = (
    CLIENT
    + """
client.send_heartbeat(step=1)
write(f"ready{rank}.{cycle}")
if rank == 1 and cycle == 0:
    wait_for("ready0.0")
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.%s, "it is\\nslow \\x1b[31m"))
    %s
while cycle == 0:
    time.sleep(1)
"""
)


@pytest.mark.parametrize(
    "then", ["pass", "sys.exit(0)", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_w13_a_rank_shuts_the_workload_down_whatever_it_does_then(job: Jobs, then: str) -> None:
    run = job(ASKS % ("ShutdownWorkload", then), *COLD, nodes=2, ranks=1)
    assert run.run() == 0
    assert end_of(run).why == "rank 1 on n2 asked to shut the workload down: it is slow ?[31m"
    assert "REQUEST: rank 1 on n2 asks for ShutdownWorkload: it is slow ?[31m" in run.stderr
    assert len(run.events(journal.CycleStarted)) == 1
    assert run.nothing_is_left()


@pytest.mark.parametrize("then", ["pass", "sys.exit(3)"])
def test_w13_a_rank_has_its_node_excluded_at_once(job: Jobs, then: str) -> None:
    run = job(ASKS % ("ExcludeThisNode", then), *COLD, "--spares", "1", nodes=3, ranks=1)
    assert run.run() == 0
    assert [started.nodes for started in run.events(journal.CycleStarted)] == [["n1", "n2"], ["n1", "n3"]]
    assert run.events(journal.Verdict)[0].kind is FaultKind.REQUEST
    (asked,) = [r.ts for r in run.records if isinstance(r.event, journal.ControlRequested)]
    again = [r.ts for r in run.records if isinstance(r.event, journal.CycleStarted)][1]
    assert again - asked < 14.0, "not the 15 s that ranks may take to stop"


def test_a_requeue_excludes_the_node_that_a_rank_wanted_out(job: Jobs) -> None:
    run = job(ASKS % ("ExcludeThisNode", "pass"), *COLD, nodes=2, ranks=1)
    assert run.run() == 75
    assert (run.slurm / "excluded").read_text() == "n2\n"
    assert run.events(journal.Requeued)[0].excluded == ["n2"]


# --- the time limit and preemption -------------------------------------------------------------------


def ends_in(run: LocalJob, seconds: float) -> None:
    ends = round(time.time() + seconds)
    (run.slurm / "more").write_text(f"TimeLimit=00:10:00 StartTime={ends - 600} EndTime={ends}\n")


def test_before_the_time_limit_ranks_save_and_the_job_is_requeued(job: Jobs) -> None:
    """Without any --signal."""
    run = job(SAVES_WHEN_ASKED, *COLD, "--time-limit-margin", "10s", nodes=2, ranks=1)
    ends_in(run, 30)
    assert run.run(60) == 75
    assert (run.root / "saved0").exists()
    assert (run.root / "saved1").exists()
    (asked,) = run.events(journal.StopRequested)
    assert asked.why.startswith("the time limit, ")
    assert run.events(journal.Requeued)
    assert run.nothing_is_left()


def test_a_time_limit_that_was_raised_meanwhile_is_heeded(job: Jobs) -> None:
    run = job(SAVES_WHEN_ASKED, *COLD, "--time-limit-margin", "1s", ranks=1)
    # Whenever Slurm is asked, somebody has just given the job a few seconds more.
    (run.slurm / "seconds_left").write_text("4")
    run.start().wait_for_file("ready0")

    def asked() -> int:
        return (run.slurm / "calls").read_text().count("show job")

    before = asked()
    until("Slurm is asked again", lambda: asked() >= before + 2)
    assert not run.events(journal.StopRequested)
    run.signal(signal.SIGUSR2)
    assert run.wait() == 75


def test_a_preempted_job_is_requeued(job: Jobs) -> None:
    """Slurm begins the time of grace with SIGTERM to the step, and says RUNNING until it is over.

    A rank that catches the signal is asked to save, and has the time to.
    """
    script = CLIENT + "signal.signal(signal.SIGTERM, lambda *_: None)\n" + SAVES
    run = job(script, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    (run.slurm / "more").write_text(f"StartTime={round(time.time()) - 60} PreemptTime={round(time.time())}\n")
    run.running("stand_ins/srun").send_signal(signal.SIGTERM)
    assert run.wait() == 75
    assert end_of(run).why == "Slurm preempts the job"
    assert run.events(journal.Requeued)[0].excluded == []
    assert not run.events(journal.FaultDetected)
    assert (run.root / "saved0").exists()
    assert (run.root / "saved1").exists()
    assert run.nothing_is_left()


def test_so_is_one_whose_batch_script_hears_of_it(job: Jobs) -> None:
    run = job(SAVES_WHEN_ASKED, *COLD, nodes=2, ranks=1).start()
    run.wait_for_file("ready0"), run.wait_for_file("ready1")
    (run.slurm / "state").write_text("PREEMPTED\n")
    run.signal(signal.SIGTERM)
    assert run.wait() == 75
    assert run.events(journal.Requeued)
    assert run.nothing_is_left()


# --- over requeues -----------------------------------------------------------------------------------


def test_three_attempts_that_never_come_to_a_step_are_the_last(job: Jobs, tmp_path: Path) -> None:
    codes = []
    for attempt in range(3):
        run = job(
            RANK + "signal.pause()\n",
            *COLD,
            "--rejoin-timeout",
            "0",
            nodes=2,
            ranks=1,
            SLURM_RESTART_COUNT=str(attempt),
        )
        run.share_run_dir(tmp_path / "shared", tmp_path / "train.py")
        run.start()
        run.wait_for(journal.WorkersStarted, 2 * (attempt + 1))
        run.named("nvrx-agent", "n2").kill()
        codes.append(run.wait())
    assert codes == [75, 75, 93]
    assert run.events(journal.JobEnded)[-1].why.startswith(
        "not to be requeued, 3 attempts in a row have not come to a single step: too few nodes"
    )
