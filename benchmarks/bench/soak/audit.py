"""What must be true of a job that went through faults. Pure: what was seen in, complaints out."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.journal import (
    CycleAttributed,
    CycleStarted,
    FaultDetected,
    FirstStep,
    GpuMemoryLeft,
    HangEvidence,
    JobEnded,
    JobStarted,
    RankReady,
    Record,
    TracesKept,
    Verdict,
    WorkersStopped,
)

_ORDER = (CycleStarted, RankReady, FirstStep, FaultDetected, WorkersStopped, Verdict)
"""Of one cycle; any may be missing, faults may be several and come at any time after the start."""
_EVIDENCE = (HangEvidence, TracesKept, GpuMemoryLeft, CycleAttributed)
"""Told of a cycle when it is there; no restart waits for it."""
_GROWTH_SHARE = 4
"""The first and the last of so many parts of the run are compared."""
_MORE_DESCRIPTORS = 16
"""A new agent for a node that lost its own comes with an srun, which the Coordinator reads from."""
_MORE_RSS = 1.25


@dataclass(frozen=True)
class Census:
    """The processes of the job while it trains."""

    ranks: int
    strays: tuple[str, ...]
    """Those that are no part of nvrx-slurm and no rank."""
    descriptors: Mapping[str, int]
    """Open files of the longest-lived process of each name."""
    rss_mib: Mapping[str, float]


def journal_order(records: Sequence[Record]) -> Iterator[str]:
    """Yield what is out of order: times, cycles, the events of a cycle, beginning and end."""
    for before, after in itertools.pairwise(records):
        if after.ts < before.ts:
            yield f"time goes back by {before.ts - after.ts:.6f} s at {type(after.event).__name__}"
        if after.cycle < before.cycle and not isinstance(after.event, _EVIDENCE):
            yield f"cycle {after.cycle} after cycle {before.cycle} at {type(after.event).__name__}"
    if not records or not isinstance(records[0].event, JobStarted):
        yield "the first event is not job_started"
    ends = [number for number, record in enumerate(records) if isinstance(record.event, JobEnded)]
    if ends != [len(records) - 1]:
        yield "job_ended is not the last event, or not the only one of its kind"
    for cycle in dict.fromkeys(record.cycle for record in records):
        yield from _cycle_order(cycle, [r for r in records if r.cycle == cycle])


def _cycle_order(cycle: int, records: Sequence[Record]) -> Iterator[str]:
    counts = Counter(type(record.event) for record in records)
    for kind in (CycleStarted, RankReady, FirstStep, WorkersStopped, Verdict):
        if counts[kind] > 1:
            yield f"cycle {cycle} has {counts[kind]} times {kind.__name__}"
    if not counts[CycleStarted]:
        yield f"cycle {cycle} never started"
    if counts[Verdict] and not (counts[FaultDetected] and counts[WorkersStopped]):
        yield f"cycle {cycle} has a verdict without a fault or without its workers having stopped"
    reached = [_ORDER.index(type(r.event)) for r in records if type(r.event) in _ORDER]
    # A fault may come before the ranks are ready; what is ready after it is not told any more.
    if reached != sorted(reached) and not counts[FaultDetected] > 1:
        yield f"cycle {cycle}: {', '.join(_ORDER[place].__name__ for place in reached)}"


def losses(expected: Mapping[int, float], seen: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Yield where the loss curve is not the undisturbed one's, steps that were done again included."""
    for step, loss in seen:
        if expected.get(step) != loss:
            yield f"the loss of step {step} is {loss}, undisturbed {expected.get(step)}"
            return
    missing = expected.keys() - {step for step, _ in seen}
    if missing:
        yield f"{len(missing)} steps have no loss, the first of them {min(missing)}"


def growth(censuses: Sequence[Census], world: int) -> Iterator[str]:
    """Yield what became more and more: processes, descriptors, memory."""
    for number, census in enumerate(censuses):
        if census.ranks != world:
            yield f"{census.ranks} ranks instead of {world} after fault {number + 1}"
        if census.strays:
            yield f"strays after fault {number + 1}: {', '.join(census.strays)}"
    part = len(censuses) // _GROWTH_SHARE
    if not part:
        return
    first, last = censuses[:part], censuses[-part:]
    for name in sorted(set().union(*(census.descriptors for census in last))):
        early, late = (_median(group, "descriptors", name) for group in (first, last))
        if early is not None and late is not None and late > early + _MORE_DESCRIPTORS:
            yield f"{name} had {early:g} open files and has {late:g}"
        early, late = (_median(group, "rss_mib", name) for group in (first, last))
        if early is not None and late is not None and late > early * _MORE_RSS:
            yield f"{name} had {early:.0f} MiB resident and has {late:.0f}"


def _median(group: Sequence[Census], what: str, name: str) -> float | None:
    values = [getattr(census, what)[name] for census in group if name in getattr(census, what)]
    return statistics.median(values) if values else None
