"""A job whose nodes nobody knows beforehand, and what it does when it is asked to stop."""

from __future__ import annotations

import signal

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.wire.rank_channel import WorkloadAction


class OpenJob(Job):
    """``active`` nodes train, and ``spares`` more may come; their names are their own."""

    def __init__(self, active: int = 2, spares: int = 0, **policy: object) -> None:
        super().__init__()
        self.policy = Policy(
            nodes=(),
            active_nodes=active,
            max_restarts=3,
            max_unknown_nodes=active + spares,
            **policy,  # type: ignore[arg-type]
        )
        self.machine = CycleMachine(self.policy)
        self.commands = []
        self.timers = {}
        self._take(self.machine.start(self.now))

    def join_at(self, place: int | None, node: str) -> OpenJob:
        self.feed(steps.NodeJoined(node, self.slots, place))
        return self


def test_whoever_joins_first_trains_and_the_rest_are_spares() -> None:
    job = OpenJob(active=2, spares=1).join("x", "y", "z")
    assert job.started == [("x", "y")]
    (started,) = job.written(journal.CycleStarted)
    assert started.spares == ["z"]


def test_nodes_with_a_place_stand_in_its_order_before_the_others() -> None:
    job = OpenJob(active=3).join_at(None, "c").join_at(1, "b").join_at(0, "a")
    assert job.started == [("a", "b", "c")]


def test_one_node_too_many_is_turned_away_with_the_number() -> None:
    job = OpenJob(active=2).join("x", "y", "z")
    assert job.last == [steps.Disconnect("z", "the job has all the nodes that it may have: 2")]


def test_a_spare_gets_a_moment_to_come_while_the_nodes_that_train_are_there() -> None:
    job = OpenJob(active=1, spares=1).join("x")
    assert job.started == []
    job.fire(Timer.FORM_GRACE)
    assert job.started == [("x",)]


def test_a_node_that_is_gone_leaves_room_for_another() -> None:
    job = OpenJob(active=1, spares=1).join("x", "y").lose("x").join("z")
    assert job.started == [("x",), ("y",)]
    assert job.machine.spares == ("z",)


def test_nodes_that_never_come_end_the_job_when_the_time_is_over() -> None:
    job = OpenJob(active=2).join("x")
    job.fire(Timer.JOIN)
    assert job.end.code == 75
    assert "training needs 2, 1 is left" in job.end.why


def test_when_nobody_comes_srun_is_not_blamed() -> None:
    job = OpenJob(active=2, join_timeout_s=60.0)
    job.fire(Timer.JOIN)
    assert (job.end.code, job.end.why) == (1, "no agent joined within 60 s")


def test_a_node_that_cannot_do_what_is_asked_ends_the_job_at_its_start() -> None:
    job = OpenJob(active=2).join("x")
    job.feed(steps.NodeUnusable("y", "--role is a here and b where the job is coordinated"))
    assert job.end.code == 2


# --- asked to stop, with a grace of its own ----------------------------------------------------------


def test_who_asks_the_job_to_stop_gives_the_ranks_his_signal_and_the_longer_grace() -> None:
    job = OpenJob(active=2, term_timeout_s=1800.0).join("x", "y")
    job.feed(steps.StopRequested(signal.SIGINT))
    (stop,) = job.new(steps.StopCycle)
    assert stop == steps.StopCycle(0, ("x", "y"), (), signal.SIGINT, 1800.0)
    assert job.timers[Timer.STOP] > 1800.0
    assert job.stopped("x", "y").end.code == 130


def test_nodes_that_are_stopping_already_are_told_of_the_longer_grace() -> None:
    job = OpenJob(active=2, term_timeout_s=1800.0).join("x", "y")
    job.feed(steps.NodeLeaving("x", "the agent received SIGTERM", by_signal=True))
    (stop,) = job.new(steps.StopCycle)
    assert stop.grace_s is None
    job.feed(steps.StopRequested(signal.SIGTERM))
    (again,) = job.new(steps.StopCycle)
    assert (again.grace_s, again.nodes) == (1800.0, ("x", "y"))
    assert job.phase is Phase.STOPPING


@pytest.mark.parametrize("term_timeout_s", [None, 1800.0])
def test_a_restart_has_the_grace_of_a_restart(term_timeout_s: float | None) -> None:
    job = OpenJob(active=2, term_timeout_s=term_timeout_s).join("x", "y").exit(0, 1)
    (stop,) = job.new(steps.StopCycle)
    assert (stop.signal, stop.grace_s) == (signal.SIGTERM, None)
    assert job.timers[Timer.STOP] == job.policy.stop_timeout_s


def test_ranks_that_nobody_from_outside_asked_to_stop_have_the_grace_of_a_restart() -> None:
    job = OpenJob(active=2, term_timeout_s=1800.0).join("x", "y")
    job.asks(0, WorkloadAction.ShutdownWorkload)
    (stop,) = job.new(steps.StopCycle)
    assert (stop.signal, stop.grace_s) == (signal.SIGTERM, None)
    assert job.stopped("x", "y").end.code == 0
