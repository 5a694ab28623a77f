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
    [
        ("4-deterministic", True),
        ("6-exclude", True),
        ("7-repeated", True),
        ("8-no-checkpoint", True),
        ("9-budget", True),
        ("10-startup", True),
        ("1-over", False),
        ("3-time-limit", False),
    ],
)
def test_what_slurm_does_to_a_job_is_no_reason_to_end_it(rule: str, useless: bool) -> None:
    assert finding_of(journal.CycleAttributed(action="stop", rule=rule), 0).useless is useless


def held(job: Job, cycle: int) -> Job:
    found = journal.CycleAttributed(action="hold", rule="5-hold", why="a file system is full: held")
    job.feed(finding_of(found, cycle))
    return job


def delayed(job: Job, cycle: int, seconds: float = 60.0, rule: str = "11-restart") -> Job:
    found = journal.CycleAttributed(action="restart", rule=rule, why="a server is busy", delay_s=seconds)
    job.feed(finding_of(found, cycle))
    return job


class TestHold:
    def test_the_job_ends_to_be_held_by_slurm(self) -> None:
        job = held(running().fails(), 0)
        assert job.phase is Phase.STOPPING
        job.stopped("n1", "n2")
        why = "on hold after cycle 0: a file system is full: held"
        assert job.end == steps.End(75, why, hold=True)
        assert (job.verdict.action, job.verdict.rule) == (VerdictAction.STOP, "5-hold")

    def test_not_if_it_is_only_to_be_logged(self) -> None:
        assert held(running(StopAction.LOG).fails(), 0).phase is Phase.RUNNING

    def test_a_cycle_that_trains_goes_on_and_its_fault_has_the_job_held(self) -> None:
        job = held(running(max_no_progress_cycles=0).trains(20).fails().trains(10), 0)
        assert job.phase is Phase.RUNNING
        assert job.fails().end.hold

    def test_who_ends_the_job_ends_it(self) -> None:
        job = held(running().fails(), 0).signal(signal.SIGINT).signal(signal.SIGINT)
        assert (job.end.code, job.end.hold) == (128 + signal.SIGINT, False)


class TestThirdTry:
    def running(self, **options: object) -> Job:
        return running(max_no_progress_cycles=0, verdict_patience_s=10.0, **options)

    def test_it_waits_until_the_first_has_been_looked_at(self) -> None:
        job = self.running().fails()
        assert job.phase is Phase.RUNNING, "the second try is at once"
        job.fails()
        assert (job.phase, job.timers[steps.Timer.VERDICT]) == (Phase.FORMING, 10.0)
        job.feed(steps.CycleAttributed(0))
        assert (job.phase, steps.Timer.VERDICT in job.timers) == (Phase.RUNNING, False)
        assert len(job.started) == 3

    def test_so_what_comes_again_has_two_tries(self) -> None:
        job = useless(self.running().fails().fails(), 0)
        assert job.end.code == 93
        assert len(job.started) == 2

    def test_it_does_not_wait_for_long(self) -> None:
        job = self.running().fails().fails().fire(steps.Timer.VERDICT)
        assert job.phase is Phase.RUNNING

    def test_nor_for_a_cycle_that_has_trained_or_nobody_attributes(self) -> None:
        assert self.running().trains(5).fails().fails().phase is Phase.RUNNING
        assert self.running().fails().trains(5).fails().phase is Phase.RUNNING
        assert running(max_no_progress_cycles=0).fails().fails().phase is Phase.RUNNING

    def test_a_signal_ends_the_wait(self) -> None:
        assert self.running().fails().fails().signal(signal.SIGINT).end.code == 128 + signal.SIGINT


class TestDelay:
    def waiting(self) -> Job:
        job = delayed(running(max_no_progress_cycles=0).fails(), 0)
        assert job.phase is Phase.RUNNING, "no restart waits for what is not known yet"
        job.fails()
        assert (job.phase, job.timers[steps.Timer.DELAY]) == (Phase.FORMING, 60.0)
        return job

    def test_the_restart_after_the_next_fault_waits_and_says_so(self) -> None:
        job = self.waiting()
        assert [e.seconds for e in job.written(journal.RestartDelayed)] == [60.0]
        job.fire(steps.Timer.DELAY)
        assert job.phase is Phase.RUNNING
        # It has been waited for; nothing says that the fault after it asks for more.
        assert job.fails().phase is Phase.RUNNING

    def test_a_signal_ends_the_job_at_once(self) -> None:
        job = self.waiting().signal(signal.SIGINT)
        assert job.end.code == 128 + signal.SIGINT
        assert steps.Timer.DELAY not in job.timers

    def test_so_does_a_request_to_drain_and_a_lack_of_nodes(self) -> None:
        assert self.waiting().drain().end.code == 75
        assert self.waiting().lose("n2").end.code == 75

    def test_a_node_that_joins_does_not_end_the_wait(self) -> None:
        job = running(spares=1)
        delayed(job.fails(), 0).fails().join("n3")
        assert job.phase is Phase.FORMING

    def test_what_is_found_out_meanwhile_may_end_the_job(self) -> None:
        assert useless(self.waiting(), 1).end.code == 93

    def test_progress_makes_it_needless_unless_restarts_are_too_many(self) -> None:
        def after_progress(rule: str) -> Phase:
            job = running(max_no_progress_cycles=0).trains(20).fails()
            return delayed(job, 0, rule=rule).trains(40).fails().phase

        assert after_progress("11-restart") is Phase.RUNNING
        assert after_progress("9-back-off") is Phase.FORMING

    def test_another_cause_asks_for_no_wait(self) -> None:
        job = delayed(running().fails(), 0)
        job.feed(finding_of(journal.CycleAttributed(action="restart", rule="11-restart"), 0))
        assert job.fails().phase is Phase.RUNNING

    def test_after_an_hour_it_is_forgotten(self) -> None:
        assert delayed(running().fails(), 0).later(3601.0).fails().phase is Phase.RUNNING

    def test_nothing_waits_if_it_is_only_to_be_logged(self) -> None:
        assert delayed(running(StopAction.LOG).fails(), 0).fails().phase is Phase.RUNNING
