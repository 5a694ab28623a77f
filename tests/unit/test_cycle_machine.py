"""The job's state machine: what follows from each event, one rule at a time."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job, snapshot

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.journal import FaultKind, VerdictAction

running = Job.running


# --- forming -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [0, 3])
def test_a_policy_asks_for_a_possible_number_of_nodes(active: int) -> None:
    with pytest.raises(ValueError, match="not within 1…2"):
        CycleMachine(Policy(nodes=("n1", "n2"), active_nodes=active, max_restarts=0))


def test_the_first_cycle_starts_when_the_last_node_joins() -> None:
    job = Job(active=2).join("n2")
    assert job.started == []
    job.join("n1")
    assert job.new(steps.StartCycle) == [steps.StartCycle(cycle=0, nodes=("n1", "n2"), slots=2)]
    assert job.phase is Phase.RUNNING
    assert job.timers == {}


def test_group_ranks_follow_the_order_of_preference_whoever_joins_first() -> None:
    job = Job(active=3).join("n3", "n1", "n2")
    assert job.started == [("n1", "n2", "n3")]


def test_the_start_is_journalled_with_its_spares() -> None:
    job = running(active=2, spares=1)
    (started,) = job.written(journal.CycleStarted)
    assert started == journal.CycleStarted(world_size=4, nodes=["n1", "n2"], spares=["n3"])


def test_cycles_count_on_from_those_of_earlier_attempts() -> None:
    machine = CycleMachine(Policy(nodes=("n1",), active_nodes=1, max_restarts=0, first_cycle=7))
    commands = machine.handle(steps.NodeJoined("n1", 1), 0.0)
    assert steps.StartCycle(7, ("n1",), 1) in commands


def test_with_enough_nodes_the_rest_gets_a_moment_so_that_a_spare_stays_one() -> None:
    job = Job(active=2, spares=1).join("n1", "n3")
    assert job.started == []
    assert Timer.FORM_GRACE in job.timers
    job.join("n2")
    assert job.started == [("n1", "n2")]


def test_the_rest_has_as_long_as_the_first_have_taken_within_bounds() -> None:
    """On a machine where agents are slow to start, they start at more different times, too."""
    for took, grace in ((0.5, 2.0), (9.0, 9.0), (120.0, 15.0)):
        job = Job(active=2, spares=1)
        job.now += took
        job.join("n1", "n3")
        assert job.timers[Timer.FORM_GRACE] == grace


def test_after_that_moment_the_job_starts_without_the_rest() -> None:
    job = Job(active=2, spares=1).join("n1", "n3").fire(Timer.FORM_GRACE)
    assert job.started == [("n1", "n3")]


def test_a_restart_does_not_wait_for_nodes_that_it_can_do_without() -> None:
    job = Job(active=2, spares=1).join("n1", "n3").fire(Timer.FORM_GRACE)
    job.exit(0, 1).stopped("n1", "n3")
    assert job.started == [("n1", "n3")] * 2


def test_a_restart_waits_for_nodes_that_it_needs_and_may_still_come() -> None:
    job = Job(active=2, spares=1).join("n1", "n3").fire(Timer.FORM_GRACE).lose("n3").stopped("n1")
    assert job.phase is Phase.FORMING
    assert job.timers == {Timer.JOIN: job.policy.join_timeout_s}
    assert job.join("n2").started[-1] == ("n1", "n2")


def test_too_few_nodes_by_the_join_time_out_end_the_job_with_75() -> None:
    job = Job(active=2).join("n1").fire(Timer.JOIN)
    assert job.end.code == 75
    assert "training needs 2, 1 is left" in job.end.why
    assert journal.NodeLost(node="n2", why="its agent never joined") in job.journal


def test_a_spare_that_never_joins_is_done_without() -> None:
    job = Job(active=2, spares=1).join("n1", "n2").fire(Timer.JOIN)
    assert job.started == [("n1", "n2")]


def test_srun_that_ends_before_any_agent_came_fails_the_job_with_its_words() -> None:
    job = Job(active=2)
    job.feed(steps.StepEnded("srun ended with 1: Unable to create step"))
    assert job.end.code == 1
    assert "Unable to create step" in job.end.why


def test_srun_that_ends_leaves_nobody_to_wait_for() -> None:
    job = Job(active=2).join("n1")
    job.feed(steps.StepEnded("srun ended with 1"))
    assert job.end.code == 75


def test_srun_that_ends_while_ranks_run_is_no_fault() -> None:
    job = running()
    job.feed(steps.StepEnded("srun ended with -9"))
    assert job.phase is Phase.RUNNING
    assert job.exit_all().end.code == 0


def test_a_node_of_somebody_else_is_turned_away() -> None:
    job = Job(active=2).join("x9")
    assert job.last == [steps.Disconnect("x9", "x9 is not a node of this job")]


@pytest.mark.parametrize("slots", [0, 1, 4])
def test_a_node_with_other_slots_than_the_first_is_excluded(slots: int) -> None:
    job = Job(active=2, spares=1).join("n1").join("n2", slots=slots)
    (excluded,) = job.written(journal.NodeExcluded)
    assert excluded.node == "n2"
    assert f"offers {slots} worker slots" in excluded.reason
    assert job.new(steps.Disconnect) == [steps.Disconnect("n2", excluded.reason)]
    assert job.join("n3").started == [("n1", "n3")]
    assert job.join("n2").last == [steps.Disconnect("n2", excluded.reason)], "for good"


def test_a_first_node_without_slots_does_not_set_the_measure() -> None:
    job = Job(active=2, spares=1).join("n1", slots=0).join("n2", "n3")
    assert job.started == [("n2", "n3")]


def test_options_that_a_node_cannot_satisfy_end_the_job_at_once_and_accuse_no_node() -> None:
    # A requeue would exclude node after node, all of them healthy.
    job = Job(active=2, spares=1).join("n1", "n3")
    job.feed(steps.NodeUnusable("n2", "--nproc-per-node=gpu, but there is no GPU"))
    assert job.end == steps.End(2, "n2: --nproc-per-node=gpu, but there is no GPU")
    assert not job.written(journal.NodeExcluded)


def test_a_cancelled_job_has_no_fault_whoever_hears_of_it_first() -> None:
    # given a job that Slurm cancels: SIGTERM to every process on every node, in any order
    job = running()
    job.exit(1, -signal.SIGTERM)
    job.feed(steps.NodeLeaving("n2", "the agent received SIGTERM", by_signal=True))
    # when the Coordinator hears of it while the ranks stop
    job.feed(steps.StopRequested(signal.SIGTERM))
    job.stopped("n1", "n2")
    # and Slurm says that it has not been preempted
    job.slurm_answers("CANCELLED")
    # then the job was stopped, and nothing has failed
    assert job.end.code == 143
    assert not job.written(journal.FaultDetected)
    assert not job.written(journal.Verdict)


def test_a_rank_that_somebody_else_terminates_is_a_fault_once_all_have_stopped() -> None:
    job = running()
    job.exit(1, -signal.SIGTERM)
    assert not job.written(journal.FaultDetected)
    job.stopped("n1", "n2")
    (fault,) = job.written(journal.FaultDetected)
    assert (fault.rank, fault.signal) == (1, "SIGTERM")
    assert job.written(journal.Verdict)[0].rank == 1


def test_a_node_lost_before_the_start_is_missed() -> None:
    job = Job(active=2).join("n1").lose("n1")
    assert job.end.code == 75
    assert "0 are left" in job.end.why


# --- running to success ------------------------------------------------------------------------------


def test_the_job_succeeds_when_every_rank_has_exited_with_0() -> None:
    job = running().exit_all(but=[3])
    assert job.phase is Phase.RUNNING
    job.exit(3, 0)
    assert job.end == steps.End(0, "all 4 ranks exited with 0")
    assert job.written(journal.JobEnded) == [journal.JobEnded(code=0, why="all 4 ranks exited with 0")]


def test_a_rank_counts_once_however_often_its_exit_is_told() -> None:
    job = running().exit(0, 0).exit(0, 0).exit(0, 0).exit(0, 0)
    assert job.phase is Phase.RUNNING


def test_a_rank_that_has_exited_well_cannot_fail_any_more() -> None:
    job = running().exit(0, 0).exit(0, -9).exit(0, 1)
    assert job.phase is Phase.RUNNING
    assert job.faults == []


def test_exits_after_a_stop_of_the_agents_own_are_no_success() -> None:
    """Slurm signals every agent at the time limit; ranks that end well on SIGTERM have not finished."""
    job = running()
    for rank in range(4):
        job.exit(rank, 0, after_stop=True)
    assert job.phase is Phase.RUNNING
    assert job.all(steps.End) == []


def test_nothing_happens_after_the_end() -> None:
    job = running().exit_all()
    for event in (
        steps.NodeJoined("n1", 2),
        steps.NodeLost("n2", "gone"),
        steps.RankExited("n1", 0, 0, 1, False),
        steps.StopRequested(signal.SIGTERM),
        steps.DrainRequested(signal.SIGUSR2),
        steps.StoreLost("n1", "gone"),
        *(steps.TimerFired(timer) for timer in Timer),
    ):
        assert job.feed(event) == []


def test_a_node_that_has_finished_may_go() -> None:
    job = running().exit(2, 0).exit(3, 0).lose("n2")
    assert job.phase is Phase.RUNNING
    assert job.exit(0, 0).exit(1, 0).end.code == 0


def test_readiness_is_told_when_the_last_node_is_ready_and_once() -> None:
    job = running()
    for node in ("n1", "n1", "n2", "n2"):
        job.feed(steps.NodeReady(node, 0))
        job.feed(steps.NodeStepping(node, 0, 12))
    assert job.written(journal.RankReady) == [journal.RankReady(ranks=4)]
    assert job.written(journal.FirstStep) == [journal.FirstStep(ranks=4, step=12)]


# --- faults and restarts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (3, {"kind": FaultKind.EXIT, "exit": 3, "signal": None}),
        (-9, {"kind": FaultKind.SIGNAL, "exit": None, "signal": "SIGKILL"}),
        (-11, {"kind": FaultKind.SIGNAL, "exit": None, "signal": "SIGSEGV"}),
        (-40, {"kind": FaultKind.SIGNAL, "exit": None, "signal": "signal 40"}),
    ],
)
def test_a_failed_rank_stops_all_nodes_at_once(code: int, fault: dict[str, object]) -> None:
    job = running().exit(3, code)
    (detected,) = job.faults
    assert {name: getattr(detected, name) for name in fault} == fault
    assert (detected.node, detected.rank, detected.detector) == ("n2", 3, "child")
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    assert job.timers == {Timer.STOP: job.policy.stop_timeout_s}


def test_the_next_cycle_starts_when_every_node_has_stopped() -> None:
    job = running().exit(3, 1).stopped("n2")
    assert len(job.started) == 1
    job.now += 0.25
    job.stopped("n1")
    assert job.new(steps.StartCycle) == [steps.StartCycle(1, ("n1", "n2"), 2)]
    assert job.written(journal.WorkersStopped) == [journal.WorkersStopped(nodes=2, seconds=0.25)]
    assert job.verdict == journal.Verdict(
        action=VerdictAction.RESTART,
        rule="first-exit",
        why="rank 3 on n2 exited with 1",
        node="n2",
        rank=3,
        kind=FaultKind.EXIT,
    )


def test_a_node_counts_once_however_often_it_says_that_it_has_stopped() -> None:
    job = running().exit(3, 1).stopped("n2", "n2", "n2")
    assert job.phase is Phase.STOPPING


def test_a_restart_writes_in_this_order() -> None:
    job = running()
    before = len(job.journal)
    job.exit(3, 1).stopped("n1", "n2")
    order = [event.__struct_config__.tag for event in job.journal[before:]]
    assert order == ["fault_detected", "workers_stopped", "cycle_scored", "verdict", "cycle_started"]


def test_what_breaks_while_ranks_are_stopped_is_journalled_and_changes_nothing() -> None:
    job = running().exit(3, -9).exit(0, 1).exit(1, 1, after_stop=True)
    assert [(fault.rank, fault.kind) for fault in job.faults] == [(3, FaultKind.SIGNAL), (0, FaultKind.EXIT)]
    assert len(job.all(steps.StopCycle)) == 1
    job.stopped("n1", "n2")
    assert job.verdict.rank == 3


def test_the_same_fault_seen_twice_is_journalled_once() -> None:
    job = running()
    for _ in range(2):
        job.feed(steps.StartFailed("n2", 0, "no space left on device"))
        job.feed(steps.StoreLost("n1", "its process ended with -9"))
    assert [fault.detector for fault in job.faults] == ["start", "store"]


def test_a_cycle_that_is_being_stopped_does_not_become_ready() -> None:
    job = running().exit(0, 1)
    for node in ("n1", "n2"):
        job.feed(steps.NodeReady(node, 0))
        job.feed(steps.NodeStepping(node, 0, 3))
    assert job.written(journal.RankReady) == []
    assert job.written(journal.FirstStep) == []


def test_the_verdict_names_the_cause_even_if_a_consequence_was_seen_first() -> None:
    job = running().exit(0, 1).exit(3, -9).stopped("n1", "n2")
    assert (job.verdict.rank, job.verdict.rule) == (3, "killed-by-signal")


def test_ranks_that_cannot_be_started_are_a_fault_of_their_node() -> None:
    job = running()
    job.feed(steps.StartFailed("n2", 0, "no space left on device"))
    job.stopped("n1", "n2")
    assert job.verdict.kind is FaultKind.START
    assert job.verdict.why == "n2 could not start (no space left on device)"


def test_a_lost_store_restarts_all_ranks() -> None:
    job = running()
    job.feed(steps.StoreLost("n1", "its process ended with -9"))
    assert job.phase is Phase.STOPPING
    job.stopped("n1", "n2")
    assert len(job.started) == 2


def test_a_store_lost_between_cycles_is_no_fault() -> None:
    job = Job(active=2).join("n1")
    job.feed(steps.StoreLost("n1", "its process ended with -9"))
    assert job.join("n2").phase is Phase.RUNNING
    assert job.faults == []


def test_the_budget_ends_the_job_with_1() -> None:
    job = running(max_restarts=1)
    job.exit(3, 7).stopped("n1", "n2")
    job.exit(3, 7).stopped("n1", "n2")
    assert job.end == steps.End(1, "restart budget of 1 used up: rank 3 on n2 exited with 7")
    assert job.verdict.action is VerdictAction.STOP
    assert len(job.started) == 2


def test_without_a_budget_the_first_fault_is_the_last() -> None:
    job = running(max_restarts=0).exit(0, 1).stopped("n1", "n2")
    assert job.end.code == 1
    assert len(job.started) == 1


# --- lost nodes --------------------------------------------------------------------------------------


def test_a_spare_takes_the_group_rank_of_a_lost_node() -> None:
    job = running(active=3, spares=1).lose("n2")
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n3"))], "n2 cannot be told"
    job.stopped("n1", "n3")
    assert job.started == [("n1", "n2", "n3"), ("n1", "n4", "n3")]
    assert job.verdict.why == "node n2 lost (its connection broke)"


def test_survivors_keep_their_place_when_a_preferred_node_comes_back() -> None:
    job = running(active=2, spares=1).lose("n1").stopped("n2").join("n1")
    assert job.started[-1] == ("n3", "n2")
    job.exit(0, 1).stopped("n3", "n2")
    assert job.started[-1] == ("n3", "n2")
    assert job.machine.spares == ("n1",)


def test_a_spare_may_go_without_anybody_noticing() -> None:
    job = running(active=2, spares=1).lose("n3")
    assert job.phase is Phase.RUNNING
    assert journal.NodeLost(node="n3", why="its connection broke") in job.journal


def test_too_few_nodes_end_the_job_with_75_once_the_others_have_stopped() -> None:
    job = running().lose("n2")
    assert job.phase is Phase.STOPPING
    job.stopped("n1")
    assert job.end.code == 75
    assert "too few nodes: training needs 2, 1 is left and there is no spare: node n2 lost" in job.end.why


def test_a_lost_node_explains_the_exits_that_it_caused() -> None:
    job = running(active=2, spares=1).exit(0, 1).lose("n2").stopped("n1")
    assert (job.verdict.node, job.verdict.kind) == ("n2", FaultKind.NODE_LOST)


def test_a_node_that_had_finished_explains_nothing() -> None:
    job = running(active=2, spares=1).exit(2, 0).exit(3, 0).exit(0, 1).lose("n2").stopped("n1")
    assert (job.verdict.rank, job.verdict.kind) == (0, FaultKind.EXIT)


def test_a_node_lost_while_it_stops_is_not_waited_for() -> None:
    job = running(active=2, spares=1).exit(0, 1).stopped("n1").lose("n2")
    assert job.started[-1] == ("n1", "n3")


def test_a_node_that_does_not_stop_in_time_is_excluded() -> None:
    job = running(active=2, spares=1).exit(0, 1).stopped("n1").fire(Timer.STOP)
    (excluded,) = job.written(journal.NodeExcluded)
    assert (excluded.node, excluded.reason) == ("n2", "did not stop its workers within 30 s")
    assert steps.Disconnect("n2", excluded.reason) in job.last
    assert job.started[-1] == ("n1", "n3")
    assert job.join("n2").new(steps.Disconnect) == [steps.Disconnect("n2", excluded.reason)]


def test_a_slow_node_is_missed_when_there_is_no_spare() -> None:
    job = running().exit(0, 1).stopped("n1").fire(Timer.STOP)
    assert job.end.code == 75


def test_late_nodes_become_spares() -> None:
    job = Job(active=1, spares=1).join("n1").fire(Timer.FORM_GRACE).join("n2")
    assert job.machine.spares == ("n2",)
    assert job.lose("n1").started[-1] == ("n2",)


# --- agents that leave, or come twice ----------------------------------------------------------------


def test_an_agent_that_leaves_stops_the_others_before_its_ranks_have_ended() -> None:
    job = running(active=2, spares=1)
    job.feed(steps.NodeLeaving("n2", "the agent received SIGTERM", by_signal=True))
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    job.stopped("n1")
    assert job.phase is Phase.STOPPING, "its ranks are still there"
    job.stopped("n2")
    assert job.started[-1] == ("n1", "n3"), "it is connected, but not for long"
    assert len(job.lose("n2", by_signal=True).started) == 2
    assert [fault.kind for fault in job.faults] == [FaultKind.NODE_LOST]


def test_a_spare_that_leaves_is_not_chosen() -> None:
    job = running(active=1, spares=2)
    job.feed(steps.NodeLeaving("n2", "the agent received SIGTERM", by_signal=True))
    assert job.lose("n1").started[-1] == ("n3",)


def test_when_nodes_left_on_a_signal_slurm_is_asked_whether_it_ends_the_job() -> None:
    job = running().lose("n1", "n2", by_signal=True)
    assert job.phase is Phase.CONSULTING
    assert job.new(steps.ConsultSlurm) == [steps.ConsultSlurm()]
    job.feed(steps.SlurmAnswered("CANCELLED"))
    assert job.end == steps.End(143, "Slurm has ended the job: CANCELLED")


@pytest.mark.parametrize("state", [None, "RUNNING"])
def test_if_slurm_does_not_end_the_job_it_wants_other_nodes(state: str | None) -> None:
    job = running().lose("n2", by_signal=True).stopped("n1")
    job.feed(steps.SlurmAnswered(state))
    assert job.end.code == 75


def test_a_rank_that_was_terminated_is_told_of_when_slurm_does_not_end_the_job() -> None:
    job = running().exit(3, -signal.SIGTERM).lose("n2", by_signal=True).stopped("n1")
    assert job.faults == []
    job.feed(steps.SlurmAnswered("RUNNING"))
    assert (3, "SIGTERM") in [(fault.rank, fault.signal) for fault in job.faults]
    assert job.verdict.action is VerdictAction.STOP


def test_slurm_that_does_not_answer_is_not_waited_for() -> None:
    job = running().lose("n1", "n2", by_signal=True).fire(Timer.CONSULT)
    assert job.end.code == 75


def test_slurm_is_not_asked_about_nodes_that_broke() -> None:
    job = running().lose("n1", "n2")
    assert job.all(steps.ConsultSlurm) == []
    assert job.end.code == 75


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    job = running()
    assert job.feed(steps.SlurmAnswered("CANCELLED")) == []
    assert job.phase is Phase.RUNNING


def test_a_second_agent_takes_the_place_of_the_first_and_the_ranks_start_anew() -> None:
    job = running().join("n2")
    assert job.phase is Phase.STOPPING
    assert [fault.detail for fault in job.faults] == ["another agent of this node took its place"]
    job.stopped("n1", "n2")
    assert job.started == [("n1", "n2")] * 2


@pytest.mark.parametrize("fault_first", [False, True])
def test_a_second_agent_on_the_only_node_is_no_lack_of_nodes(fault_first: bool) -> None:
    job = running(active=1)
    if fault_first:
        job.exit(0, 1)
    job.join("n1").stopped("n1")
    assert job.started == [("n1",)] * 2


def test_a_second_agent_before_the_start_is_as_good_as_the_first() -> None:
    job = Job(active=2).join("n1", "n1", "n2")
    assert job.started == [("n1", "n2")]


def test_a_second_agent_that_cannot_take_part_does_not_disturb_the_first() -> None:
    job = running()
    assert job.feed(steps.NodeUnusable("n2", "no GPU here")) == []
    assert job.exit_all().end.code == 0


# --- hangs -------------------------------------------------------------------------------------------


def test_when_a_rank_is_late_the_other_nodes_are_asked_what_they_see() -> None:
    job = running(active=3).stall(0, snapshot(0), snapshot(1))
    assert job.phase is Phase.DIAGNOSING
    assert job.new(steps.ProbeNodes) == [steps.ProbeNodes(0, ("n2", "n3"))]
    assert job.faults == [], "not before they have answered"


def test_the_culprit_is_who_is_behind_and_it_is_stopped_without_grace() -> None:
    job = running().stall(0, snapshot(0), snapshot(1))
    job.answer_probe("n2", snapshot(2), snapshot(3, heartbeats=9))
    (fault,) = job.faults
    assert (fault.kind, fault.node, fault.rank) == (FaultKind.HANG, "n2", 3)
    assert fault.detail == "no heartbeat for 6 s; it is behind the others, with 9 heartbeats"
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"), hung=(3,))]
    assert Timer.PROBE not in job.timers


def test_who_does_not_answer_in_time_is_not_waited_for() -> None:
    job = running().stall(1, snapshot(0), snapshot(1, state="T")).fire(Timer.PROBE)
    (fault,) = job.faults
    assert (fault.rank, fault.detail) == (1, "no heartbeat for 6 s; its process is stopped")


def test_a_job_of_one_node_asks_nobody() -> None:
    job = running(active=1).stall(1, snapshot(0, 12), snapshot(1, 11))
    assert [fault.rank for fault in job.faults] == [1]


def test_several_late_ranks_are_one_hang() -> None:
    job = running().stall(0, snapshot(0), snapshot(1)).stall(2, snapshot(2, 3), snapshot(3)).stall(1)
    assert [fault.rank for fault in job.faults] == [2]


def test_a_late_rank_that_finishes_meanwhile_has_not_hung() -> None:
    job = running().stall(0, snapshot(0), snapshot(1)).exit(0, 0).fire(Timer.PROBE)
    assert job.phase is Phase.RUNNING
    assert job.faults == []
    assert job.exit_all(but=[0]).end.code == 0


def test_a_rank_that_has_finished_is_not_held_to_be_behind() -> None:
    job = running().exit(3, 0).stall(0, snapshot(0), snapshot(1))
    job.answer_probe("n2", snapshot(2, age_s=9.0), snapshot(3, heartbeats=1))
    assert [fault.rank for fault in job.faults] == [2]


def test_a_rank_that_dies_during_the_search_ends_it() -> None:
    job = running().stall(0, snapshot(0)).exit(3, -9)
    assert [fault.kind for fault in job.faults] == [FaultKind.SIGNAL]
    assert Timer.PROBE not in job.timers
    assert job.answer_probe("n2", snapshot(2)).last == []


def test_a_node_cannot_accuse_the_ranks_of_another() -> None:
    job = running().stall(0, snapshot(0), snapshot(1), snapshot(3, heartbeats=0, state="T"))
    job.answer_probe("n2", snapshot(2, age_s=7.0), snapshot(3), snapshot(0, heartbeats=0))
    assert [fault.rank for fault in job.faults] == [2]


# --- being asked to stop -----------------------------------------------------------------------------


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_ranks_and_ends_the_job_with_its_number(sig: signal.Signals, code: int) -> None:
    job = running().signal(sig)
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    assert job.all(steps.End) == []
    job.stopped("n1", "n2")
    assert job.end == steps.End(code, f"asked to stop by {sig.name}")
    assert job.written(journal.Verdict) == [], "nobody is to blame"


def test_a_signal_before_the_start_ends_the_job_at_once() -> None:
    assert Job(active=2).join("n1").signal().end.code == 143


def test_a_signal_during_a_restart_turns_it_into_the_end() -> None:
    job = running().exit(0, 1).signal().stopped("n1", "n2")
    assert job.end.code == 143
    assert len(job.started) == 1
    assert len(job.all(steps.StopCycle)) == 1


def test_a_second_signal_does_not_wait_for_ranks() -> None:
    assert running().signal().signal().end.code == 143


def test_a_node_that_does_not_stop_does_not_keep_a_signalled_job() -> None:
    job = running().signal().stopped("n1").fire(Timer.STOP)
    assert job.end.code == 143


def test_a_node_lost_after_the_signal_is_no_fault() -> None:
    job = running().signal().lose("n2").stopped("n1")
    assert job.end.code == 143
    assert job.faults == []


def test_a_drain_asks_every_rank_and_ends_with_75_when_all_have_ended_well() -> None:
    job = running().drain()
    assert job.new(steps.AskRanksToStop) == [steps.AskRanksToStop(0, ("n1", "n2"))]
    assert job.phase is Phase.RUNNING
    job.exit_all()
    assert job.end == steps.End(75, "asked to stop; every rank has ended in good order")


def test_a_second_drain_changes_nothing() -> None:
    assert running().drain().feed(steps.DrainRequested(signal.SIGUSR2)) == []


@pytest.mark.parametrize("fault_first", [False, True])
def test_no_new_cycle_begins_in_a_draining_job(fault_first: bool) -> None:
    job = running()
    job = job.exit(0, 1).drain() if fault_first else job.drain().exit(0, 1)
    job.stopped("n1", "n2")
    assert job.end.code == 75
    assert "and then: rank 0 on n1 exited with 1" in job.end.why
    assert len(job.started) == 1


def test_a_drain_before_the_start_ends_the_job_at_once() -> None:
    assert Job(active=2).join("n1").drain().end.code == 75


# --- messages that do not belong ---------------------------------------------------------------------


def test_what_is_said_about_an_older_cycle_is_ignored() -> None:
    job = running().exit(3, 1).stopped("n1", "n2")
    assert job.machine.cycle == 1
    for event in (
        steps.RankExited("n1", 0, 0, -9, False),
        steps.RankStalled("n1", 0, 0, 6.0, ()),
        steps.SnapshotsTaken("n1", 0, ()),
        steps.NodeReady("n1", 0),
        steps.NodeStepping("n1", 0, 5),
        steps.NodeStopped("n1", 0),
        steps.StartFailed("n1", 0, "no space"),
    ):
        assert job.feed(event) == []


@pytest.mark.parametrize(
    "event",
    [
        steps.RankExited("n1", 0, 2, -9, False),
        steps.RankExited("n1", 0, 99, -9, False),
        steps.RankExited("n1", 0, -1, -9, False),
        steps.RankExited("n3", 0, 0, -9, False),
        steps.RankStalled("n1", 0, 2, 6.0, ()),
        steps.RankStalled("n1", 0, 99, 6.0, ()),
        steps.StartFailed("n3", 0, "no space"),
        steps.NodeStopped("n1", 0),
        steps.NodeLost("n9", "gone"),
        steps.NodeUnusable("n9", "no GPU here"),
        *(steps.TimerFired(timer) for timer in Timer),
    ],
)
def test_who_speaks_of_what_is_not_its_own_is_not_heard(event: steps.Event) -> None:
    job = running(active=2, spares=1)
    assert job.feed(event) == []
    assert job.phase is Phase.RUNNING


def test_between_cycles_nobody_has_anything_to_say_about_the_next() -> None:
    job = Job(active=2, spares=1).join("n1", "n2").fire(Timer.FORM_GRACE).lose("n2").stopped("n1")
    assert job.phase is Phase.FORMING, "n3 may still come"
    for event in (
        steps.NodeReady("n1", 1),
        steps.RankExited("n1", 1, 0, 1, False),
        steps.RankStalled("n1", 1, 0, 6.0, ()),
    ):
        assert job.feed(event) == []
    assert job.join("n3").started[-1] == ("n1", "n3")
