"""When a node leaves the job for its faults, and how a script that is at fault costs no node its place."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.past import Past

SEGFAULT, KILLED = -signal.SIGSEGV, -signal.SIGKILL


def with_spares(spares: int = 1, **options: object) -> Job:
    return Job.running(spares=spares, max_restarts=50, max_no_progress_cycles=0, **options)


def excluded(job: Job) -> list[journal.NodeExcluded]:
    return job.written(journal.NodeExcluded)


def test_at_its_third_fault_of_its_own_a_node_leaves_for_a_spare() -> None:
    job = with_spares().fails(2, KILLED).fails(3, SEGFAULT)
    assert job.started[-1] == ("n1", "n2")
    job.fails(2, KILLED)
    reason = "3 faults of its own in this job: a spare is tried in its place"
    assert excluded(job) == [journal.NodeExcluded(node="n2", reason=reason, on_trial=True)]
    assert job.new(steps.Disconnect) == [steps.Disconnect("n2", reason)]
    assert job.started[-1] == ("n1", "n3")


def test_the_number_is_the_users_and_0_is_never() -> None:
    assert with_spares(exclude_after=1).fails(2, KILLED).started[-1] == ("n1", "n3")
    job = with_spares(exclude_after=0)
    for _ in range(10):
        job.fails(2, KILLED)
    assert not excluded(job)


def test_hangs_lost_connections_and_failed_starts_are_the_nodes_too() -> None:
    job = with_spares(2)
    job.stall(2).answer_probe("n1").stopped("n1", "n2")
    job.lose("n2").stopped("n1").join("n2")
    assert job.started[-1] == ("n1", "n3")
    # n2 has come back as a spare, and takes over from n1 that is lost now.
    job.lose("n4").lose("n1").stopped("n3")
    assert job.machine.active == ("n2", "n3")
    job.fails(0, KILLED)
    assert [event.node for event in excluded(job)] == []
    assert job.written(journal.NodeSuspected) == [
        journal.NodeSuspected(node="n2", faults=3, why="there is no spare to take its place")
    ]


@pytest.mark.parametrize("code", [1, 139, -signal.SIGABRT, -signal.SIGTERM, -signal.SIGPIPE])
def test_an_exit_code_or_what_a_cascade_sends_is_never_the_nodes(code: int) -> None:
    job = with_spares()
    for _ in range(10):
        job.fails(2, code)
    assert not excluded(job)


def test_lack_of_memory_is_never_the_nodes() -> None:
    job = with_spares()
    for _ in range(10):
        job.feed(steps.RankExited("n2", job.machine.cycle, 2, KILLED, False, oom="the cgroup's counter rose"))
        job.stopped("n1", "n2")
    assert not excluded(job)


def test_what_breaks_after_the_culprit_is_counted_for_nobody() -> None:
    job = with_spares()
    for _ in range(10):
        job.exit(0, 1).exit(2, KILLED).exit(3, KILLED)
        # The signal explains the exit code, and of the two the first is to blame.
        job.stopped("n1", "n2")
        if excluded(job):
            break
    assert [event.node for event in excluded(job)] == ["n2"]
    assert len(job.started) == 4


def test_without_a_spare_it_stays_and_that_is_said_once() -> None:
    job = with_spares(0)
    for _ in range(6):
        job.fails(2, KILLED)
    assert not excluded(job)
    assert job.written(journal.NodeSuspected) == [
        journal.NodeSuspected(node="n2", faults=3, why="there is no spare to take its place")
    ]
    assert job.started[-1] == ("n1", "n2")


def test_a_script_that_fails_in_the_same_place_on_any_node_costs_one_node_its_place_and_no_more() -> None:
    # given a script whose rank 2 dies, whichever node has it
    job = with_spares(3)
    for _ in range(12):
        job.fails(2, SEGFAULT)
    # then one spare was tried
    assert [event.node for event in excluded(job)] == ["n2"]
    # and showed that it is not the node
    assert job.written(journal.NodeSuspected) == [
        journal.NodeSuspected(
            node="n3", faults=3, why="n2 failed in the same place before it, so the node is not the cause"
        )
    ]
    # so that a requeue excludes nobody
    assert job.machine.proven_bad == ()


def test_a_requeue_excludes_the_node_when_training_got_further_without_it_for_long_enough() -> None:
    # given a node with a fault every 10 minutes
    job = with_spares().later(600).fails(2, KILLED).later(600).fails(2, KILLED).later(600).fails(2, KILLED)
    # when another trains in its place for half an hour
    job.trains(10).later(1799).fails(0, 1)
    assert job.machine.proven_bad == ()
    job.later(1).fails(0, 1)
    # then it was the node
    assert job.machine.proven_bad == ("n2",)


def test_time_alone_proves_nothing() -> None:
    job = with_spares().fails(2, KILLED).fails(2, KILLED).fails(2, KILLED)
    assert job.later(10**6).fails(0, 1).machine.proven_bad == ()


def test_the_count_goes_on_where_an_earlier_attempt_was() -> None:
    job = with_spares(past=Past(faults={"n2": 2}))
    assert job.fails(2, KILLED).started[-1] == ("n1", "n3")
