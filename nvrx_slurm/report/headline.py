"""The first lines of a report: does it run, what failed last, what happens now; and its last line."""

from __future__ import annotations

from nvrx_slurm.report.model import (
    CycleEnd,
    CycleReport,
    JobReport,
    JobState,
    Phase,
    Recovery,
    RecoveryEnd,
    RequeueTaken,
)
from nvrx_slurm.report.words import (
    clean,
    count,
    elapsed,
    log_of,
    node_set,
    plain_seconds,
    say_attributed,
    say_fault,
)


def headline(report: JobReport) -> tuple[str, str, str]:
    """Return three sentences: the job's state, what failed last, what happens now."""
    if report.state is JobState.EMPTY:
        return (
            "the journal holds no event yet",
            "failed last: nothing",
            "now: the Coordinator has not started, or could not write",
        )
    return f"job {clean(report.job)} {_state(report)}", _failed_last(report), f"now: {_now(report)}"


def closing(report: JobReport) -> str:
    """Return the report in one line: ``finished: 3 faults, median 1.9 s lost each``."""
    faults = len(report.faults)
    state = {
        JobState.EMPTY: "empty",
        JobState.RUNNING: "running",
        JobState.FINISHED: "finished",
        JobState.FAILED: f"failed (code {report.code})",
        JobState.STOPPED: f"stopped (code {report.code})",
        JobState.REQUEUE: f"{'waiting for a requeue' if _requeue(report) is None else 'requeued'} (code 75)",
        JobState.NO_END: "no end recorded",
    }[report.state]
    if not faults:
        return f"{state}: no fault"
    return f"{state}: {count(faults, 'fault')}, {_lost_each(report)}"


def _lost_each(report: JobReport) -> str:
    median, recovered, faults = report.median_lost_s, len(report.recovered), len(report.faults)
    if median is None:
        return "none recovered yet" if report.state is JobState.RUNNING else "none recovered"
    lost = plain_seconds(median)
    if recovered < faults:
        said = f"{lost} lost" if recovered == 1 else f"median {lost} lost each"
        return f"{recovered} recovered ({said})"
    return f"{lost} lost" if faults == 1 else f"median {lost} lost each"


def _state(report: JobReport) -> str:
    why = clean(report.why) or "no reason given"
    match report.state:
        case JobState.RUNNING:
            doing = report.activity.value if report.activity is not None else "running"
            if report.activity is Phase.REDOING:
                doing = Phase.TRAINING.value
            where = f", cycle {report.cycles[-1].number}" if report.cycles else ""
            return f"is running ({doing}{where}); last event {_ago(report)}"
        case JobState.FINISHED:
            return f"finished: code 0, {why}"
        case JobState.STOPPED:
            return f"was stopped: code {report.code}, {why}"
        case JobState.REQUEUE:
            return f"{'asks for a requeue' if _requeue(report) is None else 'was requeued'}: code 75, {why}"
        case JobState.FAILED:
            return f"FAILED: code {report.code}, {why}"
        case _:
            return f"has no end recorded; last event {_ago(report)}"


def _ago(report: JobReport) -> str:
    assert report.last_event_at is not None
    return f"{plain_seconds(max(0.0, report.now - report.last_event_at))} ago"


def _failed_last(report: JobReport) -> str:
    bad = [cycle for cycle in report.cycles if cycle.end in (CycleEnd.FAULT, CycleEnd.CUT_OFF)]
    if not bad:
        return "failed last: nothing"
    cycle = bad[-1]
    assert cycle.ended_at is not None
    assert report.started_at is not None
    what = say_fault(cycle.cause) if cycle.cause is not None else "the Coordinator, without a word"
    when = f"at +{elapsed(cycle.ended_at - report.started_at)}"
    if report.state in (JobState.RUNNING, JobState.NO_END):
        when = f"{plain_seconds(max(0.0, report.now - cycle.ended_at))} ago"
    why = "" if cycle.attributed is None else f"; cause: {say_attributed(cycle.attributed)}"
    return f"failed last: {what} (cycle {cycle.number}, {when}){why}{_recovered(report, cycle.recovery)}"


def _recovered(report: JobReport, recovery: Recovery | None) -> str:
    if recovery is None:
        return ""
    took = plain_seconds(recovery.lost_s)
    match recovery.end:
        case RecoveryEnd.RESUMED:
            return f"; {took} lost until it trained again"
        case RecoveryEnd.ONGOING:
            known = report.state is JobState.RUNNING  # the line below says more
            return "" if known else "; not known to have trained again"
        case RecoveryEnd.FAILED_AGAIN | RecoveryEnd.ENDED:
            return "; did not train again"


def _now(report: JobReport) -> str:
    job = clean(report.job)
    requeue = _requeue(report)
    match report.state:
        case JobState.FINISHED:
            return "nothing to do, the job is over"
        case JobState.FAILED | JobState.STOPPED if report.attempts[-1].not_requeued is not None:
            return _not_requeued(report, report.attempts[-1].not_requeued)
        case JobState.FAILED:
            bad = report.faults
            look = f"; read {log_of(bad[-1])} in the run directory" if bad else ""
            return f"nothing restarts it{look}"
        case JobState.STOPPED:
            return "nothing restarts it, it was asked to stop"
        case JobState.REQUEUE if report.in_slurm is False and requeue is not None:
            return "it was requeued, but Slurm no longer has it (cancelled?): submit it again"
        case JobState.REQUEUE if requeue is not None:
            return _requeued(report, requeue)
        case JobState.REQUEUE if report.in_slurm is False:
            return "Slurm no longer has the job: nothing requeued it, submit it again"
        case JobState.REQUEUE:
            return f"waits for Slurm to start it again, if it was requeued (squeue -j {job})"
        case JobState.NO_END if report.in_slurm is False:
            return "Slurm no longer has the job: it was cut off, submit it again"
        case JobState.NO_END:
            return f"{_silent(report)} or lost its Coordinator: squeue -j {job} tells if it runs"
        case _:
            return _now_running(report)


def _requeue(report: JobReport) -> RequeueTaken | None:
    return report.attempts[-1].requeued if report.attempts else None


def _requeued(report: JobReport, requeue: RequeueTaken) -> str:
    without = f" without {node_set(requeue.excluded)}" if requeue.excluded else ""
    if requeue.held:
        return f"requeued{without} and HELD: when there is room, scontrol release {clean(report.job)}"
    left = min(requeue.start_in_s, requeue.start_in_s - (report.now - requeue.at))
    when = (
        f"in about {left:.0f} s"
        if left >= 1
        else f"when Slurm has nodes for it (squeue -j {clean(report.job)})"
    )
    return f"requeued{without}, starts again {when}"


def _not_requeued(report: JobReport, why: str) -> str:
    said = f"NOT requeued: {clean(why)}"
    if "scontrol release" in why:
        return said  # it says what to do
    job = clean(report.job)
    bad = {out.node for out in (*report.lost, *report.excluded) if out.back_at is None}
    without = f" with -x {node_set(sorted(bad))}" if bad else ""
    return f"{said}; submit it again{without}, or, if squeue -j {job} shows it held, scontrol release {job}"


def _silent(report: JobReport) -> str:
    phase = report.spans[-1].phase if report.spans else Phase.STARTING
    return (
        "it trains in silence"
        if phase in (Phase.TRAINING, Phase.REDOING)
        else f"it hangs while {phase.value}"
    )


def _now_running(report: JobReport) -> str:
    cycle = report.cycles[-1] if report.cycles else None
    match report.activity:
        case Phase.TRAINING | Phase.REDOING:
            step = "" if cycle is None or cycle.last_step is None else f" (step {cycle.last_step})"
            again = ", doing lost steps again" if report.activity is Phase.REDOING else ""
            return f"trains{step}{again}; {_reserve(report)}"
        case Phase.STOPPING:
            return _stopping(report, cycle)
        case activity:
            doing = "recovering" if activity is Phase.RECOVERING else "starting"
            return f"{doing} for {plain_seconds(_phase_so_far(report))}: {_waits_for(cycle)}"


def _phase_so_far(report: JobReport) -> float:
    """Return how long the job has been without a step."""
    total = 0.0
    for span in reversed(report.spans):
        if span.phase in (Phase.TRAINING, Phase.REDOING):
            break
        total += span.seconds
    return total


def _stopping(report: JobReport, cycle: CycleReport | None) -> str:
    signal = report.attempts[-1].stop_signal
    if signal is not None:
        return f"stopping, asked to by {clean(signal)}"
    if cycle is not None and cycle.verdict is not None:
        return f"stopping: {clean(cycle.verdict.why)}"
    return "stopping"


def _waits_for(cycle: CycleReport | None) -> str:
    if cycle is None:
        return "waiting for the nodes to join"
    if cycle.end is not CycleEnd.RUNNING:
        stopped = cycle.recovery is not None and cycle.recovery.stop_s is not None
        if not stopped:
            return f"stopping what is left of cycle {cycle.number}"
        return "workers are stopped, forming the next cycle"
    if cycle.ready_at is None:
        return f"cycle {cycle.number} has its nodes, ranks are starting"
    return f"all ranks of cycle {cycle.number} are ready, waiting for the first step"


def _reserve(report: JobReport) -> str:
    """Say how much more can fail: restarts used, spares left."""
    attempt = report.attempts[-1]
    used = f"{attempt.restarts} of {attempt.max_restarts}" if attempt.max_restarts is not None else "?"
    spares = len(report.cycles[-1].spares) if report.cycles else 0
    left = "no spare node" if not spares else count(spares, "spare node")
    return f"{used} restarts used, {left} left"
