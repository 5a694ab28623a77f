"""The words of a report: how a cause, a duration, a set of nodes or ranks is said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nvrx_slurm.journal import (
    FaultKind,
    GpuMemoryLeft,
    HealthChecked,
    InprocessRestart,
    JobSlowed,
    StragglerReport,
    TracesKept,
)
from nvrx_slurm.report.model import Attributed, Cause, CycleEnd, CycleReport, HangFound, NodeOut, SeenFault


def clean(text: str) -> str:
    """Return ``text`` on one line and without control characters, which could drive a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def seconds(value: float) -> str:
    """Say a duration in at most six characters: ``0.12s``, ``12.3s``, ``1m12s``, ``1h02m``, ``4d03h``."""
    if value < 9.995:
        return f"{value:.2f}s"
    if value < 59.95:
        return f"{value:.1f}s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def elapsed(value: float, *, tenths: bool = False) -> str:
    """Say a time since the start as a clock does: ``0:24`` or ``0:24.3``, ``1:02:03``, ``4d03h05``."""
    value = max(0.0, value)
    if tenths and value < 3599.95:
        tenth = round(value * 10)
        return f"{tenth // 600}:{tenth // 10 % 60:02d}.{tenth % 10}"
    whole = round(value)
    minutes, hours = whole // 60 % 60, whole // 3600
    if hours >= 100:
        return f"{hours // 24}d{hours % 24:02d}h{minutes:02d}"
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def plain_seconds(value: float) -> str:
    """Say a duration as prose does: ``0.84 s``, ``1.9 s``, ``2m31s``."""
    if value < 0.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 59.95 else seconds(value)


def count(number: int, what: str) -> str:
    """Return ``1 fault``, ``3 faults``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def ranges(numbers: Iterable[int]) -> str:
    """Return ``0-2,5`` for 0, 1, 2, 5."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


_NUMBERED = re.compile(r"^(.*?)([0-9]{1,9})$")


def node_set(nodes: Sequence[str]) -> str:
    """Return nodes as Slurm writes them: ``n[1-3,5],login``."""
    groups: dict[tuple[str, int], list[int]] = {}
    single: list[str] = []
    for node in map(clean, nodes):
        match = _NUMBERED.match(node)
        if match is None:
            single.append(node)
            continue
        digits = match.group(2)
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((match.group(1), width), []).append(int(digits))
    said = []
    for (prefix, width), numbers in groups.items():
        parts = [
            "-".join(part.zfill(width) for part in span.split("-")) for span in ranges(numbers).split(",")
        ]
        alone = len(parts) == 1 and "-" not in parts[0]
        said.append(f"{prefix}{parts[0]}" if alone else f"{prefix}[{','.join(parts)}]")
    return ",".join(said + single) or "-"


def what_happened(fault: Cause | SeenFault) -> str:
    """Say the symptom alone: ``SIGKILL``, ``exit 1``, ``hung``, ``lost``."""
    match fault.kind:
        case FaultKind.EXIT:
            return "failed" if fault.exit is None else f"exit {fault.exit}"
        case FaultKind.SIGNAL:
            return clean(fault.signal) if fault.signal else "killed by a signal"
        case FaultKind.OOM:
            return "out of memory"
        case FaultKind.HANG:
            return "hung"
        case FaultKind.NODE_LOST:
            return "lost"
        case FaultKind.START:
            return "workers did not start"
        case FaultKind.REQUEST:
            return "asked to exclude its node"
        case FaultKind.UNHEALTHY:
            return "unhealthy"
        case FaultKind.SLOW:
            return "slow"
        case FaultKind.NO_PROGRESS:
            return "failed again and again"
        case None:
            return "failed"


def who(fault: Cause | SeenFault) -> str:
    """Say the place: ``rank 3 on n2``, ``node n2``."""
    node = clean(fault.node) if fault.node else None
    if fault.rank is not None and fault.kind is not FaultKind.NODE_LOST:
        return f"rank {fault.rank} on {node}" if node else f"rank {fault.rank}"
    return f"node {node}" if node else "cause unknown"


def say_fault(fault: Cause | SeenFault) -> str:
    """Say place and symptom: ``rank 3 on n2: SIGKILL``, ``node n2 lost``."""
    if fault.kind is FaultKind.NODE_LOST:
        return f"{who(fault)} lost" if fault.node else "a node was lost"
    if fault.node is None and fault.rank is None and fault.kind is None:
        return "cause not recorded"
    return f"{who(fault)}: {what_happened(fault)}"


def say_end(cycle: CycleReport) -> str:
    """Say why a cycle is over, or what it does."""
    match cycle.end:
        case CycleEnd.FAULT:
            assert cycle.cause is not None
            return say_fault(cycle.cause)
        case CycleEnd.RUNNING:
            return "training" if cycle.first_step_at is not None else "starting"
        case CycleEnd.FINISHED:
            return "finished"
        case CycleEnd.STOPPED:
            return f"asked to stop: {clean(cycle.stop_signal)}" if cycle.stop_signal else "stopped"
        case CycleEnd.CUT_OFF:
            return "no end recorded"


def say_attributed(found: Attributed) -> str:
    """Say the first cause, where it stands, and who: ``the program raised an exception, rank 3 on n2``."""
    text = clean(found.says or found.category)
    if found.culprits:
        first = found.culprits[0]
        on = f" on {clean(first.node)}" if first.node and first.kind != "node" else ""
        text += f", {clean(first.kind)} {clean(first.id)}{on} ({first.confidence:.0%} sure)"
    return text


def log_of(cycle: CycleReport) -> str:
    """Name what to read about a cycle's cause, relative to the run directory."""
    cause = cycle.cause
    if cause is not None and cause.kind is FaultKind.HANG:
        for found in cycle.evidence:
            if cause.rank in (None, found.rank):
                return clean(found.file)
    if cause is not None and cause.rank is not None and cause.kind is not FaultKind.NODE_LOST:
        return f"cycles/{cycle.number}/rank_{cause.rank}.log"
    return f"cycles/{cycle.number}/merged.log"


_PROCESS_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "stuck in the kernel",
    "T": "stopped",
    "t": "being traced",
    "Z": "dead",
}


def say_evidence(found: HangFound) -> str:
    """Say what a hung rank was doing, and where to read more."""
    parts = [_PROCESS_STATES.get(found.process_state, "in an unknown state")]
    if found.frame is not None:
        parts[0] += f" in {clean(found.frame)}"
    elif found.wchan:
        parts[0] += f" in {clean(found.wchan)}"
    parts += [f"section {clean(name)} open for {plain_seconds(age)}" for name, age in found.sections]
    note = f" ({clean(found.note)})" if found.note.strip() else ""
    return f"rank {found.rank} on {clean(found.node)} was {', '.join(parts)}: read {clean(found.file)}{note}"


def say_traces(event: TracesKept) -> str:
    """Say of which ranks of a node the Flight Recorder was kept, and why not of the others."""
    where = f"on {clean(event.node)} in {clean(event.folder)}"
    kept = f"Flight Recorders of {count(len(event.ranks), 'rank')} {where}"
    reasons = {clean(why) for why in event.missing.values()}
    ranks = " ".join(map(str, sorted(event.missing)))
    return f"{kept}; none of {ranks}: {'; '.join(sorted(reasons))}" if reasons else kept


def say_gpu_memory(event: GpuMemoryLeft) -> str:
    """Say which GPU's memory was not free when the next cycle began, and who held it."""
    held = ", ".join(map(clean, event.processes)) or "a process that the driver does not name"
    text = f"{event.used_mb:.0f} MiB of {clean(event.gpu)} on {clean(event.node)} still in use"
    return f"{text} after {plain_seconds(event.waited_s)}, held by {held}"


def say_straggler(event: StragglerReport) -> str:
    """Say which rank is slow, where, and what it costs."""
    where = f"rank {event.rank} on {clean(event.node)}"
    seen = f"in {event.reports} of {event.of_reports} reports"
    return f"{where}: {clean(event.section)} takes {event.lost_ms:.3g} ms longer than elsewhere, {seen}"


def say_inprocess(event: InprocessRestart) -> str:
    """Say what a restart in process was for, how long it took, and who goes on."""
    gone = f", {count(event.terminated, 'rank')} gone" if event.terminated else ""
    went_on = f"{count(event.world_size, 'rank')} went on{gone}"
    return f"iteration {event.iteration} began {event.took_s:.3f} s after {clean(event.why)}; {went_on}"


def say_slowed(event: JobSlowed) -> str:
    """Say that all ranks have become slower."""
    times = 1 / max(event.score, 1e-4)
    seen = f"in {event.reports} of {event.of_reports} reports"
    return f"all ranks: {clean(event.section)} takes {times:.2g} times as long as before, {seen}"


def say_health(event: HealthChecked) -> str:
    """Say what a node's checks found: ``is unhealthy: gpu-lost gpu 3: fallen off the bus``."""
    said = [
        f"{clean(finding.check)}{'' if finding.scope == 'node' else ' ' + clean(finding.scope)}:"
        f" {clean(finding.evidence)}"
        for finding in event.findings
    ]
    word = {"ok": "is healthy again", "warn": "has warnings"}.get(event.status, "is unhealthy")
    return f"{word}: {'; '.join(said)}" if said else word


def say_out(out: NodeOut, what: str) -> str:
    """Say that a node was lost or excluded, and why."""
    why = f": {clean(out.why)}" if out.why.strip() else ""
    return f"{clean(out.node)} {what}{why}"
