"""What the person who watches the job's output file is told."""

from __future__ import annotations

import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator import console
from nvrx_slurm.journal import FaultKind, Record, VerdictAction
from nvrx_slurm.journal.events import AnyEvent, Event

TOLD: list[tuple[AnyEvent, str]] = [
    (
        journal.CycleAttributed(
            category="code.import",
            says="a module is missing",
            action="stop",
            rule="4-deterministic",
            why="the next try would end the same",
            where="cycles/2/merged.log:4",
            culprits=[
                journal.Implicated(kind="rank", id="3", rank=3, node="n2", confidence=0.85, why="at line 4")
            ],
        ),
        "cycle 2 attributed: a module is missing at cycles/2/merged.log:4; rank 3 on n2 (85% sure); next: "
        "stop, the next try would end the same [4-deterministic]",
    ),
    (
        journal.CycleAttributed(
            category="job.hang",
            says="a rank gave no sign of life",
            action="restart_exclude",
            rule="6-exclude",
            why="n2",
            culprits=[
                journal.Implicated(
                    kind="rank", id="3", rank=3, node="n2", confidence=0.6, why="host-lag", by_traces=True
                )
            ],
        ),
        "cycle 2 attributed: a rank gave no sign of life; rank 3 on n2 (60% sure, host-lag); next: "
        "restart, exclude, n2 [6-exclude]",
    ),
    (
        journal.CycleAttributed(failed="it took longer than 120 s"),
        "WARNING: cycle 2 is not attributed: it took longer than 120 s",
    ),
    (
        journal.CycleStarted(world_size=8, nodes=["n1", "n2"], spares=["n3"]),
        "cycle 2: starting 8 ranks on n1 n2, spare n3",
    ),
    (
        journal.CycleStarted(world_size=34, nodes=[f"n{n}" for n in range(17)], spares=[]),
        "cycle 2: starting 34 ranks on 17 nodes",
    ),
    (
        journal.WorkersStarted(node="n1", ranks=[0], pids=[9], warm=False, why_cold="it is not Python"),
        "n1: ranks start in new interpreters: it is not Python",
    ),
    (journal.FirstStep(ranks=8), "cycle 2: all 8 ranks are training"),
    (
        journal.CheckpointLoaded(step=20, layer="shared", rank=0),
        "resumed from the shared checkpoint of step 20",
    ),
    (
        journal.StragglerReport(
            rank=5, node="n2", section="forward", score=0.7, lost_ms=41.23, reports=2, of_reports=3
        ),
        "SLOW: rank 5 on n2: forward takes 41.2 ms longer than elsewhere (2 of 3 reports)",
    ),
    (
        journal.CheckpointLoaded(step=20, layer="local", rank=0, why="the newest that is whole"),
        "resumed from the local checkpoint of step 20: the newest that is whole",
    ),
    (
        journal.CheckpointHeldUp(save=3, rank=1, why="skipped: no room for another snapshot"),
        "rank 1's save 3 skipped: no room for another snapshot",
    ),
    (
        journal.InprocessRestart(
            iteration=2,
            ranks=[3],
            terminated=1,
            world_size=7,
            took_s=0.0213,
            phases_s={"barrier": 0.01},
            why="Interruption.TERMINATED affecting ranks {3}",
        ),
        "restarted in process, iteration 2, in 0.021 s: Interruption.TERMINATED affecting ranks {3};"
        " 7 ranks go on, 1 rank gone",
    ),
    (
        journal.FaultDetected(kind=FaultKind.SIGNAL, node="n1", rank=3, signal="SIGKILL", detector="child"),
        "FAULT: rank 3 on n1 was killed by SIGKILL",
    ),
    (
        journal.HealthChecked(
            node="n4",
            status="fail",
            seconds=0.1,
            findings=[
                journal.HealthFinding(
                    check="gpu-lost", scope="gpu 3", failed=True, evidence="fallen off the bus"
                ),
                journal.HealthFinding(check="memory", evidence="little is left"),
                journal.HealthFinding(check="lustre", failed=True, evidence="says 'NOT HEALTHY'"),
            ],
        ),
        "node n4: gpu-lost gpu 3: fallen off the bus; lustre: says 'NOT HEALTHY'",
    ),
    (
        journal.HealthDisbelieved(check="paths", nodes=4),
        "WARNING: check paths fails on most of 4 nodes: not held against them",
    ),
    (journal.NodeLost(node="n4", why="its connection broke"), "node n4 is gone: its connection broke"),
    (journal.NodeJoined(node="n4", slots=2, returned=True), "node n4 is back, with a new agent"),
    (
        journal.NodesAwaited(nodes=["n3", "n4"], needed=4, here=2, seconds=60.0),
        "waiting up to 60 s for n[3-4] to come back: training needs 4 nodes, 2 are here",
    ),
    (
        journal.NodeGivenUp(node="n4", why="Slurm has taken it out of the job"),
        "node n4 stays away: Slurm has taken it out of the job",
    ),
    (
        journal.TopologyIgnored(why="n4 has the address '' as ''"),
        "ranks are not placed by topology: n4 has the address '' as ''",
    ),
    (journal.NodeExcluded(node="n4", reason="too slow"), "node n4 is excluded: too slow"),
    (journal.WorkersStopped(nodes=2, seconds=0.25), "cycle 2: all workers stopped in 0.250 s"),
    (
        journal.TracesKept(node="n1", ranks=[0, 1], folder="cycles/2/flight_recorder", seconds=0.1),
        "Flight Recorders of 2 ranks on n1: cycles/2/flight_recorder",
    ),
    (
        journal.GpuMemoryLeft(
            node="n1", gpu="GPU-7", used_mb=900.4, waited_s=50.0, processes=["7 (gone)", "8 (gone)"]
        ),
        "n1: 900 MiB of GPU-7 are still in use after 50 s, held by 7 (gone), 8 (gone): going on",
    ),
    (journal.StopRequested(signal="SIGTERM"), "received SIGTERM"),
    (
        journal.StopRequested(signal="", why="the time limit, 120 s away"),
        "asked to stop by the time limit, 120 s away",
    ),
    (
        journal.NodeSuspected(node="n4", faults=3, why="there is no spare to take its place"),
        "node n4 has had 3 faults of its own and stays: there is no spare to take its place",
    ),
    (
        journal.ControlRequested(action="ShutdownWorkload", node="n2", rank=3, why=""),
        "REQUEST: rank 3 on n2 asks for ShutdownWorkload: no reason given",
    ),
    (journal.CycleScored(progressed=False, in_a_row=2, step=7), "cycle 2: no progress, 2 in a row"),
    (
        journal.CycleScored(progressed=None, in_a_row=0),
        "no rank tells its step (send_heartbeat(step=...)): whether there is progress is unknown",
    ),
    (
        journal.FaultDetected(
            kind=FaultKind.REQUEST, node="n1", rank=3, detector="rank", detail="ECC errors"
        ),
        "FAULT: rank 3 on n1 asked to exclude its node (ECC errors)",
    ),
    (
        journal.Verdict(action=VerdictAction.RESTART, rule="node-lost", why="node n4 lost"),
        "verdict: restart: node n4 lost",
    ),
    (journal.JobEnded(code=75, why="too few nodes"), "ends with exit code 75: too few nodes"),
]
SILENT: list[AnyEvent] = [
    journal.Progress(step=3),
    journal.CycleScored(progressed=True, in_a_row=0, step=7),
    journal.NodeJoined(node="n1", slots=2),
    journal.HealthChecked(node="n1", status="ok", seconds=0.1),
    journal.HealthChecked(
        node="n1", status="warn", seconds=0.1, findings=[journal.HealthFinding(check="memory")]
    ),
    journal.RankReady(ranks=8),
    journal.TracesKept(node="n1", ranks=[], folder="x", seconds=0.1, missing={0: "it has no torch"}),
    journal.CheckpointSaved(step=20, layer="shared", rank=0),
    journal.WorkersStarted(node="n1", ranks=[0], pids=[9], warm=True),
]


def record(event: Event) -> Record:
    return Record(ts=1.0, job="7", attempt=0, cycle=2, event=event)  # type: ignore[arg-type]


@pytest.mark.parametrize(("event", "line"), TOLD)
def test_a_turn_of_events_is_one_line(event: AnyEvent, line: str) -> None:
    assert console.line_for(record(event)) == line


@pytest.mark.parametrize("event", SILENT)
def test_what_only_reports_need_is_not_told(event: AnyEvent) -> None:
    assert console.line_for(record(event)) is None
