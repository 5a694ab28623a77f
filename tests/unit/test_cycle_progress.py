"""When a job that gets no further is stopped, and when it is not."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.past import Past
from nvrx_slurm.coordinator.progress import Progress
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.journal import FaultKind, VerdictAction

running = Job.running


def plenty(**options: object) -> Job:
    """A running job with more restarts than any of these tests needs."""
    return running(max_restarts=50, **options)


# --- steps of heartbeats -----------------------------------------------------------------------------


def test_cycles_that_come_no_further_than_those_before_end_the_job_with_93() -> None:
    # given a cycle that came to step 40, and two that did not get beyond it
    job = plenty().trains(40).fails().trains(38).fails().trains(40).fails()
    assert job.phase is Phase.RUNNING
    # when a third one does not
    job.trains(40).fails()
    # then the job ends, and the reason names the step
    assert job.end.code == 93
    assert job.end.why == (
        "3 cycles in a row without progress: none came beyond step 40: rank 0 on n1 exited with 1"
    )
    assert (job.verdict.action, job.verdict.rule) == (VerdictAction.STOP, "no-progress")
    assert (job.verdict.node, job.verdict.rank, job.verdict.kind) == ("n1", 0, FaultKind.EXIT)


def test_one_step_more_begins_the_count_anew() -> None:
    job = plenty().trains(40).fails().trains(40).fails().trains(40).fails()
    job.trains(41).fails().trains(41).fails().trains(41).fails()
    assert job.phase is Phase.RUNNING
    assert job.written(journal.CycleScored)[-1] == journal.CycleScored(progressed=False, in_a_row=2, step=41)


def test_it_is_the_highest_step_of_all_earlier_cycles_that_must_be_passed() -> None:
    """After a rollback training is not getting further until it is where it was."""
    job = plenty().trains(100).fails().trains(20).fails().trains(50).fails().trains(99).fails()
    assert job.end.code == 93


def test_less_growth_than_is_asked_for_is_no_progress() -> None:
    job = plenty(min_progress_iterations=10, max_no_progress_cycles=2).trains(40).fails()
    job.trains(50).fails().trains(59).fails().trains(68).fails()
    assert job.end.why.startswith("2 cycles in a row without progress: none came 10 or more beyond step 68")


def test_0_takes_the_bound_away_and_nothing_is_scored() -> None:
    job = plenty(max_no_progress_cycles=0).trains(5)
    for _ in range(20):
        job.fails().trains(5)
    assert job.phase is Phase.RUNNING
    assert not job.written(journal.CycleScored)


def test_the_exit_code_is_the_users() -> None:
    job = plenty(max_no_progress_cycles=1, no_restart_code=42).trains(5).fails().trains(5).fails()
    assert job.end.code == 42


def test_used_up_restarts_are_told_first() -> None:
    job = running(max_restarts=1, max_no_progress_cycles=1).trains(5).fails().trains(5).fails()
    assert job.end == steps.End(1, "restart budget of 1 used up: rank 0 on n1 exited with 1")


# --- steps of checkpoints ----------------------------------------------------------------------------


def test_once_a_checkpoint_was_reported_only_checkpoints_count() -> None:
    """Steps that no checkpoint holds are lost with the next fault."""
    job = plenty().saves(100).trains(150).fails()
    job.loads(100).trains(180).fails().trains(190).fails().trains(199).fails()
    assert job.end.code == 93
    assert "3 cycles in a row without progress: no checkpoint after step 100" in job.end.why


def test_a_later_checkpoint_is_progress_however_few_its_steps() -> None:
    job = plenty().saves(100).trains(150).fails()
    for saved in range(101, 110):
        job.saves(saved).fails()
    assert job.phase is Phase.RUNNING


def test_what_was_loaded_is_not_what_was_achieved() -> None:
    """A job that begins with an earlier job's checkpoint gets no further by coming to where that ended."""
    job = plenty().loads(1000).trains(1000).fails().loads(1000).trains(1000).fails()
    job.loads(1000).trains(999).fails()
    assert job.end.code == 93


def test_a_checkpoint_that_nobody_reported_counts_when_it_is_loaded() -> None:
    job = plenty(max_no_progress_cycles=1).saves(100).fails().loads(200).saves(201).fails()
    assert job.phase is Phase.RUNNING
    assert job.written(journal.CycleScored)[-1].step == 201


# --- nobody says a step ------------------------------------------------------------------------------


def test_cycles_in_which_nobody_tells_a_step_are_not_scored_and_that_is_said_once() -> None:
    job = plenty()
    for _ in range(10):
        job.feed(steps.NodeStepping("n1", job.machine.cycle, None))
        job.fails()
    assert job.phase is Phase.RUNNING
    assert job.written(journal.CycleScored) == [journal.CycleScored(progressed=None, in_a_row=0)]


def test_a_cycle_that_has_hardly_begun_does_not_show_that_nobody_tells_a_step() -> None:
    job = plenty(spares=1).lose("n2").stopped("n1")
    assert job.written(journal.CycleScored) == []
    job.later(60.0).fails(0, -signal.SIGKILL)
    assert job.written(journal.CycleScored) == [journal.CycleScored(progressed=None, in_a_row=0)]


def test_w1_a_cycle_that_ends_before_its_first_heartbeat_harms_no_later_one() -> None:
    """A fault while ranks still load, in the cycle after one that has trained."""
    job = plenty().trains(10).fails().fails().trains(11)
    assert job.phase is Phase.RUNNING
    job.fails()
    assert job.written(journal.CycleScored)[-1].progressed is True


def test_a_program_that_always_fails_at_its_start_is_not_started_for_ever() -> None:
    """Without a client, nor any other sign of what it does."""
    job = plenty().fails().fails()
    assert job.phase is Phase.RUNNING
    job.fails()
    assert job.end.code == 93
    assert job.end.why == (
        "3 cycles in a row ended before the first step, the last by exit 1: rank 0 on n1 exited with 1"
    )


def test_each_start_that_fails_in_another_way_counts_for_itself() -> None:
    job = plenty()
    for code in (1, 2, 1, 2, 1, 1, -11, -11):
        job.fails(code=code)
    assert job.phase is Phase.RUNNING
    assert job.fails(code=-11).end.why.startswith(
        "3 cycles in a row ended before the first step, the last by"
    )


@pytest.mark.parametrize("code", [-signal.SIGKILL, -signal.SIGTERM])
def test_who_is_killed_from_outside_has_not_failed_by_itself(code: int) -> None:
    job = plenty()
    for _ in range(10):
        job.fails(code=code)
    assert job.phase is Phase.RUNNING


def test_a_program_without_client_that_ran_for_a_minute_may_have_trained() -> None:
    job = plenty()
    for _ in range(10):
        job.later(60.0).fails()
    assert job.phase is Phase.RUNNING


def test_a_program_with_client_has_not_trained_before_its_first_heartbeat() -> None:
    """However long it took to load, and whatever ended it."""
    job = plenty()
    job.feed(steps.NodeReady("n1", 0))
    for code in (1, -signal.SIGKILL, 3):
        job.later(600.0).fails(code=code)
    assert job.end.why.startswith("3 cycles in a row ended before the first step, the last by exit 3")


def test_a_heartbeat_of_a_single_rank_is_a_sign_of_life() -> None:
    job = plenty()
    for _ in range(10):
        job.exit(0, 1)
        job.feed(steps.NodeStopped("n1", job.machine.cycle, stalled_s=0.1))
        job.stopped("n2")
    assert job.phase is Phase.RUNNING


def test_a_node_that_is_lost_before_the_first_step_says_nothing_of_the_training() -> None:
    job = plenty(spares=1).trains(10).fails()
    for _ in range(5):
        job.lose("n1").stopped("n2", "n3").join("n1")
    assert job.phase is Phase.RUNNING


# --- the checkpoint-iteration file -------------------------------------------------------------------


def test_the_file_is_read_once_before_the_first_cycle_ends_and_once_after_each() -> None:
    job = plenty(iteration_file=True)
    assert job.all(steps.ReadIteration) == [steps.ReadIteration(None)]
    job.fails().fails()
    assert job.all(steps.ReadIteration)[1:] == [steps.ReadIteration(0), steps.ReadIteration(1)]


def test_a_restart_does_not_wait_for_the_file() -> None:
    job = plenty(iteration_file=True).fails()
    assert job.phase is Phase.RUNNING
    assert len(job.started) == 2


def test_what_the_file_says_at_the_start_is_of_an_earlier_job() -> None:
    job = plenty(iteration_file=True).file_says(100)
    for _ in range(3):
        job.trains(150).fails().file_says(100)
    # The fourth cycle has begun, and is stopped.
    assert job.new(steps.StopCycle) == [steps.StopCycle(3, ("n1", "n2"))]
    assert job.stopped("n1", "n2").end.code == 93
    assert job.end.why == "3 cycles in a row without progress: no checkpoint after step 100"
    assert (job.verdict.rule, job.verdict.kind) == ("no-progress", None)


def test_a_reading_while_nodes_are_awaited_ends_the_job_too() -> None:
    job = Job(2, 1, iteration_file=True, max_no_progress_cycles=1).join("n1", "n3").fire(Timer.FORM_GRACE)
    job.file_says(7).lose("n3").stopped("n1")
    assert job.phase is Phase.FORMING
    assert job.file_says(7).end.code == 93


def test_a_file_that_cannot_be_read_scores_nothing() -> None:
    job = plenty(iteration_file=True).file_says(100)
    for _ in range(10):
        job.trains(150).fails().file_says(None)
    assert job.phase is Phase.RUNNING


def test_a_reading_that_hangs_for_a_whole_cycle_counts_as_none() -> None:
    job = plenty(iteration_file=True, max_no_progress_cycles=1).file_says(100).trains(150).fails()
    late = job.all(steps.ReadIteration)[-1].cycle
    job.trains(150).fails()
    job.feed(steps.IterationRead(late, 100))
    assert job.phase is Phase.RUNNING
    assert job.file_says(101).phase is Phase.RUNNING


def test_w16_one_stale_reading_of_the_file_stops_nothing() -> None:
    """There is one reader and one count; the next reading makes good for a stale one."""
    job = plenty(iteration_file=True).file_says(100)
    for newest in range(200, 2000, 100):
        job.trains(newest).fails().file_says(100 if newest % 300 else newest)
    assert job.phase is Phase.RUNNING


def test_w16_nodes_that_disagree_about_the_step_do_not_stop_the_job() -> None:
    """A node that is behind, as each node's reading may be, says nothing about the others."""
    job = plenty()
    for newest in range(10, 100, 10):
        job.trains(newest, rank=0).trains(3, rank=2).fails()
    assert job.phase is Phase.RUNNING


# --- restarts within an hour -------------------------------------------------------------------------


def test_more_restarts_within_an_hour_than_are_allowed_fail_the_job() -> None:
    job = (
        plenty(max_restarts_per_hour=2, max_no_progress_cycles=0)
        .fails()
        .later(600)
        .fails()
        .later(600)
        .fails()
    )
    assert job.end.code == 1
    assert job.end.why == (
        "2 restarts within the last hour, and no more are allowed: rank 0 on n1 exited with 1"
    )
    assert job.verdict.rule == "restarts-per-hour"


def test_restarts_that_are_an_hour_ago_do_not_count() -> None:
    job = plenty(max_restarts_per_hour=2, max_no_progress_cycles=0)
    for _ in range(10):
        job.later(1800).fails()
    assert job.phase is Phase.RUNNING
    assert job.later(1799).fails().end.code == 1


# --- over requeues -----------------------------------------------------------------------------------


def test_the_count_goes_on_where_an_earlier_attempt_was() -> None:
    past = Past(Progress(step=40, in_a_row=2, monitored=True))
    job = plenty(past=past).trains(40).fails()
    assert job.end.why.startswith("3 cycles in a row without progress: none came beyond step 40")
    assert past.progress.in_a_row == 2


def test_an_attempt_that_never_comes_to_a_step_is_requeued_twice_but_not_a_third_time() -> None:
    assert running(past=Past(fruitless=1)).lose("n2").stopped("n1").end.code == 75
    job = running(past=Past(fruitless=2)).lose("n2").stopped("n1")
    assert job.end.code == 93
    assert job.end.why.startswith(
        "not to be requeued, 3 attempts in a row have not come to a single step: too few nodes"
    )


@pytest.mark.parametrize("sign", ["step", "checkpoint", "a long run"])
def test_an_attempt_that_trained_is_requeued_always(sign: str) -> None:
    job = running(past=Past(fruitless=7))
    match sign:
        case "step":
            job.trains(1)
        case "checkpoint":
            job.saves(1)
        case _:
            job.later(300.0)
    assert job.lose("n2").stopped("n1").end.code == 75


def test_a_preempted_job_is_requeued_however_often() -> None:
    job = (
        running(past=Past(fruitless=7))
        .lose("n1", "n2", by_signal=True)
        .slurm_answers("RUNNING", preempted=True)
    )
    assert job.end == steps.End(75, "Slurm preempts the job")


def test_an_attempt_without_client_that_the_time_limit_ends_is_requeued() -> None:
    job = running(past=Past(fruitless=7)).drain().exit_all()
    assert job.end.code == 75


def test_an_attempt_with_client_that_the_time_limit_ends_before_any_step_is_not_a_third_time() -> None:
    job = running(past=Past(fruitless=2))
    job.feed(steps.NodeReady("n1", 0))
    assert job.drain().exit_all().end.code == 93
