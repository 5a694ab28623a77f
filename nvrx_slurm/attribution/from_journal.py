"""A cycle's evidence, from the run directory of an nvrx-srun job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from nvrx_slurm.attribution.evidence import CycleEvidence, ProcessFault, SchedulerState
from nvrx_slurm.attribution.flight_recorder import Place
from nvrx_slurm.attribution.history import Attempt, read_history
from nvrx_slurm.attribution.logs.finding import Source, SourceKind
from nvrx_slurm.journal import (
    CheckpointSaved,
    CycleAttributed,
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    HangEvidence,
    JobStarted,
    NodeLost,
    Progress,
    RankReady,
    Record,
    StopRequested,
    WorkersStarted,
)

_ENDING = ("SIGTERM", "SIGINT", "SIGHUP")
_STOPPED = ("T", "t")
"""proc(5): by a signal, by a tracer."""
DUMPS = "flight_recorder"
"""Folder of a cycle's Flight Recorder dumps, in the cycle's own."""


class NoSuchCycleError(ValueError):
    """The journal has no such cycle; the message says which it has."""


def cycles_of(records: Iterable[Record]) -> list[int]:
    """Return the numbers of the cycles that started, in order."""
    return sorted({record.cycle for record in records if isinstance(record.event, CycleStarted)})


def last_faulty_cycle(records: Sequence[Record]) -> int | None:
    """Return the last cycle in which a fault was seen, else the last that started."""
    faulty = [record.cycle for record in records if isinstance(record.event, FaultDetected | NodeLost)]
    started = cycles_of(records)
    return faulty[-1] if faulty else started[-1] if started else None


def earlier_attempts(run_dir: Path, records: Iterable[Record], cycle: int) -> list[Attempt]:
    """Return the history that counts for ``cycle``: of the same job, requeues included, and the same program.

    Raises:
        OSError: the history is there and cannot be read.
    """
    first, program = 0, None
    for record in records:
        if record.cycle <= cycle and isinstance(record.event, JobStarted):
            before, program = program, (record.job, record.event.argv)
            if program != before:
                first = record.cycle
    # A cycle that was attributed again counts once.
    attempts = {attempt.cycle: attempt for attempt in read_history(run_dir)}
    return [attempts[number] for number in sorted(attempts) if first <= number < cycle]


def cycle_evidence(run_dir: Path, records: Sequence[Record], cycle: int | None = None) -> CycleEvidence:
    """Return what the run directory holds of one cycle, by default the last that a fault ended.

    Raises:
        NoSuchCycleError
    """
    number = last_faulty_cycle(records) if cycle is None else cycle
    mine = [
        record
        for record in records
        if record.cycle == number and not isinstance(record.event, CycleAttributed)
    ]
    if number is None or not mine:
        known = cycles_of(records)
        there = f"cycles {known[0]} to {known[-1]}" if known else "no cycle yet"
        wanted = "" if cycle is None else f" no cycle {cycle}: it has"
        raise NoSuchCycleError(f"{run_dir}: the journal has{wanted} {there}")
    folder = run_dir / "cycles" / str(number)
    dumps = folder / DUMPS
    started = [record for record in mine if isinstance(record.event, CycleStarted)]
    events = [record.event for record in mine]
    steps = [e.step for e in events if isinstance(e, Progress | FirstStep) and e.step is not None]
    monitored = any(isinstance(e, RankReady | FirstStep) for e in events)
    trained = any(isinstance(e, FirstStep | Progress) for e in events)
    return CycleEvidence(
        job=mine[-1].job,
        attempt=mine[-1].attempt,
        cycle=number,
        logs=_logs(folder),
        dumps=dumps if dumps.is_dir() else None,
        world_size=next((e.world_size for e in events if isinstance(e, CycleStarted)), None),
        places=_places(events),
        faults=_faults(mine),
        scheduler=_ended_by_slurm(mine),
        lost_nodes=tuple(dict.fromkeys(e.node for e in events if isinstance(e, NodeLost))),
        last_step=max(steps, default=None),
        saved_step=max((e.step for e in events if isinstance(e, CheckpointSaved)), default=None),
        trained=trained if monitored or trained else None,
        seconds=mine[-1].ts - started[0].ts if started else None,
        max_restarts=next(
            (r.event.max_restarts for r in reversed(records) if isinstance(r.event, JobStarted)), None
        ),
    )


def _logs(folder: Path) -> tuple[Source, ...]:
    merged = folder / "merged.log"
    if merged.is_file():
        return (Source(merged, SourceKind.MERGED, is_run_dirs=True),)
    ranks = sorted(
        (int(p.stem.removeprefix("rank_")), p) for p in folder.glob("rank_*.log") if p.stem[5:].isdecimal()
    )
    return tuple(Source(path, SourceKind.RANK, rank=rank, is_run_dirs=True) for rank, path in ranks)


def _places(events: Iterable[object]) -> dict[int, Place]:
    return {
        rank: Place(event.node, local)
        for event in events
        if isinstance(event, WorkersStarted)
        for local, rank in enumerate(event.ranks)
    }


def _ended_by_slurm(records: Sequence[Record]) -> SchedulerState | None:
    """Return why the cycle was stopped if the job was asked to end before any fault; None: it was not."""
    stops: list[StopRequested] = []
    for record in records:
        if isinstance(record.event, FaultDetected) and not stops:
            return None
        if isinstance(record.event, StopRequested):
            stops.append(record.event)
    if any(stop.preempted for stop in stops):
        return SchedulerState.PREEMPTED
    first = stops[0] if stops else None
    if first is not None and not first.signal:
        return SchedulerState.TIMEOUT  # nothing but the time limit asks without a signal
    return SchedulerState.CANCELLED if first is not None and first.signal in _ENDING else None


def _faults(records: Sequence[Record]) -> tuple[ProcessFault, ...]:
    """Return the faults before the job was asked to stop, if it was."""
    found = []
    hangs = [record.event for record in records if isinstance(record.event, HangEvidence)]
    stopped = {hang.rank for hang in hangs if hang.process_state in _STOPPED}
    for record in records:
        if isinstance(record.event, StopRequested):
            break
        if isinstance(record.event, FaultDetected):
            event = record.event
            found.append(
                ProcessFault(
                    ts=record.ts,
                    rank=event.rank,
                    node=event.node,
                    exit=event.exit,
                    signal=event.signal,
                    oom=event.kind is FaultKind.OOM,
                    hung=event.kind is FaultKind.HANG,
                    stopped=event.kind is FaultKind.HANG and event.rank in stopped,
                    node_lost=event.kind is FaultKind.NODE_LOST,
                    detail=event.detail[:200],
                )
            )
    return tuple(found)
