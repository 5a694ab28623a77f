"""What the person who watches the job's output file sees of the Coordinator: one line per turn of events."""

from __future__ import annotations

from nvrx_slurm import journal
from nvrx_slurm.coordinator.blame import describe
from nvrx_slurm.journal import Record
from nvrx_slurm.slurm.hostlist import compress_hostlist


def line_for(record: Record) -> str | None:
    """Return the line that tells of ``record``; None for what only reports need."""
    match record.event:
        case journal.JobStarted() as event if event.launches > 1:
            most = event.max_batch_requeue
            limit = (
                ""
                if most is None
                else f"; after {most} (MaxBatchRequeue) only an administrator can release it"
            )
            return f"WARNING: Slurm has had to launch the job {event.launches} times{limit}"
        case journal.CycleStarted() as event:
            spare = f", spare {' '.join(event.spares)}" if event.spares else ""
            nodes = " ".join(event.nodes) if len(event.nodes) <= 16 else f"{len(event.nodes)} nodes"
            return f"cycle {record.cycle}: starting {_ranks(event.world_size)} on {nodes}{spare}"
        case journal.WorkersStarted() as event if event.why_cold:
            return f"{event.node}: ranks start in new interpreters: {event.why_cold}"
        case journal.FirstStep() as event:
            return f"cycle {record.cycle}: {_all(event.ranks)} training"
        case journal.CheckpointHeldUp(save=save, rank=rank, why=why):
            return f"rank {rank}'s save {save} {why}"
        case journal.CheckpointLoaded() as event:
            why = f": {event.why}" if event.why else ""
            return f"resumed from the {event.layer} checkpoint of step {event.step}{why}"
        case journal.StragglerReport() as event:
            return (
                f"SLOW: rank {event.rank} on {event.node}: {event.section} takes {event.lost_ms:.3g} ms"
                f" longer than elsewhere ({event.reports} of {event.of_reports} reports){_said_of(event)}"
            )
        case journal.JobSlowed() as event:
            times = 1 / max(event.score, 1e-4)
            return (
                f"SLOW: all ranks: {event.section} takes {times:.2g} times as long as before"
                f" ({event.reports} of {event.of_reports} reports)"
            )
        case journal.StragglerKept() as event:
            return f"node {event.node} is slow and stays: {event.why}"
        case journal.InprocessRestart() as event:
            gone = f", {_ranks(event.terminated)} gone" if event.terminated else ""
            return (
                f"restarted in process, iteration {event.iteration}, in {event.took_s:.3f} s: {event.why};"
                f" {_ranks(event.world_size)} go on{gone}"
            )
        case journal.FaultDetected() as event:
            return f"FAULT: {describe(event)}"
        case journal.HangEvidence() as event:
            return f"what rank {event.rank} was doing: {event.file}"
        case journal.TracesKept() as event if event.ranks:
            return f"Flight Recorders of {_ranks(len(event.ranks))} on {event.node}: {event.folder}"
        case journal.GpuMemoryLeft() as event:
            holders = f", held by {', '.join(event.processes)}" if event.processes else ""
            return (
                f"{event.node}: {event.used_mb:.0f} MiB of {event.gpu} are still in use after"
                f" {event.waited_s:g} s{holders}: going on"
            )
        case journal.HealthChecked(status="fail") as event:
            failed = [finding for finding in event.findings if finding.failed]
            return f"node {event.node}: {'; '.join(map(_say_finding, failed))}"
        case journal.HealthDisbelieved() as event:
            return f"WARNING: check {event.check} fails on most of {event.nodes} nodes: not held against them"
        case journal.NodeLost() as event:
            return f"node {event.node} is gone: {event.why}"
        case journal.NodeJoined() as event if event.returned:
            return f"node {event.node} is back, with a new agent"
        case journal.NodesAwaited() as event:
            lack = (
                f"training needs {event.needed} nodes, {event.here} {'is' if event.here == 1 else 'are'} here"
            )
            nodes = compress_hostlist(event.nodes)
            return f"waiting up to {event.seconds:g} s for {nodes} to come back: {lack}"
        case journal.NodeGivenUp() as event:
            return f"node {event.node} stays away: {event.why}"
        case journal.TopologyIgnored() as event:
            return f"ranks are not placed by topology: {event.why}"
        case journal.NodeExcluded() as event:
            return f"node {event.node} is excluded: {event.reason}"
        case journal.NodeSuspected() as event:
            return f"node {event.node} has had {event.faults} faults of its own and stays: {event.why}"
        case journal.ControlRequested() as event:
            why = event.why or "no reason given"
            return f"REQUEST: rank {event.rank} on {event.node} asks for {event.action}: {why}"
        case journal.CycleScored(progressed=None):
            return "no rank tells its step (send_heartbeat(step=...)): whether there is progress is unknown"
        case journal.CycleScored(progressed=False) as event:
            return f"cycle {record.cycle}: no progress, {event.in_a_row} in a row"
        case journal.WorkersStopped() as event:
            return f"cycle {record.cycle}: all workers stopped in {event.seconds:.3f} s"
        case journal.StopRequested() as event:
            return f"received {event.signal}" if event.signal else f"asked to stop by {event.why}"
        case journal.Verdict() as event:
            return f"verdict: {event.action.value}: {event.why}"
        case journal.CycleAttributed() as event:
            return _attributed(event, record.cycle)
        case journal.RestartDelayed() as event:
            return f"the next cycle waits {event.seconds:.0f} s: {event.why} [{event.rule}]"
        case journal.Requeued() as event:
            without = f" without {' '.join(event.excluded)}" if event.excluded else ""
            warned = "".join(f"; {warning}" for warning in event.warnings)
            if event.held:
                return f"requeued{without} and HELD, {event.held}: scontrol release {record.job}{warned}"
            return f"requeued: starts again in {event.start_in_s} s or later{without}{warned}"
        case journal.NotRequeued() as event:
            return f"NOT requeued: {event.why}"
        case journal.CoordinatorLost() as event:
            return (
                f"the Coordinator's host {event.host} has been silent for {event.silent_s:.0f} s: "
                f"{event.successor} takes over ({event.fence})"
            )
        case journal.ExitDeferred() as event:
            return (
                f"the batch script is gone with its host: a requeue will tell Slurm of exit code {event.code}"
            )
        case journal.ExitReported() as event:
            return f"the job had ended with {event.code} when its batch script was gone: exits with that"
        case journal.JobEnded() as event:
            return f"ends with exit code {event.code}: {event.why}"
        case _:
            return None


def _said_of(event: journal.StragglerReport) -> str:
    """What else is known of a slow rank: the kernels, the hardware."""
    parts = []
    if event.kernels:
        parts.append("most in " + ", ".join(f"{loss.kernel} {loss.lost_ms:.3g} ms" for loss in event.kernels))
    parts += event.context
    return f"; {'; '.join(parts)}" if parts else ""


def _attributed(event: journal.CycleAttributed, cycle: int) -> str | None:
    whose = "" if event.by == "rules" else f" ({event.by})"
    if event.failed:
        return f"WARNING: cycle {cycle} is not attributed{whose}: {event.failed}"
    who = f"; {_who(event.culprits[0])}" if event.culprits else ""
    where = f" at {event.where}" if event.where else ""
    then = f"; next: {event.action.replace('_', ', ')}, {event.why} [{event.rule}]"
    return f"cycle {cycle} attributed{whose}: {event.says or event.category}{where}{who}{then}"


def _who(culprit: journal.Implicated) -> str:
    on = f" on {culprit.node}" if culprit.node and culprit.kind != "node" else ""
    why = f", {culprit.why}" if culprit.by_traces else ""
    return f"{culprit.kind} {culprit.id}{on} ({culprit.confidence:.0%} sure{why})"


def _say_finding(finding: journal.HealthFinding) -> str:
    scope = "" if finding.scope == "node" else f" {finding.scope}"
    return f"{finding.check}{scope}: {finding.evidence}"


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _all(ranks: int) -> str:
    return "the rank is" if ranks == 1 else f"all {ranks} ranks are"
