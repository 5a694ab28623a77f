"""What ranks, Slurm and people ask of a running job, and what comes of it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.journal import FaultKind
from nvrx_slurm.wire.rank_channel import WorkloadAction

running = Job.running
EXCLUDE = WorkloadAction.ExcludeThisNode
SHUT_DOWN = WorkloadAction.ShutdownWorkload


# --- exclude this node -------------------------------------------------------------------------------


def test_w13_a_request_to_exclude_the_node_acts_at_once() -> None:
    # given a job with a spare; when a rank wants its node out
    job = running(spares=1).asks(2, EXCLUDE)
    # then all ranks are stopped at once, though none has failed
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    # and when they have stopped, the spare has its place, and the node is out for good
    job.stopped("n1", "n2")
    assert job.started[-1] == ("n1", "n3")
    assert journal.NodeExcluded(node="n2", reason="rank 2 asked for it: a GPU is slow") in job.journal
    assert job.join("n2").new(steps.Disconnect) == [
        steps.Disconnect("n2", "rank 2 asked for it: a GPU is slow")
    ]
    assert (job.verdict.rule, job.verdict.node, job.verdict.kind) == ("asked-for", "n2", FaultKind.REQUEST)


def test_who_asked_and_why_is_in_the_journal() -> None:
    job = running(spares=1).asks(2, EXCLUDE).stopped("n1", "n2")
    assert job.written(journal.ControlRequested) == [
        journal.ControlRequested(action="ExcludeThisNode", node="n2", rank=2, why="a GPU is slow")
    ]
    assert job.verdict.why == "rank 2 on n2 asked to exclude its node (a GPU is slow)"


def test_without_a_spare_the_job_goes_on_elsewhere() -> None:
    job = running().asks(2, EXCLUDE).stopped("n1", "n2")
    assert job.end.code == 75
    assert "too few nodes" in job.end.why


def test_a_request_explains_what_breaks_because_of_it() -> None:
    job = running(spares=1).asks(2, EXCLUDE).exit(0, -signal.SIGABRT).exit(2, 1).stopped("n1", "n2")
    assert job.verdict.rule == "asked-for"


def test_w13_it_makes_no_difference_whether_the_rank_exits_before_its_request_arrives() -> None:
    job = running(spares=1).exit(2, 1).asks(2, EXCLUDE).stopped("n1", "n2")
    assert job.started[-1] == ("n1", "n3")


def test_two_ranks_of_a_node_that_want_it_out_take_it_out_once() -> None:
    job = running(spares=1).asks(2, EXCLUDE).asks(3, EXCLUDE).stopped("n1", "n2")
    assert len(job.written(journal.NodeExcluded)) == 1
    assert job.started[-1] == ("n1", "n3")


@pytest.mark.parametrize(("node", "rank", "cycle"), [("n1", 2, 0), ("n2", 2, 7), ("n3", 2, 0), ("n2", 99, 0)])
def test_a_request_about_another_nodes_rank_or_another_cycle_is_none(
    node: str, rank: int, cycle: int
) -> None:
    job = running(spares=1)
    for action in (EXCLUDE, SHUT_DOWN):
        assert job.feed(steps.ControlRequested(node, cycle, rank, action, "by a stranger")) == []


# --- shut the workload down --------------------------------------------------------------------------


def test_w13_a_request_to_shut_down_stops_every_rank_at_once_and_the_job_exits_with_0() -> None:
    job = running(spares=1).asks(3, SHUT_DOWN, "the loss is good enough")
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    assert job.phase is Phase.STOPPING
    job.stopped("n1", "n2")
    assert job.end == steps.End(0, "rank 3 on n2 asked to shut the workload down: the loss is good enough")
    assert job.written(journal.ControlRequested)[0].action == "ShutdownWorkload"
    assert not job.faults


@pytest.mark.parametrize(
    "before",
    [
        lambda job: job.exit(3, 1),
        lambda job: job.exit(3, 0),
        lambda job: job.exit(0, -signal.SIGKILL),
        lambda job: job.stall(1),
        lambda job: job.exit(0, 1).stopped("n1"),
        lambda job: job.lose("n1"),
        lambda job: job.drain(),
    ],
    ids=["its exit", "its success", "another's death", "a search", "half stopped", "a lost node", "a drain"],
)
def test_w13_its_exit_code_does_not_depend_on_what_happens_around_it(before: Callable[[Job], Job]) -> None:
    job = before(running()).asks(3, SHUT_DOWN)
    job.stopped("n1", "n2")
    assert job.end.code == 0


def test_what_fails_while_the_workload_shuts_down_is_no_fault_of_the_job() -> None:
    job = running().asks(3, SHUT_DOWN).exit(0, 1).lose("n1").stopped("n2")
    assert job.end.code == 0


def test_a_job_that_slurm_ends_does_not_become_a_success_by_a_request() -> None:
    job = running().signal().asks(3, SHUT_DOWN).stopped("n1", "n2")
    assert job.end.code == 143


def test_a_signal_while_the_workload_shuts_down_changes_nothing_but_a_second_ends_the_wait() -> None:
    job = running().asks(3, SHUT_DOWN).signal()
    assert job.phase is Phase.STOPPING
    assert job.signal().end.code == 143
    assert running().asks(3, SHUT_DOWN).signal().stopped("n1", "n2").end.code == 0


# --- time limit and preemption -----------------------------------------------------------------------


def test_the_time_limit_asks_ranks_to_save_and_the_job_to_be_requeued() -> None:
    job = running()
    job.feed(steps.DrainRequested(why="the time limit, 120 s away"))
    assert job.new(steps.AskRanksToStop) == [steps.AskRanksToStop(0, ("n1", "n2"))]
    assert job.written(journal.StopRequested) == [
        journal.StopRequested(signal="", why="the time limit, 120 s away")
    ]
    assert job.exit_all().end.code == 75


def test_a_signal_after_the_timer_asks_nobody_a_second_time() -> None:
    job = running()
    job.feed(steps.DrainRequested(why="the time limit, 120 s away"))
    assert job.feed(steps.DrainRequested(signal.SIGUSR2)) == []


def test_sigterm_stops_the_ranks_and_asks_slurm_at_the_same_time() -> None:
    job = running()
    job.feed(steps.StopRequested(signal.SIGTERM))
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    assert job.new(steps.ConsultSlurm) == [steps.ConsultSlurm()]


@pytest.mark.parametrize("answer_first", [True, False])
def test_a_preempted_job_asks_to_be_requeued_whoever_answers_first(answer_first: bool) -> None:
    job = running()
    job.feed(steps.StopRequested(signal.SIGTERM))
    if answer_first:
        job.slurm_answers("RUNNING", preempted=True).stopped("n1", "n2")
    else:
        job.stopped("n1", "n2").slurm_answers("RUNNING", preempted=True)
    assert job.end == steps.End(75, "Slurm preempts the job")
    assert journal.StopRequested(signal="", why="a preemption by Slurm", preempted=True) in job.journal
    assert not job.faults


def test_a_cancelled_job_is_not_taken_for_a_preempted_one() -> None:
    job = running().signal().stopped("n1", "n2")
    assert job.end == steps.End(143, "asked to stop by SIGTERM")


def test_slurm_that_does_not_answer_delays_the_end_by_a_bounded_time() -> None:
    job = running()
    job.feed(steps.StopRequested(signal.SIGTERM))
    job.stopped("n1", "n2")
    assert job.timers == {Timer.CONSULT: job.policy.consult_timeout_s}
    assert job.fire(Timer.CONSULT).end.code == 143


def test_agents_that_leave_because_of_a_preemption_make_the_job_ask_for_a_requeue() -> None:
    """Slurm 22.05 sends SIGTERM to the steps alone when a time of grace begins."""
    job = running().lose("n1", "n2", by_signal=True)
    assert job.phase is Phase.CONSULTING
    assert job.slurm_answers("RUNNING", preempted=True).end.code == 75
    assert not job.faults
