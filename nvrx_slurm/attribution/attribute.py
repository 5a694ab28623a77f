"""Attribute one ended cycle: logs, dumps and facts in, one verdict object out. Needs no network."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from nvrx_slurm.attribution.culprits import SUSPICION, confidence, excluded_nodes, find_culprits
from nvrx_slurm.attribution.evidence import CycleEvidence, ProcessFault, SchedulerState
from nvrx_slurm.attribution.fingerprint import entity, fingerprint, flight_fingerprint
from nvrx_slurm.attribution.flight_recorder import CulpritClass, FlightReport, analyze_directory
from nvrx_slurm.attribution.history import Attempt, Counts, count
from nvrx_slurm.attribution.logs.finding import Finding, Source, SourceKind
from nvrx_slurm.attribution.logs.prefix import Claim
from nvrx_slurm.attribution.logs.rules import UNKNOWN, Exclude, Family, Restart, Role, RuleSet, Scope
from nvrx_slurm.attribution.logs.scan import Scan, scan_file
from nvrx_slurm.attribution.policy import Case, Decision, PolicyConfig, decide
from nvrx_slurm.attribution.primary import Choice, Tier, choose
from nvrx_slurm.attribution.verdict import MAX_EXPLANATION, Attribution, Coverage, ProgressFacts

_FACTS = Path("the launcher and Slurm")
_BY_SIGNAL = {
    "SIGSEGV": "host.segfault",
    "SIGBUS": "host.sigbus",
    "SIGABRT": "host.abort",
    "SIGKILL": "host.sigkill",
    "SIGTERM": "elastic.sigterm",
}
_BY_STATE = {
    SchedulerState.CANCELLED: "slurm.cancelled",
    SchedulerState.DEADLINE: "slurm.cancelled",
    SchedulerState.NODE_FAIL: "slurm.node_fail",
    SchedulerState.BOOT_FAIL: "slurm.node_fail",
    SchedulerState.OUT_OF_MEMORY: "mem.host_oom",
    SchedulerState.PREEMPTED: "slurm.preempted",
    SchedulerState.TIMEOUT: "slurm.time_limit",
    SchedulerState.LAUNCH_FAILED: "slurm.launch_failed",
}
_SCHEDULER_STRENGTH = 100
_FLIGHT_SCOPES = {
    CulpritClass.DEVICE_LAG: Scope.GPU,
    CulpritClass.HOST_LAG: Scope.NODE,
    CulpritClass.MISMATCH: Scope.USER_CODE,
    CulpritClass.DESYNC: Scope.USER_CODE,
}


def attribute(
    evidence: CycleEvidence,
    rules: RuleSet,
    config: PolicyConfig = PolicyConfig(),  # noqa: B008  # it is frozen
    history: Sequence[Attempt] = (),
    now: float | None = None,
) -> Attribution:
    """Read the evidence and return what failed first, whose fault it is, and what happens next.

    A file that cannot be read is named in the result's coverage. Reading takes as long as the logs are long:
    run it beside what must not wait.

    Args:
        history: earlier attempts of the job, oldest first.
        now: Unix seconds of the result.
    """
    scans, missing = _scan(evidence, rules)
    flight, no_flight = _flight(evidence)
    return conclude(
        evidence, rules, scans, flight, [*missing, *no_flight], config=config, history=history, now=now
    )


def conclude(
    evidence: CycleEvidence,
    rules: RuleSet,
    scans: Sequence[Scan],
    flight: FlightReport | None = None,
    missing: Sequence[str] = (),
    *,
    config: PolicyConfig = PolicyConfig(),  # noqa: B008  # it is frozen
    history: Sequence[Attempt] = (),
    now: float | None = None,
) -> Attribution:
    """Return the verdict on logs and dumps that were read before; does no I/O."""
    now = time.time() if now is None else now
    choice = choose([*scans, _facts(evidence, rules)])
    family = choice.primary.family if choice.primary else UNKNOWN
    # Of a process that the kernel has stopped nobody needs to conclude from traces that it did not go on;
    # they may well show how far the others got without it.
    telling = None if any(fault.stopped for fault in evidence.faults) else flight
    culprits = find_culprits(choice, telling, evidence)
    progress = _progress(evidence, scans, config)
    attempt = _attempt(evidence, choice, telling, progress, [c.node for c in culprits if c.node], now)
    counts = count(history, attempt)
    scope = _scope(family, telling, choice)
    family = _bounded_if_desync(dataclasses.replace(family, scope=scope), telling, choice)
    excluded = excluded_nodes(culprits, counts.implicated, config.implications)
    decision = decide(_case(family, counts, evidence, progress, excluded, choice), config)
    return Attribution(
        job=evidence.job,
        attempt=evidence.attempt,
        cycle=evidence.cycle,
        produced_at=now,
        choice=choice,
        scope=scope,
        culprits=tuple(culprits),
        progress=progress,
        fingerprint=attempt.fingerprint,
        entity=attempt.entity,
        coverage=_coverage(evidence, scans, flight, missing),
        confidence=_confidence(choice, telling, len(missing)),
        explanation=_explain(choice, culprits[0].reasons if culprits else (), decision)[:MAX_EXPLANATION],
        decision=decision,
        counts=counts,
        flight=flight,
    )


def _case(
    family: Family,
    counts: Counts,
    evidence: CycleEvidence,
    progress: ProgressFacts,
    excluded: tuple[str, ...],
    choice: Choice,
) -> Case:
    saved, loaded = progress.saved_step, progress.loaded_step
    return Case(
        family=family,
        counts=counts,
        scheduler=evidence.scheduler,
        trained=progress.trained,
        checkpoint_advanced=saved is not None and (loaded is None or saved > loaded),
        exclude=excluded,
        max_restarts=evidence.max_restarts,
        certain=choice.tier not in (Tier.UNVERIFIED, Tier.CANCELLED_STEP),
    )


def _confidence(choice: Choice, flight: FlightReport | None, missing: int) -> float:
    sure = confidence(choice, missing)
    if flight is not None and flight.moving and choice.tier <= Tier.SYMPTOM:
        return min(sure, SUSPICION)
    if flight is not None and flight.culprits and choice.tier <= Tier.SYMPTOM:
        return max(sure, max(culprit.confidence for culprit in flight.culprits))
    return sure


def as_attempt(result: Attribution, seconds: float | None = None) -> Attempt:
    """Return what the job's history keeps of a verdict."""
    return Attempt(
        ts=result.produced_at,
        attempt=result.attempt,
        cycle=result.cycle,
        category=result.family.id,
        fingerprint=result.fingerprint,
        entity=result.entity,
        nodes=sorted({c.node for c in result.culprits if c.node and c.exclude is not Exclude.NO}),
        last_step=result.progress.last_step,
        saved_step=result.progress.saved_step,
        trained=result.progress.trained,
        seconds=seconds,
        action=result.decision.action.value,
        counted=result.decision.counted,
    )


def _scan(evidence: CycleEvidence, rules: RuleSet) -> tuple[list[Scan], list[str]]:
    scans, missing = [], []
    for source in evidence.logs:
        try:
            scans.append(scan_file(source, rules))
        except OSError as error:
            missing.append(f"{source.path}: {error.strerror or error}")
    if not any(source.kind is SourceKind.KERNEL for source in evidence.logs):
        missing.append("kernel logs of the nodes")
    if evidence.scheduler is None and not evidence.faults:
        missing.append("what Slurm says of the job")
    return scans, missing


def _flight(evidence: CycleEvidence) -> tuple[FlightReport | None, list[str]]:
    if evidence.dumps is None:
        return None, ["Flight Recorder dumps"]
    gone = [fault.rank for fault in evidence.faults if fault.rank is not None and not fault.hung]
    try:
        report = analyze_directory(
            evidence.dumps, world_size=evidence.world_size, places=evidence.places, gone=gone
        )
    except OSError as error:
        return None, [f"Flight Recorder dumps in {evidence.dumps}: {error.strerror or error}"]
    return (report, []) if report.present else (None, [f"Flight Recorder dumps: none in {evidence.dumps}"])


def _facts(evidence: CycleEvidence, rules: RuleSet) -> Scan:
    """Return what the launcher and Slurm know, as if a log that nobody can forge said it."""
    scan = Scan(Source(_FACTS, SourceKind.SCHEDULER))
    if evidence.scheduler in _BY_STATE:
        family = rules.families[_BY_STATE[evidence.scheduler]]
        strong = dataclasses.replace(family, strength=_SCHEDULER_STRENGTH)
        node = evidence.lost_nodes[0] if evidence.lost_nodes else None
        scan.findings.append(_fact(scan, strong, f"Slurm says {evidence.scheduler.value}", node=node))
    elif evidence.lost_nodes:
        text = f"node failure on {', '.join(evidence.lost_nodes)}"
        scan.findings.append(
            _fact(scan, rules.families["slurm.node_fail"], text, node=evidence.lost_nodes[0])
        )
    for fault in evidence.faults:
        name = _family_of(fault)
        if name is not None:
            scan.findings.append(_of_fault(scan, rules.families[name], fault))
    return scan


def _family_of(fault: ProcessFault) -> str | None:
    if fault.node_lost:
        return "slurm.node_fail"
    if fault.oom:
        return "mem.host_oom"
    if fault.hung:
        return "job.hang"
    if fault.signal:
        return _BY_SIGNAL.get(fault.signal, "host.sigkill")
    return "elastic.child_failed"


def _of_fault(scan: Scan, family: Family, fault: ProcessFault) -> Finding:
    what = fault.signal or (
        f"exit {fault.exit}" if fault.exit is not None else "lost" if fault.node_lost else "hung"
    )
    who = f"rank {fault.rank} on {fault.node}" if fault.rank is not None else f"node {fault.node}"
    text = f"{who}: {what}" + (f" ({fault.detail})" if fault.detail else "")
    return _fact(scan, family, text, rank=fault.rank, node=fault.node, ts=fault.ts)


def _fact(
    scan: Scan,
    family: Family,
    text: str,
    *,
    rank: int | None = None,
    node: str | None = None,
    ts: float | None = None,
) -> Finding:
    number = len(scan.findings) + 1
    ranks = {rank} if rank is not None else set()
    return Finding(
        family,
        scan.source,
        text,
        text,
        number,
        ts,
        rank,
        node,
        Claim.SLURM,
        epoch=0,
        last_line=number,
        ranks=ranks,
    )


def _progress(evidence: CycleEvidence, scans: Sequence[Scan], config: PolicyConfig) -> ProgressFacts:
    """Merge what the journal and the logs say: the journal wins."""

    def latest(values: list[int | None]) -> int | None:
        return max((value for value in values if value is not None), default=None)

    logs = [scan.progress for scan in scans]
    marked = any(found.advances for found in logs)
    trained = evidence.trained
    if marked or evidence.last_step is not None:
        trained = True
    elif trained is None and evidence.seconds is not None and evidence.seconds < config.startup_s:
        trained = False
    last = evidence.last_step if evidence.last_step is not None else latest([p.last_step for p in logs])
    saved = evidence.saved_step if evidence.saved_step is not None else latest([p.saved_step for p in logs])
    first = min((p.first_step for p in logs if p.first_step is not None), default=None)
    return ProgressFacts(first, last, saved, latest([p.loaded_step for p in logs]), trained)


def _attempt(
    evidence: CycleEvidence,
    choice: Choice,
    flight: FlightReport | None,
    progress: ProgressFacts,
    nodes: list[str],
    now: float,
) -> Attempt:
    primary = choice.primary
    mark = fingerprint(primary) if primary else UNKNOWN.id
    if flight is not None and flight.culprits and choice.tier <= Tier.SYMPTOM:
        mark = f"{mark}:{flight_fingerprint(flight)}"
    return Attempt(
        ts=now,
        attempt=evidence.attempt,
        cycle=evidence.cycle,
        category=primary.family.id if primary else UNKNOWN.id,
        fingerprint=mark,
        entity=entity(primary) if primary else None,
        nodes=nodes,
        last_step=progress.last_step,
        saved_step=progress.saved_step,
        trained=progress.trained,
        seconds=evidence.seconds,
    )


def _scope(family: Family, flight: FlightReport | None, choice: Choice) -> Scope:
    if flight is None or choice.tier > Tier.SYMPTOM:
        return family.scope
    surely = [culprit for culprit in flight.culprits if not culprit.is_suspicion]
    scopes = {_FLIGHT_SCOPES[c.kind] for c in surely if c.kind in _FLIGHT_SCOPES}
    if len(scopes) == 1:
        return scopes.pop()
    return Scope.NETWORK if flight.fabric else family.scope


def _bounded_if_desync(family: Family, flight: FlightReport | None, choice: Choice) -> Family:
    """A program whose ranks call different things does so again."""
    if (
        flight is not None
        and choice.tier <= Tier.SYMPTOM
        and family.scope is Scope.USER_CODE
        and flight.culprits
    ):
        return dataclasses.replace(family, restart=Restart.BOUNDED)
    return family


def _coverage(
    evidence: CycleEvidence, scans: Sequence[Scan], flight: FlightReport | None, missing: Sequence[str]
) -> Coverage:
    return Coverage(
        bytes_read=sum(scan.bytes_read for scan in scans),
        lines=sum(scan.lines for scan in scans),
        files=tuple(str(scan.source.path) for scan in scans),
        flight_dumps=flight.present if flight else 0,
        kernel_nodes=tuple(s.node for s in evidence.logs if s.kind is SourceKind.KERNEL and s.node),
        missing=tuple(missing),
    )


def _explain(choice: Choice, reasons: Sequence[str], decision: Decision) -> str:
    """Return the verdict in a few sentences."""
    primary = choice.primary
    if primary is None:
        said = "Nothing in the evidence says what failed."
    else:
        who = f" on rank {primary.rank}" if primary.rank is not None else ""
        at = f" in {primary.frame}" if primary.frame else ""
        said = f"First cause{who}{at}: {primary.family.says} ({primary.where})."
        cascades = sum(f.count for f, _ in choice.secondary if f.family.role in (Role.CASCADE, Role.SYMPTOM))
        if cascades:
            said += f" {cascades} messages of other ranks follow from it."
    if reasons:
        said += f" {reasons[0][:160]}."
    return f"{said} Next: {decision.action.value.replace('_', ', ')}, {decision.why}."
