"""Whatever stands in a journal, there is a report, and its figures hold together."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from nvrx_slurm.journal import (
    CheckpointLoaded,
    CheckpointSaved,
    ControlRequested,
    CycleScored,
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    GpuMemoryLeft,
    HangEvidence,
    HealthChecked,
    HealthDisbelieved,
    HealthFinding,
    InprocessRestart,
    JobEnded,
    JobSlowed,
    JobStarted,
    NodeExcluded,
    NodeJoined,
    NodeLost,
    NodeSuspected,
    NotRequeued,
    Progress,
    RankReady,
    RankScores,
    Record,
    Requeued,
    StopRequested,
    StragglerKept,
    StragglerReport,
    TimeoutsCalculated,
    TracesKept,
    Verdict,
    VerdictAction,
    WorkersStarted,
    WorkersStopped,
)
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.report import (
    CycleEnd,
    JobReport,
    JobState,
    Phase,
    RecoveryEnd,
    build_report,
    document,
    render,
)

nodes = st.sampled_from(["n1", "n2", "n3", "gpu-0123", "node\x1b[31m", "[red]x"])
words = st.sampled_from(["", "because", "two\nlines", "\x1b]0;title\x07", "a" * 200])
ranks = st.integers(0, 9)
steps = st.integers(0, 50)
optional_rank = st.none() | ranks
kinds = st.sampled_from(FaultKind)

events: st.SearchStrategy[AnyEvent] = st.one_of(
    st.builds(
        JobStarted,
        nodes=st.lists(nodes),
        active_nodes=ranks,
        spares=ranks,
        max_restarts=ranks,
        argv=st.lists(words, max_size=2),
        host=nodes,
        fence=words,
        version=words,
    ),
    st.builds(NodeJoined, node=nodes, slots=ranks),
    st.builds(NodeLost, node=nodes, why=words),
    st.builds(NodeExcluded, node=nodes, reason=words),
    st.builds(
        HealthChecked,
        node=nodes,
        status=st.sampled_from(["ok", "warn", "fail"]) | words,
        seconds=st.floats(0, 10),
        findings=st.lists(
            st.builds(
                HealthFinding,
                check=words,
                scope=words,
                failed=st.booleans(),
                evidence=words,
                remedy=words,
            ),
            max_size=3,
        ),
    ),
    st.builds(HealthDisbelieved, check=words, nodes=ranks),
    st.builds(CycleStarted, world_size=ranks, nodes=st.lists(nodes), spares=st.lists(nodes)),
    st.builds(
        WorkersStarted,
        node=nodes,
        ranks=st.lists(ranks),
        pids=st.lists(ranks),
        warm=st.booleans(),
        why_cold=words,
    ),
    st.builds(RankReady, ranks=ranks),
    st.builds(FirstStep, ranks=ranks, step=st.none() | steps),
    st.builds(Progress, step=steps),
    st.builds(CheckpointSaved, step=steps, layer=words, rank=ranks),
    st.builds(CheckpointLoaded, step=steps, layer=words, rank=ranks),
    st.builds(
        RankScores,
        compared=ranks,
        missing=ranks,
        median=st.floats(0, 1),
        sections=st.lists(words),
        ranks=st.lists(ranks),
        scores=st.lists(st.floats(0, 1)),
        worst_in=st.lists(ranks),
        nodes=st.dictionaries(words, st.floats(0, 1)),
    ),
    st.builds(JobSlowed, section=words, score=st.floats(0, 1), ranks=ranks, reports=ranks, of_reports=ranks),
    st.builds(StragglerKept, node=words, why=words),
    st.builds(
        StragglerReport,
        rank=ranks,
        node=nodes,
        section=words,
        score=st.floats(0, 1),
        lost_ms=st.floats(0, 1e9),
        reports=st.integers(1, 3),
        of_reports=st.just(3),
    ),
    st.builds(
        InprocessRestart,
        iteration=ranks,
        ranks=st.lists(ranks),
        terminated=ranks,
        world_size=ranks,
        took_s=st.floats(0, 1e9),
        phases_s=st.dictionaries(words, st.floats(0, 1e9)),
        why=words,
    ),
    st.builds(
        FaultDetected,
        kind=kinds,
        node=nodes,
        detector=words,
        rank=optional_rank,
        exit=optional_rank,
        signal=st.none() | words,
        detail=words,
    ),
    st.builds(StopRequested, signal=words, why=words, preempted=st.booleans()),
    st.builds(ControlRequested, action=words, node=nodes, rank=ranks, why=words),
    st.builds(NodeSuspected, node=nodes, faults=ranks, why=words),
    st.builds(
        CycleScored,
        progressed=st.none() | st.booleans(),
        in_a_row=ranks,
        step=st.none() | steps,
        checkpoints=st.booleans(),
        early_end=words,
    ),
    st.builds(WorkersStopped, nodes=ranks, seconds=st.floats(0, 10), stalled_s=st.none() | st.floats(0, 700)),
    st.builds(
        Verdict,
        action=st.sampled_from(VerdictAction),
        rule=words,
        why=words,
        node=st.none() | nodes,
        rank=optional_rank,
        kind=st.none() | kinds,
    ),
    st.builds(
        HangEvidence,
        node=nodes,
        rank=ranks,
        pid=ranks,
        heartbeats=ranks,
        silent_s=st.floats(0, 700),
        sections=st.dictionaries(words, st.floats(0, 700), max_size=2),
        process_state=st.sampled_from(["", "R", "S", "D", "?"]),
        wchan=words,
        stacks=words | st.just('Current thread 0x1 (most recent call first):\n  File "\x1b", line 1 in \x07'),
        note=words,
        seconds=st.floats(0, 2),
        file=words,
    ),
    st.builds(
        TracesKept,
        node=nodes,
        ranks=st.lists(ranks, max_size=3),
        folder=words,
        seconds=st.floats(0, 2),
        missing=st.dictionaries(ranks, words, max_size=2),
    ),
    st.builds(
        GpuMemoryLeft,
        node=nodes,
        gpu=words,
        used_mb=st.floats(0, 1e5),
        waited_s=st.floats(0, 50),
        processes=st.lists(words, max_size=2),
    ),
    st.builds(
        TimeoutsCalculated,
        initial=st.none() | st.floats(0, 700),
        subsequent=st.none() | st.floats(0, 700),
        section=st.dictionaries(words, st.none() | st.floats(0, 700), max_size=2),
    ),
    st.builds(Requeued, excluded=st.lists(nodes), start_in_s=ranks, warnings=st.lists(words, max_size=2)),
    st.builds(NotRequeued, why=words),
    st.builds(JobEnded, code=st.sampled_from([0, 1, 75, 143]), why=words),
)
records = st.lists(
    st.builds(
        Record,
        ts=st.floats(1.7e9, 1.7e9 + 600),
        job=st.just("7"),
        attempt=st.integers(0, 2),
        cycle=st.integers(0, 3),
        event=events,
    ),
    max_size=40,
)


def in_order(found: list[Record]) -> list[Record]:
    """Make a plausible journal of it: times and attempts do not run backwards."""
    times = sorted(record.ts for record in found)
    attempts = sorted(record.attempt for record in found)
    return [
        Record(ts=ts, job=record.job, attempt=attempt, cycle=record.cycle, event=record.event)
        for ts, attempt, record in zip(times, attempts, found, strict=True)
    ]


def check(report: JobReport) -> None:
    if report.time is not None:
        shares = [report.time.share(phase) for phase in Phase]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert math.isclose(sum(shares), 1.0, abs_tol=1e-9)
        assert report.until is not None
        assert report.started_at is not None
        assert math.isclose(report.time.wall_s, report.until - report.started_at, abs_tol=1e-3)
    for earlier, later in zip(report.spans, report.spans[1:], strict=False):
        assert earlier.end == later.start
    for cycle in report.cycles:
        assert (cycle.cause is not None) == (cycle.end is CycleEnd.FAULT)
        assert cycle.trained_s >= 0.0
        assert cycle.redone_s >= 0.0
        if cycle.end is CycleEnd.FAULT:
            assert cycle.recovery is not None
        recovery = cycle.recovery
        if recovery is None:
            continue
        assert recovery.lost_s >= 0.0
        assert recovery.steps_lost is None or recovery.steps_lost >= 0
        phases = [
            recovery.detect_s,
            recovery.stop_s,
            recovery.queue_s,
            recovery.form_s,
            recovery.ready_s,
            recovery.first_step_s,
        ]
        known = [phase for phase in phases if phase is not None]
        assert all(phase >= 0.0 for phase in known)
        if recovery.detect_s is not None:
            assert cycle.first_step_at is not None
            assert cycle.ended_at is not None
            assert recovery.detect_s <= cycle.ended_at - cycle.first_step_at + 1e-3
        if recovery.end is RecoveryEnd.RESUMED:
            assert math.isclose(sum(known), recovery.lost_s, abs_tol=1e-3)
        else:
            assert sum(known) <= recovery.lost_s + 1e-3
    assert len(report.faults) == sum(cycle.end is CycleEnd.FAULT for cycle in report.cycles)
    assert len(report.recovered) <= len(report.faults)
    assert (report.activity is not None) == (report.state is JobState.RUNNING)


def show(report: JobReport) -> str:
    console = Console(width=80, no_color=True, highlight=False, record=True, file=None)
    with console.capture() as capture:
        console.print(render(report))
    return capture.get()


@settings(max_examples=150, deadline=None)
@given(records, st.floats(0, 2000), st.sampled_from([None, True, False]))
def test_any_sequence_of_events_gives_a_report(
    found: list[Record], later: float, in_slurm: bool | None
) -> None:
    report = build_report(found, 1.7e9 + later, in_slurm=in_slurm)
    check(report)
    shown = show(report)
    assert "\x1b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    json.dumps(document(report), allow_nan=False)


@settings(max_examples=150, deadline=None)
@given(records)
def test_any_plausible_journal_gives_a_report_at_each_of_its_events(found: list[Record]) -> None:
    journal = in_order(found)
    for length in {0, len(journal) // 2, len(journal)}:
        check(build_report(journal[:length], journal[length - 1].ts if length else 0.0))


@settings(max_examples=150, deadline=None)
@given(records)
def test_every_verdict_to_restart_is_a_fault(found: list[Record]) -> None:
    report = build_report(in_order(found), 1.7e9 + 600)
    restarts = [c for c in report.cycles if c.verdict and c.verdict.action is VerdictAction.RESTART]
    assert all(cycle.end is CycleEnd.FAULT for cycle in restarts)
    assert sum(attempt.restarts for attempt in report.attempts) == len(restarts)
