"""What the state machine makes of nodes that say they are broken."""

from __future__ import annotations

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.unhealthy import Complaint, Unhealthy, complaint_of
from nvrx_slurm.journal import FaultKind
from nvrx_slurm.wire.messages import HealthFinding

BROKEN = Complaint("gpu-ecc", "gpu-ecc gpu 3: 1 uncorrectable memory errors", node_lost=False)
LOST = Complaint("gpu-lost", "gpu-lost gpu 3: fallen off the bus", node_lost=True)


def says(job: Job, node: str, complaint: Complaint | None) -> None:
    job.feed(steps.NodeHealth(node, complaint))


def excluded(job: Job) -> list[tuple[str, str]]:
    return [(event.node, event.reason) for event in job.written(journal.NodeExcluded)]


def test_a_node_that_is_broken_when_it_joins_never_gets_ranks() -> None:
    job = Job(active=2, spares=1)
    says(job, "n1", BROKEN)
    job.join("n1", "n2", "n3")
    assert job.machine.active == ("n2", "n3")
    assert excluded(job) == [("n1", BROKEN.what)]
    assert steps.Disconnect("n1", BROKEN.what) in job.commands


def test_without_a_spare_the_job_ends_to_be_started_elsewhere() -> None:
    job = Job(active=2)
    says(job, "n1", BROKEN)
    job.join("n1", "n2")
    assert (job.end.code, excluded(job)) == (75, [("n1", BROKEN.what)])
    assert job.end.why == "too few nodes: training needs 2, 1 is left and there is no spare"


def test_a_broken_node_leaves_at_the_next_restart_and_not_before() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3").later(5)
    says(job, "n2", BROKEN)
    assert job.machine.phase is Phase.RUNNING
    assert excluded(job) == []
    job.fails()
    assert job.machine.active == ("n1", "n3")
    assert excluded(job) == [("n2", BROKEN.what)]


def test_without_a_spare_a_broken_node_ends_the_job_at_the_next_restart() -> None:
    job = Job(active=2).join("n1", "n2").later(5)
    says(job, "n2", BROKEN)
    job.fails()
    assert job.end.code == 75
    assert excluded(job) == [("n2", BROKEN.what)]


def test_a_node_that_no_rank_can_use_any_more_stops_the_cycle_at_once() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3")
    says(job, "n2", LOST)
    assert job.machine.phase is Phase.STOPPING
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"), look_s=1.0)], (
        "all look at themselves"
    )
    job.stopped(*job.machine.active)
    assert (job.verdict.rule, job.verdict.node, job.verdict.kind) == (
        "unhealthy-node",
        "n2",
        FaultKind.UNHEALTHY,
    )
    assert job.machine.active == ("n1", "n3")
    assert excluded(job) == [("n2", LOST.what)]


def test_a_verdict_that_comes_when_the_cycle_has_just_begun_stops_it() -> None:
    """The restart has asked for it, and has not waited."""
    job = Job(active=2, spares=1).join("n1", "n2", "n3").later(100).fails()
    says(job.later(4.9), "n2", BROKEN)
    assert job.machine.phase is Phase.STOPPING
    job.stopped(*job.machine.active)
    assert job.machine.active == ("n1", "n3")
    assert (job.verdict.kind, excluded(job)) == (FaultKind.UNHEALTHY, [("n2", BROKEN.what)])


def test_a_cycle_that_has_come_to_a_step_is_not_stopped_for_it() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3").trains(1)
    says(job, "n2", BROKEN)
    assert job.machine.phase is Phase.RUNNING


def test_a_verdict_that_comes_while_ranks_are_being_stopped_still_counts() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3")
    job.exit(0, 1)
    assert job.machine.phase is Phase.STOPPING
    says(job, "n1", BROKEN)
    job.stopped(*job.machine.active)
    assert job.machine.active == ("n3", "n2")


def test_a_spare_that_is_broken_leaves_without_disturbing_training() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3")
    says(job, "n3", BROKEN)
    assert job.machine.phase is Phase.RUNNING
    assert excluded(job) == [("n3", BROKEN.what)]
    assert job.machine.spares == ()


def test_a_node_that_is_healthy_again_stays() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3").later(5)
    says(job, "n2", BROKEN)
    says(job, "n2", None)
    job.fails()
    assert job.machine.active == ("n1", "n2")
    assert excluded(job) == []


@pytest.mark.parametrize("complaint", [BROKEN, LOST])
def test_what_fails_on_most_nodes_is_not_held_against_them(complaint: Complaint) -> None:
    job = Job(active=3, spares=1).join("n1", "n2", "n3", "n4")
    for node in ("n1", "n2", "n3"):
        says(job, node, complaint)
    if job.machine.phase is Phase.RUNNING:
        job.exit(0, 1)
    job.stopped(*job.machine.active)
    assert excluded(job) == []
    assert job.machine.active == ("n1", "n2", "n3")
    assert job.written(journal.HealthDisbelieved) == [
        journal.HealthDisbelieved(check=complaint.check, nodes=4)
    ]


def test_half_of_the_nodes_are_not_most() -> None:
    job = Job(active=1, spares=3).join("n1", "n2", "n3", "n4").later(5)
    says(job, "n1", BROKEN)
    says(job, "n2", BROKEN)
    job.fails()
    assert [node for node, _ in excluded(job)] == ["n2", "n1"]
    assert job.machine.active == ("n3",)


def test_a_job_of_one_node_believes_it() -> None:
    job = Job(active=1)
    says(job, "n1", BROKEN)
    job.join("n1")
    assert (job.end.code, excluded(job)) == (75, [("n1", BROKEN.what)])


def test_a_stranger_and_a_node_that_is_gone_change_nothing() -> None:
    job = Job(active=2, spares=1).join("n1", "n2", "n3")
    job.lose("n3")
    for node in ("n3", "x1"):
        says(job, node, LOST)
    assert job.machine.phase is Phase.RUNNING
    assert excluded(job) == []


def test_a_node_whose_ranks_have_all_finished_disturbs_nobody() -> None:
    job = Job(active=2, slots=1).join("n1", "n2")
    job.exit(1, 0)
    says(job, "n2", LOST)
    assert job.machine.phase is Phase.RUNNING


def test_a_job_that_is_being_stopped_excludes_nobody() -> None:
    job = Job(active=2).join("n1", "n2").later(5)
    says(job, "n2", BROKEN)
    job.feed(steps.DrainRequested(why="the time limit"))
    job.exit(0, 0)
    job.exit(1, 0)
    job.exit(2, 0)
    job.exit(3, 0)
    assert job.end.code == 75
    assert excluded(job) == []


# --- complaints --------------------------------------------------------------------------------------


def finding(check: str, *, failed: bool = True, lost: bool = False, scope: str = "node") -> HealthFinding:
    return HealthFinding(check=check, scope=scope, failed=failed, evidence="bad", node_lost=lost)


def test_warnings_are_no_complaint() -> None:
    assert complaint_of([]) is None
    assert complaint_of([finding("a", failed=False)]) is None


def test_the_worst_failure_is_the_complaint() -> None:
    assert complaint_of([finding("a"), finding("b", lost=True, scope="gpu 3"), finding("c")]) == Complaint(
        "b", "b gpu 3: bad and 2 more", node_lost=True
    )


def test_a_common_failure_hides_no_other() -> None:
    unhealthy = Unhealthy()
    for node in ("n1", "n2"):
        unhealthy.note(node, Complaint("paths", "paths: x", node_lost=False))
    unhealthy.note("n3", BROKEN)
    assert unhealthy.believed(["n1", "n2", "n3"]) == {"n3": BROKEN.what}
    assert unhealthy.tell_once(["n1", "n2", "n3"]) == ["paths"]
    assert unhealthy.tell_once(["n1", "n2", "n3"]) == []
