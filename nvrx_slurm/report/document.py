"""A report as the JSON document ``nvrx.report.v1``; ``docs/report.md`` lists the keys.

Keys are only ever added. ``*_at`` are Unix seconds, ``*_s`` durations in seconds, ``null`` means not known.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nvrx_slurm.report.headline import closing, headline
from nvrx_slurm.report.model import (
    AttemptReport,
    Attributed,
    CycleReport,
    HangFound,
    JobReport,
    Moment,
    NodeOut,
    Phase,
    Recovery,
    Span,
    TimeShare,
)
from nvrx_slurm.report.words import say_end

SCHEMA = "nvrx.report.v1"


def encode(report: JobReport) -> bytes:
    """Return the document as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(document(report)), indent=2) + b"\n"


def document(report: JobReport) -> dict[str, Any]:
    """Return the document as plain dictionaries, lists, strings and numbers."""
    return {
        "schema": SCHEMA,
        "job": report.job,
        "state": report.state.value,
        "activity": report.activity.value if report.activity else None,
        "code": report.code,
        "why": report.why,
        "headline": list(headline(report)),
        "summary": closing(report),
        "now": _rounded(report.now),
        "started_at": _rounded(report.started_at),
        "until": _rounded(report.until),
        "last_event_at": _rounded(report.last_event_at),
        "in_slurm": report.in_slurm,
        "version": report.version,
        "argv": list(report.argv),
        "faults": len(report.faults),
        "recovered": len(report.recovered),
        "median_lost_s": _rounded(report.median_lost_s),
        "last_step": report.last_step,
        "time": _time(report.time) if report.time else None,
        "attempts": [_attempt(attempt) for attempt in report.attempts],
        "cycles": [_cycle(cycle) for cycle in report.cycles],
        "nodes_lost": [_out(out) for out in report.lost],
        "nodes_excluded": [_out(out) for out in report.excluded],
        "timeline": [_moment(moment) for moment in report.timeline],
        "spans": [_span(span, report) for span in report.spans],
        "journal": {
            "torn_lines": report.read.torn,
            "unfinished_line": report.read.unfinished,
            "skipped_events": report.read.fenced,
            "unknown_events": report.read.unknown,
        },
    }


def _rounded(value: float | None) -> float | None:
    """To the microsecond, as the journal has it."""
    return None if value is None else round(value, 6)


def _time(time: TimeShare) -> dict[str, Any]:
    return {
        "wall_s": _rounded(time.wall_s),
        "redone_known": time.redone_known,
        "seconds": {phase.value: _rounded(time.seconds[phase]) for phase in Phase},
        "shares": {phase.value: _rounded(time.share(phase)) for phase in Phase},
    }


def _attempt(attempt: AttemptReport) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "started_at": _rounded(attempt.started_at),
        "ended_at": _rounded(attempt.ended_at),
        "last_event_at": _rounded(attempt.last_event_at),
        "code": attempt.code,
        "why": attempt.why,
        "stop_signal": attempt.stop_signal,
        "queue_s": _rounded(attempt.queue_s),
        "host": attempt.host,
        "nodes": list(attempt.nodes),
        "max_restarts": attempt.max_restarts,
        "restarts": attempt.restarts,
        "requeued": None
        if attempt.requeued is None
        else {
            "at": _rounded(attempt.requeued.at),
            "excluded": list(attempt.requeued.excluded),
            "start_in_s": attempt.requeued.start_in_s,
            "warnings": list(attempt.requeued.warnings),
            "held": attempt.requeued.held or None,
        },
        "not_requeued": attempt.not_requeued,
    }


def _cycle(cycle: CycleReport) -> dict[str, Any]:
    return {
        "cycle": cycle.number,
        "attempt": cycle.attempt,
        "end": cycle.end.value,
        "summary": say_end(cycle),
        "started_at": _rounded(cycle.started_at),
        "ready_at": _rounded(cycle.ready_at),
        "first_step_at": _rounded(cycle.first_step_at),
        "ended_at": _rounded(cycle.ended_at),
        "world_size": cycle.world_size,
        "nodes": list(cycle.nodes),
        "spares": list(cycle.spares),
        "cold_starts": [{"node": node, "why": why} for node, why in cycle.cold],
        "stop_signal": cycle.stop_signal,
        "cause": _cause(cycle),
        "cascade": [
            {
                "at": _rounded(fault.at),
                "kind": fault.kind.value,
                "node": fault.node,
                "rank": fault.rank,
                "exit": fault.exit,
                "signal": fault.signal,
                "detected_by": fault.detector,
                "detail": fault.detail,
            }
            for fault in cycle.cascade
        ],
        "hang_evidence": [_evidence(found) for found in cycle.evidence],
        "verdict": None
        if cycle.verdict is None
        else {
            "at": _rounded(cycle.verdict.at),
            "action": cycle.verdict.action.value,
            "rule": cycle.verdict.rule,
            "why": cycle.verdict.why,
        },
        "attribution": None if cycle.attributed is None else _attributed(cycle.attributed),
        "resumed_from": cycle.resumed_from,
        "resumed_by": cycle.resumed_by.value if cycle.resumed_by else None,
        "last_step": cycle.last_step,
        "saved_step": max(cycle.saved.values(), default=None),
        "saved_steps": dict(cycle.saved),
        "trained_s": _rounded(cycle.trained_s),
        "redone_s": _rounded(cycle.redone_s),
        "recovery": _recovery(cycle.recovery) if cycle.recovery else None,
    }


def _attributed(found: Attributed) -> dict[str, Any]:
    return {
        "category": found.category,
        "says": found.says,
        "action": found.action,
        "rule": found.rule,
        "why": found.why,
        "confidence": found.confidence,
        "where": found.where,
        "culprits": [
            {
                "kind": culprit.kind,
                "id": culprit.id,
                "confidence": culprit.confidence,
                "node": culprit.node,
                "rank": culprit.rank,
                "why": culprit.why,
            }
            for culprit in found.culprits
        ],
        "exclude": list(found.exclude),
        "file": found.file,
    }


def _evidence(found: HangFound) -> dict[str, Any]:
    return {
        "node": found.node,
        "rank": found.rank,
        "silent_s": _rounded(found.silent_s),
        "sections": [{"name": name, "open_s": _rounded(age)} for name, age in found.sections],
        "process_state": found.process_state,
        "wchan": found.wchan,
        "frame": found.frame,
        "file": found.file,
        "note": found.note,
    }


def _cause(cycle: CycleReport) -> dict[str, Any] | None:
    cause = cycle.cause
    if cause is None:
        return None
    return {
        "kind": cause.kind.value if cause.kind else None,
        "node": cause.node,
        "rank": cause.rank,
        "exit": cause.exit,
        "signal": cause.signal,
        "detected_by": cause.detector,
        "detail": cause.detail,
        "from_verdict": cause.from_verdict,
    }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "end": recovery.end.value,
        "detect_s": _rounded(recovery.detect_s),
        "stop_s": _rounded(recovery.stop_s),
        "queue_s": _rounded(recovery.queue_s),
        "form_s": _rounded(recovery.form_s),
        "ready_s": _rounded(recovery.ready_s),
        "first_step_s": _rounded(recovery.first_step_s),
        "lost_s": _rounded(recovery.lost_s),
        "steps_lost": recovery.steps_lost,
    }


def _out(out: NodeOut) -> dict[str, Any]:
    return {
        "node": out.node,
        "at": _rounded(out.at),
        "why": out.why,
        "cycle": out.cycle,
        "back_at": _rounded(out.back_at),
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "at": _rounded(moment.at),
        "event": moment.kind.value,
        "cycle": moment.cycle,
        "text": moment.text,
    }


def _span(span: Span, report: JobReport) -> dict[str, Any]:
    return {
        "phase": span.phase.value,
        "start": _rounded(span.start),
        "end": _rounded(span.end),
        "cycle": None if span.cycle is None else report.cycles[span.cycle].number,
    }
