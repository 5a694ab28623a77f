"""What becomes of what is found out of a cycle when the next one runs already."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job, snapshot

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.attributor import finding_of
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.limits import StopAction
from nvrx_slurm.journal import VerdictAction

KILLED = -signal.SIGKILL


def running(action: StopAction = StopAction.NO_RESTART, spares: int = 0, **options: object) -> Job:
    return Job.running(spares=spares, max_restarts=50, attribution_stop_action=action, **options)


def useless(job: Job, cycle: int) -> Job:
    job.feed(steps.CycleAttributed(cycle, useless=True, rule="4-deterministic", why="a module is missing"))
    return job


def names(job: Job, cycle: int, *nodes: str) -> Job:
    job.feed(steps.CycleAttributed(cycle, exclude=nodes))
    return job


def test_a_cycle_that_has_not_trained_is_stopped_when_another_try_is_of_no_use() -> None:
    job = useless(running().fails(), 0)
    assert job.phase is Phase.STOPPING
    job.stopped("n1", "n2")
    assert job.end == steps.End(93, "no other try after cycle 0: a module is missing")
    assert (job.verdict.action, job.verdict.rule) == (VerdictAction.STOP, "4-deterministic")


def test_unless_it_is_only_to_be_logged() -> None:
    job = useless(running(StopAction.LOG).fails(), 0)
    assert job.phase is Phase.RUNNING
    assert job.fails().phase is Phase.RUNNING


def test_while_no_cycle_runs_the_job_ends_at_once() -> None:
    job = running(placing={"rejoin_timeout_s": 60.0}).lose("n2").stopped("n1")
    assert job.phase is Phase.FORMING
    useless(job, 0)
    assert job.end.code == 93


def test_a_cycle_that_is_being_stopped_is_the_last() -> None:
    job = running().fails().exit(0, 1)
    useless(job, 0)
    assert job.phase is Phase.STOPPING
    assert job.stopped("n1", "n2").end.code == 93


def test_a_cycle_that_trains_goes_on_and_its_fault_ends_the_job() -> None:
    job = running(max_no_progress_cycles=0).trains(20).fails().trains(10)
    useless(job, 0)
    assert job.phase is Phase.RUNNING
    job.fails()
    assert job.end.code == 93
    assert (job.verdict.rule, job.verdict.kind) == ("4-deterministic", journal.FaultKind.EXIT)


def test_a_cycle_that_gets_further_refutes_it() -> None:
    job = useless(running().trains(20).fails().trains(10), 0).trains(40).fails()
    assert job.phase is Phase.RUNNING
    # It comes late, and of a cycle before that.
    assert useless(job, 0).phase is Phase.RUNNING


def test_a_program_that_tells_nothing_may_have_trained_after_a_minute() -> None:
    job = useless(running().fails().later(61.0), 0)
    assert job.phase is Phase.RUNNING


def test_a_job_that_ends_anyway_ends_as_it_would_have() -> None:
    job = running().fails().signal(signal.SIGINT)
    useless(job, 0).stopped("n1", "n2")
    assert job.end.code == 128 + signal.SIGINT


def test_a_node_that_is_named_leaves_for_a_spare_with_the_next_fault() -> None:
    job = names(running(spares=1).fails(0), 0, "n2")
    assert job.started[-1] == ("n1", "n2")
    job.fails(0)
    assert job.started[-1] == ("n1", "n3")
    (excluded,) = job.written(journal.NodeExcluded)
    assert (excluded.node, excluded.on_trial) == ("n2", True)


def test_without_a_spare_it_stays_and_a_requeue_excludes_it() -> None:
    job = names(running().fails(0), 0, "n2").fails(0)
    assert job.started[-1] == ("n1", "n2")
    (told,) = job.written(journal.NodeSuspected)
    assert (told.node, told.why) == ("n2", "there is no spare to take its place")
    assert job.machine.proven_bad == ("n2",)


def test_a_fault_that_outlives_the_node_in_its_place_acquits_it() -> None:
    job = names(running(spares=1).fails(2, KILLED), 0, "n2").fails(2, KILLED)
    assert job.started[-1] == ("n1", "n3")
    assert job.machine.proven_bad == ("n2",)
    job.fails(2, KILLED)
    assert job.machine.proven_bad == ()


def test_what_is_found_out_after_the_end_counts_for_a_requeue() -> None:
    job = Job.running(max_restarts=0).fails()
    assert job.phase is Phase.ENDED
    assert names(job, 0, "n2").machine.proven_bad == ("n2",)


def hangs(job: Job) -> None:
    """Rank 0 is blamed: of equal heartbeats its is the oldest."""
    late = [snapshot(rank, age_s=7.0 - rank / 10) for rank in range(4)]
    job.stall(0, *late[:2]).answer_probe("n2", *late[2:]).stopped("n1", "n2")


def test_a_hang_is_counted_for_the_node_of_the_rank_that_traces_show() -> None:
    job = running(spares=1, exclude_after=2)
    for cycle in range(2):
        hangs(job)
        assert job.verdict.node == "n1"
        job.feed(steps.CycleAttributed(cycle, hung="n2"))
        # Heard twice, it counts once.
        job.feed(steps.CycleAttributed(cycle, hung="n2"))
    job.fails(2, KILLED)
    assert [event.node for event in job.written(journal.NodeExcluded)] == ["n2"]


def test_another_fault_than_a_hang_is_not() -> None:
    job = running(spares=1, exclude_after=2)
    job.fails(0, KILLED)
    job.feed(steps.CycleAttributed(0, hung="n2"))
    job.fails(0, KILLED)
    assert [event.node for event in job.written(journal.NodeExcluded)] == ["n1"]


@pytest.mark.parametrize(
    ("category", "accused"),
    [("job.hang", ("n2",)), ("host.segfault", ()), ("slurm.node_fail", ())],
)
def test_lost_nodes_and_deaths_by_signal_are_counted_by_the_jobs_own_options(
    category: str, accused: tuple[str, ...]
) -> None:
    found = journal.CycleAttributed(category=category, action="restart_exclude", exclude=["n2"])
    assert finding_of(found, 0).exclude == accused


@pytest.mark.parametrize(
    ("rule", "useless"),
    [("4-deterministic", True), ("7-repeated", True), ("10-startup", True), ("9-budget", False)],
)
def test_only_rules_about_the_cause_itself_end_a_job(rule: str, useless: bool) -> None:
    assert finding_of(journal.CycleAttributed(action="stop", rule=rule), 0).useless is useless
