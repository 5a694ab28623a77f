"""The machine of a Coordinator that may be the one that is cut off, and of one that goes on for another."""

from __future__ import annotations

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.journal import VerdictAction


def on_n1(active: int = 3, **options: int) -> Job:
    return Job.running(active=active, placing={"host": "n1"}, **options)


# --- alone -------------------------------------------------------------------------------------------


def test_a_coordinator_that_has_lost_every_other_node_asks_slurm_before_it_decides() -> None:
    job = on_n1().lose("n2", "n3").stopped("n1")
    assert job.phase is Phase.CONSULTING
    assert job.all(steps.ConsultSlurm) == [steps.ConsultSlurm()]
    assert job.all(steps.End) == []
    assert job.slurm_answers("RUNNING").end.code == 75


def test_while_slurm_cannot_be_asked_it_asks_again_and_decides_nothing() -> None:
    job = on_n1().lose("n2", "n3").stopped("n1")
    for _ in range(5):
        job.slurm_answers(None)
        assert job.all(steps.End) == []
        job.fire(Timer.CONSULT)
        assert job.new(steps.ConsultSlurm) == [steps.ConsultSlurm()]
    assert job.written(journal.JobEnded) == []
    assert job.slurm_answers("RUNNING").end.code == 75


def test_a_job_that_slurm_has_ended_meanwhile_ends_as_such() -> None:
    job = on_n1().lose("n2", "n3").stopped("n1").slurm_answers(None)
    assert job.fire(Timer.CONSULT).slurm_answers("CANCELLED").end.code == 143


def test_a_signal_ends_the_wait() -> None:
    job = on_n1().lose("n2", "n3").stopped("n1").slurm_answers(None)
    assert job.signal().signal().end.code == 143


def test_with_another_node_left_it_is_not_alone() -> None:
    job = on_n1().lose("n2").stopped("n1", "n3")
    assert job.all(steps.ConsultSlurm) == []
    assert job.end.code == 75


def test_a_job_of_one_node_is_never_cut_off_from_itself() -> None:
    job = on_n1(active=1).lose("n1")
    assert job.all(steps.ConsultSlurm) == []
    assert job.end.code == 75


def test_where_nobody_could_take_over_slurm_is_not_waited_for() -> None:
    job = Job.running(active=3).lose("n2", "n3").stopped("n1")
    assert job.all(steps.ConsultSlurm) == []
    assert job.end.code == 75


# --- taking over -------------------------------------------------------------------------------------


def taken_over(restarts: int = 0, max_restarts: int = 3, **excluded: str) -> Job:
    job = Job(active=2, spares=2, max_restarts=max_restarts, placing={"host": "n2", "first_cycle": 5})
    job._take(job.machine.take_over(job.now, "n1", "silent for 30 s", restarts, excluded))
    return job


def test_the_lost_host_is_a_fault_of_the_cycle_that_ran_and_costs_a_restart() -> None:
    job = taken_over(restarts=1)
    (fault,) = job.faults
    assert (fault.node, fault.detector) == ("n1", "lease")
    assert (job.verdict.action, job.verdict.node) == (VerdictAction.RESTART, "n1")
    assert {write.cycle for write in job.all(steps.Write)} == {4}
    assert job.machine.budget.restarts == 2
    assert job.machine.cycle == 5


def test_the_next_cycle_begins_as_soon_as_enough_others_are_there() -> None:
    job = taken_over().join("n3")
    assert job.started == []
    job.join("n2")
    assert set(job.started[-1]) == {"n2", "n3"}
    assert job.machine.cycle == 5


def test_the_lost_host_and_nodes_that_were_excluded_before_are_turned_away() -> None:
    job = taken_over(n3="it was slow").join("n1", "n3")
    assert [(order.node, order.why) for order in job.all(steps.Disconnect)] == [
        ("n1", "the Coordinator's host was lost"),
        ("n3", "it was slow"),
    ]


def test_a_used_up_budget_ends_the_job() -> None:
    job = taken_over(restarts=3)
    assert job.end.code == 1
    assert job.verdict.action is VerdictAction.STOP


def test_too_few_nodes_left_end_the_job_for_a_requeue() -> None:
    assert taken_over(n2="r", n3="r").end.code == 75


def test_others_that_do_not_come_in_time_are_not_waited_for() -> None:
    job = taken_over().join("n2").fire(Timer.JOIN)
    if job.phase is Phase.CONSULTING:
        job.slurm_answers("RUNNING")
    assert job.end.code == 75


@pytest.mark.parametrize("restarts", [0, 2])
def test_later_faults_are_counted_on(restarts: int) -> None:
    job = taken_over(restarts=restarts).join("n2", "n3", "n4").fails()
    ends = [end.code for end in job.all(steps.End)]
    assert ends == ([1] if restarts == 2 else [])
