"""What a report says about a journal."""

from __future__ import annotations

import pytest
from report_journals import (
    START,
    Writer,
    drained,
    exited,
    gone,
    hung,
    killed,
    not_requeued,
    requeued,
    three_faults,
)

from nvrx_slurm.journal import (
    CheckpointLoaded,
    ControlRequested,
    CycleScored,
    FaultDetected,
    FaultKind,
    FirstStep,
    HealthChecked,
    HealthDisbelieved,
    HealthFinding,
    InprocessRestart,
    JobEnded,
    JobStarted,
    NodeExcluded,
    NodeJoined,
    NodeLost,
    NodeSuspected,
    NotRequeued,
    Progress,
    Record,
    StopRequested,
    StragglerReport,
    TimeoutsCalculated,
    Verdict,
    VerdictAction,
    WorkersStopped,
)
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.report import (
    CycleEnd,
    JobReport,
    JobState,
    MomentKind,
    Phase,
    RecoveryEnd,
    ResumeSource,
    build_report,
)
from nvrx_slurm.report.cause import innermost_frame
from nvrx_slurm.report.words import say_end

NODES = ["n1", "n2", "n3", "n4"]


def report(records: list[Record], now: float = 1e6, in_slurm: bool | None = None) -> JobReport:
    return build_report(records, START + now, in_slurm=in_slurm)


def training(attempt: int = 0) -> Writer:
    """A job whose first cycle has made ten steps, one a second, from 5 s on; checkpoint at step 10."""
    w = Writer(attempt=attempt)
    w.job_started(0.0)
    w.cycle_starts(2.0, NODES, ["n5"])
    w.trains(4.0, 5.0, None)
    w.steps(5.0, 1, 10, 1.0)
    return w


# --- the cycles and who ended them ---------------------------------------------------------------------


def test_three_faults_show_the_right_rank_and_node() -> None:
    shown = report(three_faults())
    assert [say_end(cycle) for cycle in shown.cycles] == [
        "rank 3 on n2: SIGKILL",
        "rank 5 on n3: hung",
        "node n2 lost",
        "finished",
    ]
    assert [cycle.cause.detector for cycle in shown.faults if cycle.cause] == ["child", "heartbeat", "stream"]
    assert shown.state is JobState.FINISHED


def test_the_verdict_names_the_cause_and_what_was_seen_before_is_cascade() -> None:
    cycle = report(three_faults()).cycles[0]
    assert cycle.cause is not None
    assert (cycle.cause.rank, cycle.cause.node, cycle.cause.signal) == (3, "n2", "SIGKILL")
    assert cycle.cause.from_verdict
    assert [fault.rank for fault in cycle.cascade] == [2, 0, 6]
    assert cycle.ended_at == pytest.approx(START + 24.30)  # the loss counts from what was seen first


def test_without_a_verdict_the_cause_is_what_was_seen_first() -> None:
    w = training()
    w.at(15.0, exited(6, "n4"), exited(7, "n4"))
    cycle = report(w.records, now=15.1).cycles[0]
    assert say_end(cycle) == "rank 6 on n4: exit 1"
    assert cycle.cause is not None
    assert not cycle.cause.from_verdict


def test_a_verdict_without_rank_names_the_node() -> None:
    w = training()
    w.at(15.0, exited(6, "n4"), exited(7, "n4"))
    w.at(15.2, Verdict(action=VerdictAction.RESTART, rule="r", why="w", node="n4", kind=FaultKind.EXIT))
    assert say_end(report(w.records).cycles[0]) == "node n4: exit 1"


def test_a_verdict_without_rank_takes_it_from_the_only_fault_that_fits() -> None:
    w = training()
    w.at(15.0, exited(0, "n1"), exited(6, "n4"))
    w.at(15.2, Verdict(action=VerdictAction.RESTART, rule="r", why="w", node="n4", kind=FaultKind.EXIT))
    assert say_end(report(w.records).cycles[0]) == "rank 6 on n4: exit 1"


def test_a_verdict_may_name_what_no_detector_saw() -> None:
    w = training()
    w.at(15.0, exited(0, "n1"))
    culprit = Verdict(action=VerdictAction.RESTART, rule="r", why="w", node="n3", rank=5, kind=FaultKind.HANG)
    w.at(15.2, culprit)
    cycle = report(w.records).cycles[0]
    assert say_end(cycle) == "rank 5 on n3: hung"
    assert cycle.cause is not None
    assert cycle.cause.detector is None
    assert len(cycle.cascade) == 1


def test_a_verdict_that_names_nobody_leaves_the_first_fault_as_cause() -> None:
    w = training()
    w.at(15.0, exited(0, "n1"))
    w.at(15.2, Verdict(action=VerdictAction.RESTART, rule="r", why="w"))
    assert say_end(report(w.records).cycles[0]) == "rank 0 on n1: exit 1"


def test_ranks_that_fall_after_a_request_to_stop_are_no_fault() -> None:
    w = training()
    w.at(15.0, StopRequested(signal="SIGTERM"))
    w.at(15.1, exited(0, "n1"), WorkersStopped(nodes=4, seconds=0.1))
    w.at(15.2, JobEnded(code=143, why="asked to stop by SIGTERM"))
    shown = report(w.records)
    assert shown.state is JobState.STOPPED
    assert shown.faults == ()
    assert say_end(shown.cycles[0]) == "asked to stop: SIGTERM"


def test_a_fault_after_a_request_to_stop_is_one_when_the_verdict_says_so() -> None:
    w = training()
    w.at(15.0, StopRequested(signal="SIGUSR2"))
    w.at(16.0, killed(3, "n2"))
    w.at(
        16.2,
        Verdict(action=VerdictAction.STOP, rule="r", why="w", node="n2", rank=3, kind=FaultKind.SIGNAL),
        JobEnded(code=75, why="asked to stop, and then: rank 3"),
    )
    assert [say_end(cycle) for cycle in report(w.records).faults] == ["rank 3 on n2: SIGKILL"]


# --- seconds and steps lost ----------------------------------------------------------------------------


def test_the_phases_of_a_recovery_add_up_to_the_seconds_lost() -> None:
    recovery = report(three_faults()).cycles[0].recovery
    assert recovery is not None
    phases = [recovery.detect_s, recovery.stop_s, recovery.form_s, recovery.ready_s, recovery.first_step_s]
    assert phases == pytest.approx([0.30, 0.32, 0.01, 0.77, 0.80], abs=1e-6)
    assert recovery.lost_s == pytest.approx(2.20, abs=1e-6)
    assert recovery.end is RecoveryEnd.RESUMED


def test_a_mark_that_is_missing_leaves_its_time_to_the_next_phase() -> None:
    records = [r for r in three_faults() if not isinstance(r.event, WorkersStopped)]
    recovery = report(records).cycles[0].recovery
    assert recovery is not None
    assert recovery.stop_s is None
    assert recovery.form_s == pytest.approx(0.33, abs=1e-6)
    assert recovery.lost_s == pytest.approx(1.90, abs=1e-6)


def test_steps_lost_are_the_last_step_known_less_the_step_resumed_from() -> None:
    shown = report(three_faults())
    assert [c.recovery.steps_lost for c in shown.faults if c.recovery] == [37 - 30, 62 - 60, 98 - 90]


def test_the_last_words_of_a_cycle_count_although_they_are_written_after_the_fault() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.at(15.2, Progress(step=12), WorkersStopped(nodes=4, seconds=0.2))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.trains(15.6, 16.0, 10)
    shown = report(w.records, now=16.0)
    assert shown.cycles[0].last_step == 12
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.steps_lost == 2


def test_without_checkpoint_loaded_the_first_step_tells_where_training_resumed() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(16.0, FirstStep(ranks=8, step=9))
    shown = report(w.records, now=16.0)
    assert shown.cycles[1].resumed_from == 8
    assert shown.cycles[1].resumed_by is ResumeSource.FIRST_STEP
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.steps_lost == 2


def test_without_either_training_is_taken_to_have_begun_anew() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(16.0, FirstStep(ranks=8))
    shown = report(w.records, now=16.0)
    assert (shown.cycles[1].resumed_from, shown.cycles[1].resumed_by) == (0, ResumeSource.START)
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.steps_lost == 10


def test_without_any_step_in_the_journal_steps_lost_are_not_known() -> None:
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(2.0, NODES)
    w.at(5.0, FirstStep(ranks=8))
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(16.0, FirstStep(ranks=8))
    shown = report(w.records, now=20.0)
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.steps_lost is None
    assert shown.last_step is None
    assert shown.time is not None
    assert not shown.time.redone_known


def test_ranks_that_loaded_different_steps_resume_from_the_lowest() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    for rank, step in ((0, 10), (1, 10), (1, 8)):  # rank 1 fell back to an older one
        w.at(15.5, CheckpointLoaded(step=step, layer="local", rank=rank))
    w.at(16.0, FirstStep(ranks=8))
    assert report(w.records, now=16.0).cycles[1].resumed_from == 8


def test_the_timeline_says_which_checkpoint_was_loaded_and_why() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(15.5, CheckpointLoaded(step=8, layer="local", rank=0, why="the newest that is whole"))
    lines = [m.text for m in report(w.records, now=16.0).timeline if m.kind is MomentKind.CHECKPOINT_LOADED]
    assert lines == ["from step 8 (local checkpoint): the newest that is whole"]


def test_a_cycle_that_fails_before_its_first_step_takes_over_the_seconds_lost() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.at(15.2, WorkersStopped(nodes=4, seconds=0.2))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(17.0, exited(1, "n1"))
    w.at(17.2, WorkersStopped(nodes=4, seconds=0.2))
    w.restart(17.2, "r", "w", exited(1, "n1"))
    w.cycle_starts(17.3, NODES)
    w.trains(18.0, 18.5, 10)
    shown = report(w.records, now=19.0)
    first, second = (cycle.recovery for cycle in shown.faults)
    assert first is not None
    assert second is not None
    assert (first.end, first.lost_s) == (RecoveryEnd.FAILED_AGAIN, pytest.approx(2.0))
    assert (second.end, second.lost_s) == (RecoveryEnd.RESUMED, pytest.approx(1.5))
    assert shown.median_lost_s == pytest.approx(1.5)
    assert len(shown.recovered) == 1


# --- how long a fault went unnoticed -------------------------------------------------------------------


def found_late(stopped: WorkersStopped, *between: AnyEvent, first_step: float = 5.0) -> JobReport:
    """A hang that is seen at 21 s and stopped at 21.5 s; trains again at 23 s."""
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(2.0, NODES)
    w.trains(4.0, first_step, None)
    w.at(20.0, *between)
    w.at(21.0, hung(5, "n3"))
    w.at(21.5, stopped)
    w.restart(21.5, "hang", "w", hung(5, "n3"))
    w.cycle_starts(21.6, NODES)
    w.trains(22.0, 23.0, None)
    return report(w.records, now=23.0)


def test_the_time_until_a_fault_was_seen_is_lost_too() -> None:
    shown = found_late(WorkersStopped(nodes=4, seconds=0.5, stalled_s=6.0))
    cycle = shown.cycles[0]
    assert cycle.recovery is not None
    assert cycle.recovery.detect_s == pytest.approx(6.0)
    assert cycle.recovery.stop_s == pytest.approx(0.5)
    assert cycle.recovery.lost_s == pytest.approx(8.0)
    assert shown.median_lost_s == pytest.approx(8.0)
    assert cycle.ended_at == START + 21.0
    assert shown.time is not None
    assert shown.time.seconds[Phase.TRAINING] == pytest.approx(21.0 - 6.0 - 5.0)
    assert shown.time.seconds[Phase.RECOVERING] == pytest.approx(8.0)
    assert "first step of cycle 1, 2.0 s after the fault, 8.0 s lost" in [m.text for m in shown.timeline]


def test_what_lies_between_the_fault_and_the_stop_is_not_counted_twice() -> None:
    recovery = found_late(WorkersStopped(nodes=4, seconds=0.2, stalled_s=6.0)).cycles[0].recovery
    assert recovery is not None  # the stop began 0.3 s after the fault
    assert recovery.detect_s == pytest.approx(5.7)


def test_training_did_not_stand_still_before_its_first_step() -> None:
    shown = found_late(WorkersStopped(nodes=4, seconds=0.5, stalled_s=60.0), first_step=19.0)
    recovery = shown.cycles[0].recovery
    assert recovery is not None
    assert recovery.detect_s == pytest.approx(2.0)
    assert shown.time is not None
    assert shown.time.seconds[Phase.TRAINING] == 0.0


def test_steps_that_are_told_late_do_not_shorten_it() -> None:
    stopped = WorkersStopped(nodes=4, seconds=0.5, stalled_s=6.0)
    recovery = found_late(stopped, Progress(step=9)).cycles[0].recovery
    assert recovery is not None
    assert recovery.detect_s == pytest.approx(6.0)


def test_without_heartbeats_it_is_not_known_and_not_counted() -> None:
    shown = found_late(WorkersStopped(nodes=4, seconds=0.5))
    recovery = shown.cycles[0].recovery
    assert recovery is not None
    assert recovery.detect_s is None
    assert recovery.lost_s == pytest.approx(2.0)
    assert shown.time is not None
    assert shown.time.seconds[Phase.TRAINING] == pytest.approx(16.0)


def test_a_cycle_that_never_trained_lost_no_training_unnoticed() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"))
    w.restart(15.2, "r", "w", killed(3, "n2"))
    w.cycle_starts(15.3, NODES)
    w.at(40.0, hung(5, "n3"))
    w.at(40.1, WorkersStopped(nodes=4, seconds=0.1, stalled_s=20.0))
    second = report(w.records, now=40.1).cycles[1].recovery
    assert second is not None
    assert second.detect_s is None


def test_a_requested_stop_has_nothing_to_detect() -> None:
    w = training()
    w.at(15.0, StopRequested(signal="SIGTERM"))
    w.at(15.1, WorkersStopped(nodes=4, seconds=0.1, stalled_s=0.9))
    w.at(15.2, JobEnded(code=143, why="asked to stop by SIGTERM"))
    shown = report(w.records)
    assert shown.time is not None
    assert shown.time.seconds[Phase.RECOVERING] == 0.0


def test_a_fault_that_ends_the_job_was_unnoticed_for_as_long() -> None:
    shown = report(not_requeued())
    recovery = shown.cycles[0].recovery
    assert recovery is not None
    assert (recovery.end, recovery.detect_s) == (RecoveryEnd.ENDED, pytest.approx(4.4))
    assert shown.time is not None
    assert shown.time.seconds[Phase.RECOVERING] == pytest.approx(4.4)
    assert shown.time.seconds[Phase.STOPPING] == pytest.approx(0.4)


# --- what hung ranks were doing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stacks", "frame"),
    [
        (
            'Thread 9 (idle): "loader"\n    get (queue.py:1)\nThread 7 (active): "MainThread"\n'
            "    all_reduce (torch/distributed/distributed_c10d.py:2501)\n    main (train.py:3)\n",
            "all_reduce (distributed_c10d.py:2501)",
        ),
        (
            'Thread 0x00007f01 (most recent call first):\n  File "/usr/lib/queue.py", line 1 in get\n\n'
            "Current thread 0x00007f02 (most recent call first):\n"
            '  File "/home/me/train.py", line 12 in step\n  File "/home/me/train.py", line 40 in <module>\n',
            "step (train.py:12)",
        ),
        ('Thread 0x00007f01 (most recent call first):\n  File "/usr/lib/queue.py", line 1 in get\n', None),
        ("Current thread 0x00007f02 (most recent call first):\n", None),
        ("", None),
    ],
)
def test_the_innermost_frame_is_the_main_threads(stacks: str, frame: str | None) -> None:
    assert innermost_frame(stacks) == frame


def test_the_timeline_says_where_to_read_what_a_hung_rank_was_doing() -> None:
    lines = [m.text for m in report(three_faults()).timeline if m.kind is MomentKind.HANG_EVIDENCE]
    assert lines == [
        "rank 5 on n3 was sleeping in all_reduce (distributed_c10d.py:2501), section forward open for 6.1 s: "
        "read cycles/1/rank_5.stacks"
    ]


def test_calculated_time_outs_are_one_line() -> None:
    w = training()
    w.at(15.0, TimeoutsCalculated(initial=90.0, subsequent=8.0, section={"forward": 2.5}))
    assert report(w.records, now=16.0).timeline[-1].text == (
        "calculated: first heartbeat 1m30s, heartbeat 8.0 s, section forward 2.5 s"
    )


# --- where the job stands ------------------------------------------------------------------------------


def test_an_empty_journal_is_an_answer() -> None:
    assert report([]).state is JobState.EMPTY


def test_a_journal_with_only_its_start_is_a_job_that_starts() -> None:
    w = Writer()
    w.job_started(0.0)
    shown = report(w.records[:1], now=3.0)
    assert (shown.state, shown.activity) == (JobState.RUNNING, Phase.STARTING)
    assert shown.cycles == ()


def test_a_running_job_trains_until_a_fault_is_seen() -> None:
    w = training()
    assert report(w.records, now=16.0).activity is Phase.TRAINING
    w.at(16.0, killed(3, "n2"))
    shown = report(w.records, now=17.5)
    assert shown.activity is Phase.RECOVERING
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.end is RecoveryEnd.ONGOING
    assert shown.cycles[0].recovery.lost_s == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("in_slurm", "state"),
    [(None, JobState.NO_END), (False, JobState.NO_END), (True, JobState.RUNNING)],
)
def test_a_job_without_end_that_wrote_nothing_for_long_runs_only_if_slurm_says_so(
    in_slurm: bool | None, state: JobState
) -> None:
    shown = report(training().records, now=600.0, in_slurm=in_slurm)
    assert shown.state is state
    if state is JobState.NO_END:
        assert shown.until == shown.last_event_at  # nothing is said about the time after it
        assert shown.timeline[-1].kind is MomentKind.NO_END


@pytest.mark.parametrize(
    ("code", "state"), [(0, JobState.FINISHED), (1, JobState.FAILED), (75, JobState.REQUEUE)]
)
def test_the_code_tells_how_a_job_ended(code: int, state: JobState) -> None:
    w = training()
    w.at(20.0, JobEnded(code=code, why="because"))
    shown = report(w.records)
    assert (shown.state, shown.code, shown.why) == (state, code, "because")
    assert shown.until == START + 20.0


def test_a_job_that_could_not_be_requeued_does_not_wait_for_it() -> None:
    shown = report(not_requeued())
    assert (shown.state, shown.code) == (JobState.FAILED, 75)
    assert shown.attempts[-1].not_requeued == "job 4711 was submitted with --no-requeue"
    drain = Writer()
    drain.records = drained()
    drain.at(17.1, NotRequeued(why="w"))
    assert report(drain.records).state is JobState.STOPPED


def test_what_is_said_of_the_requeue_after_the_end_is_not_left_out() -> None:
    shown = report(requeued())
    assert shown.read.fenced == 0
    taken = shown.attempts[0].requeued
    assert taken is not None
    assert (taken.excluded, taken.start_in_s) == (("n3",), 35)
    assert shown.attempts[1].requeued is None


def test_a_drained_job_waits_for_its_requeue_without_a_fault() -> None:
    shown = report(drained())
    assert (shown.state, shown.faults) == (JobState.REQUEUE, ())
    assert shown.attempts[0].stop_signal == "SIGUSR2"


# --- attempts ------------------------------------------------------------------------------------------


def test_a_requeue_counts_its_time_in_the_queue_apart() -> None:
    shown = report(requeued())
    assert [attempt.queue_s for attempt in shown.attempts] == [None, pytest.approx(61.0)]
    recovery = shown.cycles[0].recovery
    assert recovery is not None
    assert recovery.end is RecoveryEnd.RESUMED
    assert recovery.lost_s == pytest.approx(65.5)
    phases = [recovery.stop_s, recovery.queue_s, recovery.form_s, recovery.ready_s, recovery.first_step_s]
    assert phases == pytest.approx([0.4, 61.0, 1.1, 2.0, 1.0], abs=1e-6)
    assert [cycle.number for cycle in shown.cycles] == [0, 1]


def test_an_attempt_that_follows_one_without_an_end_had_lost_its_coordinator() -> None:
    w = training()
    start = w.records[0].event
    w.attempt, w.cycle = 1, 1
    w.at(100.0, start)
    w.cycle_starts(101.0, NODES)
    w.trains(102.0, 103.0, 10)
    w.steps(103.0, 11, 20, 1.0)
    w.at(113.0, JobEnded(code=0, why="done"))
    shown = report(w.records)
    assert shown.cycles[0].end is CycleEnd.CUT_OFF
    assert shown.cycles[0].recovery is not None
    assert shown.cycles[0].recovery.lost_s == pytest.approx(103.0 - 14.02)
    assert shown.faults == ()


def test_what_a_fenced_coordinator_still_writes_is_left_out() -> None:
    w = training()
    start = w.records[0].event
    w.attempt = 1
    w.at(100.0, start)
    w.attempt = 0
    w.at(101.0, JobEnded(code=93, why="fenced"))
    shown = report(w.records, now=102.0)
    assert shown.state is JobState.RUNNING
    assert shown.read.fenced == 1


def test_a_later_attempt_on_a_host_with_a_slow_clock_comes_after_the_earlier_one() -> None:
    w = training()
    w.at(20.0, JobEnded(code=75, why="too few nodes"))
    start = w.records[0].event
    w.attempt, w.cycle = 1, 1
    w.at(-500.0, start)
    w.cycle_starts(-498.0, NODES)
    w.trains(-497.0, -496.0, 10)
    shown = report(w.records, now=-490.0, in_slurm=True)
    assert shown.attempts[1].queue_s == 0.0
    recovered = shown.cycles[1]
    assert recovered.first_step_at == pytest.approx(START + 20.0 + 4.0)


def test_a_second_run_after_a_finished_one_is_other_training() -> None:
    w = training()
    w.at(20.0, JobEnded(code=0, why="done"))
    w.cycle = 1
    w.at(30.0, w.records[0].event)
    w.cycle_starts(31.0, NODES)
    w.trains(32.0, 33.0, None)
    w.steps(33.0, 1, 5, 1.0)
    w.at(38.0, JobEnded(code=0, why="done"))
    shown = report(w.records)
    assert len(shown.attempts) == 2
    assert shown.cycles[0].recovery is None
    assert shown.time is not None
    assert shown.time.seconds[Phase.REDOING] == 0.0
    assert shown.time.redone_known


# --- nodes ---------------------------------------------------------------------------------------------


def test_a_lost_node_that_joins_again_is_back() -> None:
    w = training()
    w.at(15.0, NodeLost(node="n5", why="connection closed"))
    w.at(18.0, NodeJoined(node="n5", slots=2))
    (lost,) = report(w.records, now=19.0).lost
    assert (lost.node, lost.why, lost.back_at) == ("n5", "connection closed", START + 18.0)


def test_the_loss_of_a_spare_is_no_fault() -> None:
    w = training()
    w.at(15.0, NodeLost(node="n5", why="connection closed"))
    shown = report(w.records, now=16.0)
    assert shown.faults == ()
    assert shown.activity is Phase.TRAINING
    assert "n5 lost: connection closed" in [moment.text for moment in shown.timeline]


def test_a_lost_active_node_has_one_line_in_the_timeline() -> None:
    w = training()
    w.at(15.0, NodeLost(node="n2", why="connection closed"), gone("n2"))
    lines = [moment.text for moment in report(w.records, now=16.0).timeline if "n2 lost" in moment.text]
    assert len(lines) == 1


# --- the timeline --------------------------------------------------------------------------------------


def test_a_cascade_is_one_line_for_each_symptom() -> None:
    w = training()
    w.at(15.0, killed(3, "n2"), *(exited(rank, f"n{rank // 2 + 1}") for rank in (0, 1, 2, 4, 5, 6)))
    w.at(15.1, exited(7, "n4", code=134))
    cascade = [m.text for m in report(w.records, now=16.0).timeline if m.kind is MomentKind.CASCADE]
    assert cascade == ["ranks 0-2,4-6 on n[1-4]: exit 1", "rank 7 on n4: exit 134"]


def test_a_slow_rank_is_one_line_of_each_cycle() -> None:
    w = training()
    slow = StragglerReport(
        rank=5, node="n3", section="load", score=0.5, lost_ms=12.34, reports=2, of_reports=3
    )
    w.at(15.0, slow)
    w.at(16.0, slow)
    lines = [m.text for m in report(w.records, now=17.0).timeline if m.kind is MomentKind.STRAGGLER]
    assert lines == ["rank 5 on n3: load takes 12.3 ms longer than elsewhere, in 2 of 3 reports"]


def test_a_restart_in_process_is_a_line_of_the_timeline_and_no_cycle() -> None:
    w = training()
    before = len(report(w.records, now=15.0).cycles)
    w.at(
        15.0,
        InprocessRestart(
            iteration=1,
            ranks=[5],
            terminated=0,
            world_size=8,
            took_s=0.0123,
            phases_s={"interrupt": 0.01},
            why="Interruption.EXCEPTION affecting ranks {5}",
        ),
    )
    after = report(w.records, now=17.0)
    lines = [m.text for m in after.timeline if m.kind is MomentKind.INPROCESS_RESTART]
    assert lines == [
        "iteration 1 began 0.012 s after Interruption.EXCEPTION affecting ranks {5}; 8 ranks went on"
    ]
    assert len(after.cycles) == before


def test_progress_and_saved_checkpoints_are_no_lines_of_the_timeline() -> None:
    kinds = {moment.kind for moment in report(three_faults()).timeline}
    assert len(report(three_faults()).timeline) == 24
    assert MomentKind.FIRST_STEP in kinds


def test_a_step_that_goes_back_without_a_restart_does_not_break_the_report() -> None:
    w = training()
    w.at(16.0, CheckpointLoaded(step=5, layer="local", rank=0))
    w.at(17.0, Progress(step=6))
    w.at(22.0, Progress(step=11))
    shown = report(w.records, now=22.0)
    assert shown.last_step == 11
    assert shown.time is not None
    assert shown.time.seconds[Phase.REDOING] == pytest.approx(1.0 + 4.0)


def test_of_several_jobs_in_one_run_directory_the_last_is_reported() -> None:
    def job(name: str, submitted: int, code: int) -> list[Record]:
        start = JobStarted(
            nodes=["n1"],
            active_nodes=1,
            spares=0,
            max_restarts=3,
            argv=["train.py"],
            host="n1",
            fence=f"{name}.0.0",
            version="1",
            submitted=submitted,
        )
        events = (start, JobEnded(code=code, why="over"))
        return [
            Record(ts=float(submitted + i), job=name, attempt=0, cycle=0, event=event)
            for i, event in enumerate(events)
        ]

    # given a job, another with the same id (Slurm counts from 1 again at times), and one with another id
    first, again, other = job("1", 100, 1), job("1", 200, 0), job("2", 300, 75)
    assert build_report([*first, *again], now=1000.0).code == 0
    assert build_report([*first, *again, *other], now=1000.0).job == "2"
    # but one job may start nvrx-srun more than once
    assert len(build_report([*first, *first], now=1000.0).attempts) == 2


# --- requests, suspects and progress -------------------------------------------------------------------


def test_the_timeline_tells_of_requests_suspects_and_cycles_without_progress() -> None:
    w = training()
    w.at(15.0, NodeSuspected(node="n2", faults=3, why="there is no spare to take its place"))
    w.at(
        15.1,
        CycleScored(progressed=True, in_a_row=0, step=40),
        CycleScored(progressed=False, in_a_row=1, step=40),
        CycleScored(progressed=False, in_a_row=2, step=40, checkpoints=True),
        CycleScored(progressed=False, in_a_row=13, early_end="exit 1"),
    )
    w.at(15.2, ControlRequested(action="ExcludeThisNode", node="n2", rank=3, why="ECC errors"))
    w.at(15.3, ControlRequested(action="ShutdownWorkload", node="n1", rank=0, why=""))
    told = {
        MomentKind.NODE_SUSPECTED,
        MomentKind.NO_PROGRESS,
        MomentKind.CONTROL_REQUESTED,
    }
    assert [moment.text for moment in report(w.records, now=16.0).timeline if moment.kind in told] == [
        "n2 has had 3 faults of its own and stays: there is no spare to take its place",
        "cycle 0 came no further than step 40",
        "cycle 0 saved nothing after step 40, the 2nd in a row",
        "cycle 0 ended before the first step, the 13th in a row",
        "rank 3 on n2 asks to exclude its node: ECC errors",
        "rank 0 on n1 asks to shut the workload down",
    ]


def test_a_job_that_a_rank_shut_down_is_finished() -> None:
    w = training()
    w.at(15.0, ControlRequested(action="ShutdownWorkload", node="n2", rank=3, why="enough"))
    w.at(15.1, WorkersStopped(nodes=4, seconds=0.1))
    w.at(15.2, JobEnded(code=0, why="rank 3 on n2 asked to shut the workload down: enough"))
    assert report(w.records).state is JobState.FINISHED


def test_a_cycle_that_ends_for_its_node_to_be_excluded_says_so() -> None:
    w = training()
    asked = FaultDetected(kind=FaultKind.REQUEST, node="n2", rank=3, detector="rank", detail="ECC errors")
    w.at(15.0, asked)
    w.restart(15.2, "asked-for", "rank 3 on n2 asked to exclude its node (ECC errors)", asked)
    assert say_end(report(w.records, now=16.0).cycles[0]) == "rank 3 on n2: asked to exclude its node"


def test_what_asked_a_job_to_stop_need_not_be_a_signal() -> None:
    w = training()
    w.at(15.0, StopRequested(signal="", why="the time limit, 120 s away"))
    w.at(15.2, JobEnded(code=75, why="asked to stop; every rank has ended in good order"))
    assert say_end(report(w.records).cycles[0]) == "asked to stop: the time limit, 120 s away"


def test_what_the_nodes_checks_say_is_told_when_it_is_more_than_fine() -> None:
    w = Writer()
    w.job_started(0.0)
    w.at(0.5, *(HealthChecked(node=f"n{n}", status="ok", seconds=0.1) for n in range(1, 6)))
    w.cycle_starts(1.0, ["n1", "n2", "n3", "n4"], ["n5"])
    broken = HealthFinding(check="gpu-lost", scope="gpu 3", failed=True, evidence="fallen off the bus")
    warning = HealthFinding(check="memory", evidence="4.9 % of memory available")
    w.at(5.0, HealthChecked(node="n2", status="warn", seconds=0.1, findings=[warning]))
    w.at(6.0, HealthChecked(node="n2", status="fail", seconds=0.1, findings=[broken, warning]))
    w.at(7.0, HealthDisbelieved(check="gpu-lost", nodes=5))
    w.at(8.0, HealthChecked(node="n2", status="ok", seconds=0.1))
    lines = [m.text for m in report(w.records, now=9.0).timeline if m.kind is MomentKind.HEALTH]
    assert lines == [
        "n2 has warnings: memory: 4.9 % of memory available",
        "n2 is unhealthy: gpu-lost gpu 3: fallen off the bus; memory: 4.9 % of memory available",
        "gpu-lost fails on most of 5 nodes: not held against them",
        "n2 is healthy again",
    ]


def test_a_node_that_was_broken_is_the_cause_of_its_cycles_end() -> None:
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(1.0, ["n1", "n2", "n3", "n4"], ["n5"])
    what = "gpu-lost gpu 3: fallen off the bus"
    w.at(5.0, FaultDetected(kind=FaultKind.UNHEALTHY, node="n2", detector="health", detail=what))
    w.at(5.2, WorkersStopped(nodes=4, seconds=0.2))
    verdict = Verdict(
        action=VerdictAction.RESTART,
        rule="unhealthy-node",
        why=f"node n2 is unhealthy ({what})",
        node="n2",
        kind=FaultKind.UNHEALTHY,
    )
    w.at(5.2, NodeExcluded(node="n2", reason=what), verdict)
    shown = report(w.records, now=9.0)
    assert say_end(shown.cycles[0]) == "node n2: unhealthy"
    assert f"n2 excluded: {what}" in [moment.text for moment in shown.timeline]
