"""The notable events of a job in order, one line each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nvrx_slurm.journal import (
    CheckpointLoaded,
    ControlRequested,
    CoordinatorLost,
    CycleAttributed,
    CycleScored,
    CycleStarted,
    ExitDeferred,
    ExitReported,
    FaultDetected,
    FaultKind,
    FirstStep,
    GpuMemoryLeft,
    HangEvidence,
    HealthChecked,
    HealthDisbelieved,
    InprocessRestart,
    JobEnded,
    JobSlowed,
    JobStarted,
    NodeExcluded,
    NodeGivenUp,
    NodeJoined,
    NodeLost,
    NodesAwaited,
    NodeSuspected,
    NotRequeued,
    Requeued,
    RestartDelayed,
    StopRequested,
    StragglerKept,
    StragglerReport,
    TimeoutsCalculated,
    TopologyIgnored,
    TracesKept,
    Verdict,
    WorkersStarted,
    WorkersStopped,
)
from nvrx_slurm.report.cause import attributed_of, hang_found, seen_fault
from nvrx_slurm.report.collect import AttemptNotes, CycleNotes, Entry
from nvrx_slurm.report.model import (
    AttemptReport,
    Cause,
    CycleEnd,
    CycleReport,
    JobReport,
    JobState,
    Moment,
    MomentKind,
    RecoveryEnd,
    SeenFault,
)
from nvrx_slurm.report.words import (
    clean,
    count,
    node_set,
    plain_seconds,
    ranges,
    say_attributed,
    say_evidence,
    say_fault,
    say_gpu_memory,
    say_health,
    say_inprocess,
    say_slowed,
    say_straggler,
    say_traces,
    what_happened,
)

_PLACES_NAMED = 6
"""A cascade of more nodes than this is counted instead of listed."""


def timeline(report: JobReport, attempts: list[AttemptNotes]) -> tuple[Moment, ...]:
    """Return the moments of a report whose other fields are complete."""
    cycles = iter(report.cycles)
    moments: list[Moment] = []
    for attempt, summary in zip(attempts, report.attempts, strict=True):
        teller = _Teller(attempt, summary, {id(notes): next(cycles) for notes in attempt.cycles}, report)
        for entry in attempt.entries:
            moments.extend(teller.tell(entry))
        if attempt.ended is None and (attempt is not attempts[-1] or report.state is JobState.NO_END):
            silent = (
                attempts[-1].started_at if attempt is not attempts[-1] else report.now
            ) - attempt.last_at
            text = f"no end recorded; nothing was written for {plain_seconds(max(0.0, silent))}"
            moments.append(Moment(attempt.last_at, MomentKind.NO_END, attempt.entries[-1].record.cycle, text))
    return tuple(moments)


class _Teller:
    """Says one attempt's events, each with what the whole journal tells about it."""

    def __init__(
        self,
        attempt: AttemptNotes,
        summary: AttemptReport,
        cycles: dict[int, CycleReport],
        report: JobReport,
    ) -> None:
        self._attempt = attempt
        self._summary = summary
        self._cycles = cycles
        self._told_fault: set[int] = set()
        self._told_cascade: set[tuple[int, str]] = set()
        self._told_load: dict[int, int] = {}
        self._told_slow: defaultdict[int, set[tuple[int, str]]] = defaultdict(set)
        self._out: set[str] = set()
        self._complained: set[str] = set()
        self._began = False
        order = {id(cycle): index for index, cycle in enumerate(report.cycles)}
        self._before = {
            key: report.cycles[order[id(cycle)] - 1] if order[id(cycle)] else None
            for key, cycle in cycles.items()
        }

    def tell(self, entry: Entry) -> Iterator[Moment]:
        for kind, text in self._lines(entry):
            yield Moment(entry.at, kind, entry.record.cycle, text)

    def _lines(self, entry: Entry) -> Iterator[tuple[MomentKind, str]]:
        match entry.record.event:
            case JobStarted() as event:
                yield MomentKind.JOB_STARTED, self._job_started(event)
            case CoordinatorLost() as event:
                text = f"{clean(event.successor)} takes over from {clean(event.host)}, the Coordinator's host"
                yield MomentKind.COORDINATOR_LOST, f"{text}, silent for {plain_seconds(event.silent_s)}"
            case NodeJoined(node=node, returned=returned):
                if node in self._out or self._began:
                    how = "is back, with a new agent" if returned else "joined"
                    yield MomentKind.NODE_JOINED, f"{clean(node)} {how}"
                self._out.discard(node)
            case NodeLost() as event:
                self._out.add(event.node)
                if not self._seen_as_fault(event.node):
                    yield MomentKind.NODE_LOST, f"{clean(event.node)} lost: {clean(event.why)}"
            case NodesAwaited() as event:
                text = f"waits for {node_set(event.nodes)}: {event.here} of {event.needed} nodes are here"
                yield MomentKind.NODES_AWAITED, text
            case NodeGivenUp(node=node, why=why):
                yield MomentKind.NODE_GIVEN_UP, f"{clean(node)} stays away: {clean(why)}"
            case TopologyIgnored(why=why):
                yield MomentKind.TOPOLOGY_IGNORED, f"ranks are not placed by topology: {clean(why)}"
            case NodeExcluded(node=node, reason=reason):
                yield MomentKind.NODE_EXCLUDED, f"{clean(node)} excluded: {clean(reason)}"
            case NodeSuspected() as event:
                text = f"{clean(event.node)} has had {count(event.faults, 'fault')} of its own and stays"
                yield MomentKind.NODE_SUSPECTED, f"{text}: {clean(event.why)}"
            case StopRequested() as event:
                yield MomentKind.STOP_REQUESTED, f"asked to stop by {clean(event.by)}"
            case ControlRequested() as event:
                yield MomentKind.CONTROL_REQUESTED, _say_control(event)
            case CycleScored(progressed=False) as event:
                yield MomentKind.NO_PROGRESS, _say_no_progress(event, entry.record.cycle)
            case HealthChecked(findings=findings) as event if findings or event.node in self._complained:
                self._complained.add(event.node)
                yield MomentKind.HEALTH, f"{clean(event.node)} {say_health(event)}"
            case HealthDisbelieved(check=check, nodes=nodes):
                text = f"{clean(check)} fails on most of {nodes} nodes: not held against them"
                yield MomentKind.HEALTH, text
            case StopRequested(signal=signal):
                yield MomentKind.STOP_REQUESTED, f"asked to stop by {clean(signal)}"
            case JobEnded(code=code, why=why):
                yield MomentKind.JOB_ENDED, f"code {code}: {clean(why)}"
            case RestartDelayed() as event:
                text = f"the next cycle waits {plain_seconds(event.seconds)}: {clean(event.why)}"
                yield MomentKind.RESTART_DELAYED, text
            case Requeued() as event:
                yield MomentKind.REQUEUED, _say_requeued(event)
            case NotRequeued(why=why):
                yield MomentKind.NOT_REQUEUED, f"NOT requeued: {clean(why)}"
            case ExitDeferred(code=code):
                text = f"code {code} is left to the next start: the batch script is gone with its host"
                yield MomentKind.EXIT_DEFERRED, text
            case ExitReported(code=code):
                yield MomentKind.EXIT_REPORTED, f"started again only to tell Slurm of code {code}"
            case TimeoutsCalculated() as event:
                yield MomentKind.TIMEOUTS, _say_timeouts(event)
            case _:
                if entry.cycle is not None:
                    yield from self._cycle_lines(entry, entry.cycle)

    def _cycle_lines(self, entry: Entry, notes: CycleNotes) -> Iterator[tuple[MomentKind, str]]:
        cycle = self._cycles[id(notes)]
        match entry.record.event:
            case CycleStarted() as event:
                self._began = True
                spares = f", {'spare' if len(event.spares) == 1 else 'spares'} {node_set(event.spares)}"
                text = f"cycle {notes.number}: {count(event.world_size, 'rank')} on {node_set(event.nodes)}"
                yield MomentKind.CYCLE_STARTED, text + (spares if event.spares else "")
            case WorkersStarted(node=node, warm=False, why_cold=why) if why:
                yield MomentKind.COLD_START, f"{clean(node)} starts its ranks cold: {clean(why)}"
            case CheckpointLoaded(step=step, layer=layer, why=why):
                if self._told_load.get(id(notes)) != step:
                    self._told_load[id(notes)] = step
                    reason = f": {clean(why)}" if why else ""
                    yield (
                        MomentKind.CHECKPOINT_LOADED,
                        f"from step {step} ({clean(layer)} checkpoint){reason}",
                    )
            case StragglerReport() as event if (event.rank, event.section) not in self._told_slow[id(notes)]:
                # Once a cycle: it is reported for as long as it lasts.
                self._told_slow[id(notes)].add((event.rank, event.section))
                yield MomentKind.STRAGGLER, say_straggler(event)
            case InprocessRestart() as event:
                yield MomentKind.INPROCESS_RESTART, say_inprocess(event)
            case JobSlowed() as event if (-1, event.section) not in self._told_slow[id(notes)]:
                self._told_slow[id(notes)].add((-1, event.section))
                yield MomentKind.STRAGGLER, say_slowed(event)
            case StragglerKept(node=node, why=why):
                yield MomentKind.STRAGGLER, f"{clean(node)} is slow and stays: {clean(why)}"
            case FirstStep() if cycle.first_step_at == entry.at:
                yield MomentKind.FIRST_STEP, self._first_step(cycle, self._before[id(notes)])
            case FaultDetected() as event:
                yield from self._fault(event, entry, notes, cycle)
            case HangEvidence() as event:
                yield MomentKind.HANG_EVIDENCE, say_evidence(hang_found(event))
            case TracesKept() as event:
                yield MomentKind.TRACES_KEPT, say_traces(event)
            case GpuMemoryLeft() as event:
                yield MomentKind.GPU_MEMORY_LEFT, say_gpu_memory(event)
            case WorkersStopped(nodes=nodes, seconds=took):
                after = plain_seconds(max(0.0, took))
                text = f"no worker left on {count(nodes, 'node')}, {after} after the order to stop"
                yield MomentKind.WORKERS_STOPPED, text
            case CycleAttributed() as event:
                yield MomentKind.ATTRIBUTED, _say_attribution(event, notes.number)
            case Verdict() as event:
                yield MomentKind.VERDICT, f"{event.action.value}: {clean(event.why)} [{clean(event.rule)}]"
            case _:
                pass

    def _job_started(self, event: JobStarted) -> str:
        spares = f" + {count(event.spares, 'spare')}" if event.spares else ""
        # Without Slurm nobody knows beforehand who will join.
        nodes = f"{node_set(event.nodes)} = " if event.nodes else ""
        text = f"attempt {self._attempt.number} on {clean(event.host)}: {nodes}"
        text += f"{event.active_nodes} active{spares}"
        if self._summary.queue_s is not None:
            text += f", {plain_seconds(self._summary.queue_s)} after the one before"
        return text

    def _first_step(self, cycle: CycleReport, before: CycleReport | None) -> str:
        assert cycle.first_step_at is not None
        text = f"first step of cycle {cycle.number}"
        recovery = before.recovery if before is not None else None
        if before is not None and recovery is not None and recovery.end is RecoveryEnd.RESUMED:
            what = "the fault" if before.end is CycleEnd.FAULT else f"cycle {before.number} ended"
            since = recovery.lost_s - (recovery.detect_s or 0.0)
            lost = "" if recovery.detect_s is None else f", {plain_seconds(recovery.lost_s)} lost"
            return f"{text}, {plain_seconds(since)} after {what}{lost}"
        since = cycle.first_step_at - self._attempt.started_at
        return f"{text}, {plain_seconds(since)} after the start"

    def _fault(
        self, event: FaultDetected, entry: Entry, notes: CycleNotes, cycle: CycleReport
    ) -> Iterator[tuple[MomentKind, str]]:
        seen = seen_fault(entry.at, event)
        if cycle.cause is None:
            yield MomentKind.CASCADE, f"{say_fault(seen)}, after the job was asked to stop"
        elif seen not in cycle.cascade and id(notes) not in self._told_fault:
            self._told_fault.add(id(notes))
            yield MomentKind.FAULT, _with_evidence(cycle.cause, event)
        else:
            group = (id(notes), what_happened(seen))
            if group not in self._told_cascade:
                self._told_cascade.add(group)
                alike = [other for other in cycle.cascade if what_happened(other) == group[1]]
                yield MomentKind.CASCADE, _say_cascade(alike or [seen])

    def _seen_as_fault(self, node: str) -> bool:
        """Whether the node's loss has a line of its own as a fault."""
        return any(
            event.kind is FaultKind.NODE_LOST and event.node == node
            for notes in self._attempt.cycles
            for _, event in notes.faults
        )


def _with_evidence(cause: Cause, event: FaultDetected) -> str:
    detail = f" ({clean(event.detail)})" if event.detail.strip() else ""
    return f"{say_fault(cause)}, seen by {clean(event.detector)}{detail}"


_ACTIONS = {"ExcludeThisNode": "to exclude its node", "ShutdownWorkload": "to shut the workload down"}


def _say_control(event: ControlRequested) -> str:
    action = _ACTIONS.get(event.action, f"for {clean(event.action)}")
    why = f": {clean(event.why)}" if event.why.strip() else ""
    return f"rank {event.rank} on {clean(event.node)} asks {action}{why}"


def _say_attribution(event: CycleAttributed, cycle: int) -> str:
    whose = "" if event.by == "rules" else f" by {clean(event.by)}"
    if event.failed:
        return f"cycle {cycle} is not attributed{whose}: {clean(event.failed)}"
    where = f", see {clean(event.where)}" if event.where else ""
    then = f"next: {clean(event.action).replace('_', ', ')}, {clean(event.why)} [{clean(event.rule)}]"
    return f"of cycle {cycle}{whose}: {say_attributed(attributed_of(event))}{where}; {then}"


def _say_no_progress(event: CycleScored, cycle: int) -> str:
    if event.step is None:
        came = "ended before the first step"
    elif event.checkpoints:
        came = f"saved nothing after step {event.step}"
    else:
        came = f"came no further than step {event.step}"
    row = f", the {_ordinal(event.in_a_row)} in a row" if event.in_a_row > 1 else ""
    return f"cycle {cycle} {came}{row}"


def _ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _say_requeued(event: Requeued) -> str:
    without = f" without {node_set(event.excluded)}" if event.excluded else ""
    warned = "".join(f"; {clean(warning)}" for warning in event.warnings)
    if event.held:
        return f"requeued{without} and HELD until somebody releases it: {clean(event.held)}{warned}"
    return f"requeued{without}, starts again in {event.start_in_s} s or later{warned}"


def _say_timeouts(event: TimeoutsCalculated) -> str:
    """Say what the ranks are held to from now on; what has no time-out is left out."""
    named = [
        ("first heartbeat", event.initial),
        ("heartbeat", event.subsequent),
        *((f"section {clean(name)}", limit) for name, limit in event.section.items()),
        ("outside of sections", event.out_of_section),
    ]
    said = ", ".join(f"{name} {plain_seconds(limit)}" for name, limit in named if limit is not None)
    return f"calculated: {said or 'none'}"


def _say_cascade(alike: list[SeenFault]) -> str:
    if len(alike) == 1:
        return say_fault(alike[0])
    nodes = sorted({fault.node for fault in alike})
    where = f"on {node_set(nodes)}" if len(nodes) <= _PLACES_NAMED else f"on {len(nodes)} nodes"
    told = {fault.rank for fault in alike if fault.rank is not None}
    if not told:
        return f"{count(len(alike), 'node')} {where}: {what_happened(alike[0])}"
    return f"ranks {ranges(told)} {where}: {what_happened(alike[0])}"
