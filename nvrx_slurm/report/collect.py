"""Sort a journal's records by attempt and cycle, and put them on one clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nvrx_slurm.journal import (
    CheckpointLoaded,
    CheckpointSaved,
    CycleAttributed,
    CycleStarted,
    ExitDeferred,
    ExitReported,
    FaultDetected,
    FirstStep,
    HangEvidence,
    JobEnded,
    JobStarted,
    NotRequeued,
    Progress,
    RankReady,
    Record,
    Requeued,
    StopRequested,
    Verdict,
    WorkersStarted,
    WorkersStopped,
)

REQUEUE_CODE = 75
"""``job_ended`` with this code asks for a requeue."""
_AFTER_THE_END = (CycleAttributed, Requeued, NotRequeued)


@dataclass(eq=False)
class CycleNotes:
    """What the journal holds about one cycle."""

    number: int
    started: tuple[float, CycleStarted] | None = None
    cold: list[tuple[str, str]] = field(default_factory=list)
    ready_at: float | None = None
    first_step: tuple[float, FirstStep] | None = None
    stopped: tuple[float, WorkersStopped] | None = None
    faults: list[tuple[float, FaultDetected]] = field(default_factory=list)
    evidence: list[HangEvidence] = field(default_factory=list)
    verdict: tuple[float, Verdict] | None = None
    attributed: CycleAttributed | None = None
    """By our own rules."""
    loads: list[tuple[float, CheckpointLoaded]] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)
    """Newest checkpoint of each layer."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """Steps reached, in the journal's order; lower after higher where a load took steps back."""
    last_at: float = 0.0

    @property
    def stopped_at(self) -> float | None:
        return self.stopped[0] if self.stopped else None


@dataclass(eq=False)
class Entry:
    """A record on the report's clock, and the cycle that it belongs to, if any."""

    at: float
    record: Record
    cycle: CycleNotes | None


@dataclass(eq=False)
class AttemptNotes:
    """What the journal holds about one life of the Coordinator."""

    number: int
    started_at: float
    started: JobStarted | None = None
    cycles: list[CycleNotes] = field(default_factory=list)
    stop: tuple[float, StopRequested] | None = None
    ended: tuple[float, JobEnded] | None = None
    requeue: tuple[float, Requeued | NotRequeued] | None = None
    last_at: float = 0.0
    entries: list[Entry] = field(default_factory=list)

    @property
    def over_at(self) -> float:
        """When it ended or, without an end, wrote its last event."""
        return self.ended[0] if self.ended else self.last_at

    @property
    def goes_on(self) -> bool:
        """Whether a later attempt goes on with the same training: a requeue, or a lost Coordinator."""
        return self.ended is None or self.ended[1].code == REQUEUE_CODE


@dataclass
class _Clock:
    """One clock for all attempts, which may have run on hosts whose clocks differ.

    An attempt that begins before the one before it was over is moved behind it as a whole, so that its own
    durations stay as they were written.
    """

    now: float | None = None
    _shift: dict[int, float] = field(default_factory=dict)

    def read(self, record: Record) -> float:
        if record.attempt not in self._shift:
            behind = 0.0 if self.now is None else self.now - record.ts
            self._shift[record.attempt] = max(0.0, behind)
        at = record.ts + self._shift[record.attempt]
        self.now = at if self.now is None else max(self.now, at)
        return self.now


def collect(records: Iterable[Record]) -> tuple[list[AttemptNotes], int]:
    """Return the attempts in order, and how many events were left out.

    Left out is what an older attempt wrote after a newer one had begun (it was fenced off), and what an
    attempt wrote after its own end.
    """
    attempts: list[AttemptNotes] = []
    left_out = 0
    clock = _Clock()
    for record in records:
        if attempts and _is_another_job(attempts[-1], record):
            # In a run directory that several jobs share, the last job is what is asked about.
            attempts, left_out, clock = [], 0, _Clock()
        current = attempts[-1] if attempts else None
        if current is not None and record.attempt < current.number:
            left_out += 1
            continue
        if isinstance(record.event, ExitDeferred | ExitReported) and current is not None:
            # Of the attempt that had come to the end; the one that reports it does nothing else.
            current.entries.append(Entry(clock.read(record), record, None))
            continue
        begins = isinstance(record.event, JobStarted)
        if current is None or begins or record.attempt > current.number:
            at = clock.read(record)
            current = AttemptNotes(number=record.attempt, started_at=at)
            attempts.append(current)
        elif current.ended is not None and not isinstance(record.event, _AFTER_THE_END):
            left_out += 1
            continue
        else:
            at = clock.read(record)
        current.last_at = at
        cycle = _note(current, at, record)
        if cycle is not None:
            cycle.last_at = at
        current.entries.append(Entry(at, record, cycle))
    return attempts, left_out


def _is_another_job(attempt: AttemptNotes, record: Record) -> bool:
    """Tell whether ``record`` begins a job that is not the one of ``attempt``, though it may have its id."""
    event = record.event
    before = attempt.started
    if not isinstance(event, JobStarted) or before is None:
        return False
    if attempt.entries and record.job != attempt.entries[0].record.job:
        return True
    # A requeue counts up; in one attempt a script may call nvrx-srun more than once.
    known = event.submitted and before.submitted and event.submitted != before.submitted
    return record.attempt < attempt.number or (record.attempt == 0 and bool(known))


def _note(attempt: AttemptNotes, at: float, record: Record) -> CycleNotes | None:
    match record.event:
        case JobStarted() as event:
            attempt.started = event
        case StopRequested() as event:
            attempt.stop = attempt.stop or (at, event)
        case JobEnded() as event:
            attempt.ended = (at, event)
        case Requeued() | NotRequeued() as event:
            attempt.requeue = (at, event)
        case CycleStarted() as event:
            attempt.cycles.append(CycleNotes(record.cycle, started=(at, event)))
            return attempt.cycles[-1]
        case _:
            cycle = _cycle_of(attempt, record)
            if cycle is not None:
                _note_in_cycle(cycle, at, record)
            return cycle
    return None


def _cycle_of(attempt: AttemptNotes, record: Record) -> CycleNotes | None:
    """Find the cycle that an event belongs to; a fault or verdict without one makes one."""
    for cycle in reversed(attempt.cycles):
        if cycle.number == record.cycle:
            return cycle
    match record.event:
        case WorkersStopped():
            # Between two cycles the number may already be the coming one's.
            return next((c for c in reversed(attempt.cycles) if c.stopped_at is None), None)
        case Verdict():
            open_ = (c for c in reversed(attempt.cycles) if c.faults and c.verdict is None)
            found = next(open_, None)
            if found is not None:
                return found
        case FaultDetected():
            pass
        case _:
            return None
    attempt.cycles.append(CycleNotes(record.cycle))
    return attempt.cycles[-1]


def _note_in_cycle(cycle: CycleNotes, at: float, record: Record) -> None:
    match record.event:
        case WorkersStarted(node=node, warm=False, why_cold=why) if why:
            cycle.cold.append((node, why))
        case RankReady():
            cycle.ready_at = cycle.ready_at or at
        case FirstStep() as event:
            cycle.first_step = cycle.first_step or (at, event)
            if event.step is not None:
                cycle.steps.append((at, event.step))
        case Progress(step=step):
            cycle.steps.append((at, step))
        case CheckpointSaved(step=step, layer=layer):
            cycle.saved[layer] = max(step, cycle.saved.get(layer, step))
            # Saving ends late: an older step than the last known one is no step back.
            if not cycle.steps or step > cycle.steps[-1][1]:
                cycle.steps.append((at, step))
        case CheckpointLoaded() as event:
            cycle.loads.append((at, event))
            if cycle.first_step is not None:
                cycle.steps.append((at, event.step))
        case FaultDetected() as event:
            cycle.faults.append((at, event))
        case HangEvidence() as event:
            cycle.evidence.append(event)
        case WorkersStopped() as event:
            cycle.stopped = cycle.stopped or (at, event)
        case Verdict() as event:
            cycle.verdict = (at, event)
        case CycleAttributed(by="rules", failed="") as event:
            cycle.attributed = event
        case _:
            pass
