"""The report agrees with the Coordinator's state machine about who was to blame, and in which order."""

from __future__ import annotations

import pytest

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.journal import CheckpointLoaded, Progress, Record
from nvrx_slurm.report import JobReport, JobState, MomentKind, RecoveryEnd, build_report
from nvrx_slurm.report.words import say_end

START = 1_767_322_800.0


class Job:
    """A state machine whose journal is kept, and nodes that do what it says at once."""

    def __init__(self, nodes: int = 5, active: int = 4, slots: int = 2, max_restarts: int = 3) -> None:
        names = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.machine = CycleMachine(Policy(nodes=names, active_nodes=active, max_restarts=max_restarts))
        self.records: list[Record] = []
        self.now = 0.0
        self._take(self.machine.start(self.now))
        for name in names:
            self.feed(steps.NodeJoined(name, slots))

    def feed(self, event: steps.Event, after: float = 0.01) -> None:
        self.now += after
        self._take(self.machine.handle(event, self.now))

    def record(self, event: Progress | CheckpointLoaded) -> None:
        self.records.append(
            Record(ts=START + self.now, job="4711", attempt=0, cycle=self.machine.cycle, event=event)
        )

    def train(self, resumed: int, last: int) -> None:
        """Every rank becomes ready and makes steps, one a second."""
        cycle, active = self.machine.cycle, self.machine.active
        if resumed:
            self.record(CheckpointLoaded(step=resumed, layer="shared", rank=0))
        for node in active:
            self.feed(steps.NodeReady(node, cycle))
        for node in active:
            self.feed(steps.NodeStepping(node, cycle, resumed + 1))
        for step in range(resumed + 2, last + 1):
            self.now += 1.0
            self.record(Progress(step=step))

    def exit(self, rank: int, code: int) -> None:
        node = self.machine.active[rank // 2]
        self.feed(steps.RankExited(node, self.machine.cycle, rank, code, after_stop=False))

    def stopped(self, stalled_s: float | None = None) -> None:
        """Every node that is left says that its workers are gone, and how old their last heartbeat was."""
        cycle = self.machine.cycle
        for node in self.machine.active:
            if self.machine.members.is_connected(node):
                self.feed(steps.NodeStopped(node, cycle, stalled_s), after=0.1)

    def report(self) -> JobReport:
        return build_report(self.records, START + self.now)

    def _take(self, commands: list[steps.Command]) -> None:
        for command in commands:
            if isinstance(command, steps.Write):
                self.records.append(
                    Record(
                        ts=START + self.now,
                        job="4711",
                        attempt=0,
                        cycle=command.cycle,
                        event=command.event,
                    )
                )


def test_a_killed_rank_and_a_lost_node_are_named_as_the_state_machine_judged() -> None:
    job = Job()
    job.train(0, 10)
    job.exit(2, 1)  # its collective broke
    job.exit(3, -9)  # because of this one
    job.stopped()
    job.train(5, 12)
    job.feed(steps.NodeLost("n2", "connection closed"), after=4.0)
    job.stopped(stalled_s=4.0)
    job.train(10, 20)
    for rank in range(8):
        job.exit(rank, 0)
    report = job.report()
    assert report.state is JobState.FINISHED
    assert [say_end(cycle) for cycle in report.cycles] == [
        "rank 3 on n2: SIGKILL",
        "node n2 lost",
        "finished",
    ]
    recoveries = [cycle.recovery for cycle in report.faults]
    assert [recovery.steps_lost for recovery in recoveries if recovery] == [5, 2]
    assert all(recovery is not None and recovery.end is RecoveryEnd.RESUMED for recovery in recoveries)
    unnoticed = [recovery.detect_s for recovery in recoveries if recovery]
    assert unnoticed == [None, pytest.approx(4.0, abs=1e-3)]
    assert report.cycles[-1].nodes == ("n1", "n5", "n3", "n4")


def test_a_job_whose_restarts_are_used_up_failed() -> None:
    job = Job(max_restarts=1)
    for _ in range(2):
        job.train(0, 3)
        job.exit(5, 1)
        job.stopped()
    report = job.report()
    assert (report.state, report.code) == (JobState.FAILED, 1)
    assert [say_end(cycle) for cycle in report.faults] == ["rank 5 on n3: exit 1"] * 2
    assert report.attempts[0].restarts == 1


def test_a_lost_node_without_a_spare_asks_for_a_requeue() -> None:
    job = Job(nodes=4)
    job.train(0, 3)
    job.feed(steps.NodeLost("n4", "connection closed"))
    job.stopped()
    report = job.report()
    assert report.state is JobState.REQUEUE
    assert report.timeline[-1].kind is MomentKind.JOB_ENDED
    assert [say_end(cycle) for cycle in report.faults] == ["node n4 lost"]
