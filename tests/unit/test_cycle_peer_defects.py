"""Defects of NVIDIA's ft_launcher in what the machine decides, by their number: none is ours."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.steps import Timer

running = Job.running


def test_w3_when_the_restarts_are_used_up_the_healthy_nodes_are_stopped_too() -> None:
    """There they train on until a time-out of their own."""
    job = running(active=3, max_restarts=0).exit(0, 1)
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2", "n3"))]
    assert job.stopped("n1", "n2", "n3").end.code == 1


@pytest.mark.parametrize("why", ["its agent broke", "its stream ended"])
def test_w6_a_node_whose_agent_breaks_does_not_make_a_broken_job_a_success(why: str) -> None:
    """There the first to break ends the job as if it had succeeded, and those without ranks exit with 0."""
    # given ranks that have finished on one node
    job = running(spares=1).exit(0, 0).exit(1, 0)
    # when the agent of another breaks, and then every other agent, too
    job.feed(steps.NodeLost("n2", why))
    job.lose("n1", "n3")
    # then nothing of that is a success
    assert job.end.code == 75


def test_w6_a_step_that_ends_by_itself_is_no_success() -> None:
    job = running()
    job.feed(steps.StepEnded("srun ended with 0"))
    job.lose("n1", "n2")
    assert job.end.code == 75


def test_w7_a_spare_brings_no_restarts_with_it() -> None:
    """There each node counts for itself, and one that has waited since the start has all its restarts."""
    job = running(spares=2, max_restarts=2).lose("n1").stopped("n2").lose("n2").stopped("n3")
    assert job.started[-1] == ("n3", "n4")
    assert job.fails().end.why.startswith("restart budget of 2 used up")


@pytest.mark.parametrize("also", [(), (1,)], ids=["one of a node's ranks", "all of a node's ranks"])
def test_w12_ranks_that_have_finished_do_not_keep_a_restart_waiting(also: tuple[int, ...]) -> None:
    """There they wait in a barrier for up to five minutes."""
    # given ranks that have exited with 0
    job = running().exit(0, 0)
    for rank in also:
        job.exit(rank, 0)
    # when a slower one fails
    job.exit(3, 1)
    # then their node takes part in the stop like any other, and all ranks run again when it has
    assert job.new(steps.StopCycle) == [steps.StopCycle(0, ("n1", "n2"))]
    job.stopped("n1", "n2")
    assert job.started == [("n1", "n2")] * 2
    assert job.timers == {}
    # and the first success counts for nothing: all must finish in one cycle
    job.exit(3, 0)
    assert job.phase is Phase.RUNNING
    assert job.exit_all(but=[3]).end.code == 0


def test_w12_the_job_ends_with_the_last_rank_and_waits_for_nothing_more() -> None:
    job = running().exit_all()
    assert job.end.code == 0
    assert Timer.STOP not in job.timers


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_w6_a_job_that_was_stopped_is_no_success_even_if_every_rank_exits_with_0(sig: signal.Signals) -> None:
    job = running().signal(sig)
    for rank in range(4):
        job.exit(rank, 0, after_stop=True)
    assert job.stopped("n1", "n2").end.code == 128 + sig
