"""What the machine does about restarts in process: nothing, as long as they are of use."""

from __future__ import annotations

import pytest
from cycle_driver import Job

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.journal import FaultKind

WHY = "Interruption.EXCEPTION affecting ranks {2}"


def job(**options: int) -> Job:
    return Job.running(active=2, **options).later(100)


def restarted(job: Job, *faulty: int) -> Job:
    job.feed(steps.RestartedInProcess("n1", job.machine.cycle, faulty, WHY))
    return job


def test_restarts_between_which_training_gets_further_cost_nothing() -> None:
    it = job()
    for step in range(20):
        restarted(it.trains(step), 2)
    assert it.phase is Phase.RUNNING
    assert it.faults == []


@pytest.mark.parametrize("saves", [False, True])
def test_as_many_in_a_row_without_progress_as_cycles_may_be_end_the_cycle_at_the_costs_of_the_budget(
    saves: bool,
) -> None:
    """Where checkpoints are told they alone count."""
    it = job(max_restarts=1)
    if saves:
        it.saves(5)
    for step in (7, 8, 9) if saves else (7, 7, 7):
        assert it.phase is Phase.RUNNING
        restarted(it.trains(step), 2)
    # The first of them had got further than anything before.
    restarted(it, 2)
    (fault,) = it.faults
    assert (fault.kind, fault.node, fault.rank, fault.detector) == (
        FaultKind.NO_PROGRESS, "n2", 2, "in-process",
    )  # fmt: skip
    assert fault.detail == f"3 restarts in process in a row without progress; the last: {WHY}"
    it.stopped("n1", "n2")
    assert (it.verdict.rule, it.machine.cycle) == ("in-process", 1)
    assert "rank 2 on n2 failed again and again" in it.verdict.why
    # The budget is used up by it.
    it.join().fails()
    assert it.end.code == 1


def test_where_nobody_tells_steps_it_is_restarts_soon_after_each_other_that_count() -> None:
    it = job()
    for _ in range(10):
        restarted(it.later(61), 2)
    for _ in range(2):
        restarted(it.later(5), 2)
    assert it.phase is Phase.RUNNING
    restarted(it.later(5), 2)
    assert it.phase is Phase.STOPPING


def test_without_a_bound_for_cycles_there_is_none_for_restarts_in_process() -> None:
    it = job(max_no_progress_cycles=0)
    for _ in range(50):
        restarted(it, 2)
    assert it.phase is Phase.RUNNING


def test_a_rank_that_its_own_supervisor_kills_is_a_hung_one() -> None:
    """Its exit by SIGTERM, which comes after that, says nothing."""
    it = job()
    it.feed(steps.RankGivenUp("n2", 0, 2, "finalize has not returned for 90 s"))
    it.exit(2, -15, after_stop=True).stopped("n1", "n2")
    assert (it.verdict.kind, it.verdict.rank) == (FaultKind.HANG, 2)
    assert [(fault.detector, fault.detail) for fault in it.faults] == [
        ("in-process", "finalize has not returned for 90 s")
    ]


def test_nobody_gives_up_a_rank_of_another_node() -> None:
    it = job()
    it.feed(steps.RankGivenUp("n1", 0, 2, "finalize has not returned for 90 s"))
    assert it.phase is Phase.RUNNING
