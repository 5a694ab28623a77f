"""Journals to report on, as a Coordinator writes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nvrx_slurm.journal import (
    CheckpointLoaded,
    CheckpointSaved,
    CycleStarted,
    FaultDetected,
    FaultKind,
    FirstStep,
    HangEvidence,
    JobEnded,
    JobStarted,
    NodeExcluded,
    NodeJoined,
    NodeLost,
    NotRequeued,
    Progress,
    RankReady,
    Record,
    Requeued,
    StopRequested,
    Verdict,
    VerdictAction,
    WorkersStarted,
    WorkersStopped,
)
from nvrx_slurm.journal.events import AnyEvent

START = 1_767_322_800.0
"""2026-01-02 03:00:00 UTC."""


class Writer:
    """Makes records with times relative to its start."""

    def __init__(self, job: str = "4711", attempt: int = 0, start: float = START) -> None:
        self.start = start
        self.job = job
        self.attempt = attempt
        self.cycle = 0
        self.records: list[Record] = []

    def at(self, seconds: float, *events: AnyEvent) -> None:
        """Write ``events`` of the present cycle."""
        for event in events:
            self.records.append(
                Record(
                    ts=self.start + seconds, job=self.job, attempt=self.attempt, cycle=self.cycle, event=event
                )
            )

    def job_started(self, seconds: float, nodes: int = 5, spares: int = 1, max_restarts: int = 5) -> None:
        names = [f"n{number}" for number in range(1, nodes + 1)]
        started = JobStarted(
            nodes=names,
            active_nodes=nodes - spares,
            spares=spares,
            max_restarts=max_restarts,
            argv=["train_gpt.py", "--steps", "120"],
            host="n1",
            fence=f"{self.job}.{self.attempt}.0",
            version="0.1.0",
        )
        self.at(seconds, started)
        self.at(seconds + 0.4, *(NodeJoined(node=node, slots=2) for node in names))

    def cycle_starts(self, seconds: float, nodes: Iterable[str], spares: Iterable[str] = ()) -> None:
        names = list(nodes)
        self.at(seconds, CycleStarted(world_size=2 * len(names), nodes=names, spares=list(spares)))
        for place, node in enumerate(names):
            ranks = [2 * place, 2 * place + 1]
            self.at(seconds + 0.05, WorkersStarted(node=node, ranks=ranks, pids=[100, 101], warm=True))

    def trains(self, ready: float, first: float, resumed: int | None, ranks: int = 8) -> None:
        if resumed is not None:
            self.at(ready, CheckpointLoaded(step=resumed, layer="shared", rank=0))
        self.at(ready, RankReady(ranks=ranks))
        self.at(first, FirstStep(ranks=ranks, step=(resumed or 0) + 1))

    def steps(
        self, first_at: float, first: int, last: int, seconds_each: float, save_every: int = 10
    ) -> None:
        for step in range(first, last + 1):
            moment = first_at + (step - first) * seconds_each
            self.at(moment, Progress(step=step))
            if step % save_every == 0:
                self.at(moment + 0.02, CheckpointSaved(step=step, layer="shared", rank=0))

    def restart(self, seconds: float, rule: str, why: str, culprit: FaultDetected) -> None:
        """Write the end of a cycle and go on to the next."""
        self.at(
            seconds,
            Verdict(
                action=VerdictAction.RESTART,
                rule=rule,
                why=why,
                node=culprit.node,
                rank=culprit.rank,
                kind=culprit.kind,
            ),
        )
        self.cycle += 1


def killed(rank: int, node: str) -> FaultDetected:
    return FaultDetected(kind=FaultKind.SIGNAL, node=node, rank=rank, signal="SIGKILL", detector="child")


def exited(rank: int, node: str, code: int = 1) -> FaultDetected:
    return FaultDetected(kind=FaultKind.EXIT, node=node, rank=rank, exit=code, detector="child")


def hung(rank: int, node: str) -> FaultDetected:
    return FaultDetected(
        kind=FaultKind.HANG,
        node=node,
        rank=rank,
        detector="heartbeat",
        detail="no heartbeat for 6 s; it is behind the others, with 18 heartbeats",
    )


def stacks_of(rank: int, node: str) -> HangEvidence:
    return HangEvidence(
        node=node,
        rank=rank,
        pid=101,
        heartbeats=18,
        silent_s=6.3,
        sections={"forward": 6.1},
        process_state="S",
        seconds=0.4,
        file=f"cycles/1/rank_{rank}.stacks",
        wchan="futex_wait_queue",
        source="py-spy",
        stacks='Thread 101 (idle): "MainThread"\n    all_reduce (torch/distributed_c10d.py:2501)\n',
    )


def gone(node: str) -> FaultDetected:
    return FaultDetected(
        kind=FaultKind.NODE_LOST, node=node, detector="stream", detail="no answer to 3 keep-alive pings"
    )


def three_faults(ended_at: float | None = None) -> list[Record]:
    """A killed rank, a hung rank, a lost node that the spare replaces; the job finishes.

    Training stood still for 0.3 s, 6.3 s and 3.9 s before they were seen.

    Args:
        ended_at: Unix seconds; the journal begins at :data:`START` unless it is given.
    """
    w = Writer(start=START if ended_at is None else ended_at - 86.4)
    w.job_started(0.0)
    w.cycle_starts(2.5, ["n1", "n2", "n3", "n4"], ["n5"])
    w.trains(5.1, 6.0, None)
    w.steps(6.0, 1, 37, 0.5)
    # the survivor's connection breaks before the victim's death is reported
    w.at(24.30, exited(2, "n2"))
    w.at(24.31, killed(3, "n2"), exited(0, "n1"), exited(6, "n4"))
    w.at(24.62, WorkersStopped(nodes=4, seconds=0.32, stalled_s=0.3))
    w.restart(24.62, "killed-by-signal", "rank 3 on n2 was killed by SIGKILL", killed(3, "n2"))
    w.cycle_starts(24.63, ["n1", "n2", "n3", "n4"], ["n5"])
    w.trains(25.4, 26.2, 30)
    w.steps(26.2, 31, 62, 0.5)
    w.at(48.0, hung(5, "n3"))
    w.at(48.4, stacks_of(5, "n3"))
    w.at(48.9, WorkersStopped(nodes=4, seconds=0.9, stalled_s=6.3))
    w.restart(48.9, "hang", "rank 5 on n3 hung (behind the others)", hung(5, "n3"))
    w.cycle_starts(48.92, ["n1", "n2", "n3", "n4"], ["n5"])
    w.trains(49.6, 50.4, 60)
    w.steps(50.4, 61, 98, 0.4)
    w.at(69.1, NodeLost(node="n2", why="no answer to 3 keep-alive pings"), gone("n2"))
    w.at(69.4, WorkersStopped(nodes=3, seconds=0.3, stalled_s=3.9))
    w.restart(69.4, "node-lost", "node n2 lost", gone("n2"))
    w.cycle_starts(69.41, ["n1", "n5", "n3", "n4"])
    w.trains(70.3, 71.3, 90)
    w.steps(71.3, 91, 120, 0.5)
    w.at(86.4, JobEnded(code=0, why="all 8 ranks exited with 0"))
    return w.records


def requeued() -> list[Record]:
    """A node is lost without a spare: code 75, 61 s in the queue, then the job finishes without that node."""
    w = Writer()
    w.job_started(0.0, nodes=4, spares=0)
    w.cycle_starts(1.0, ["n1", "n2", "n3", "n4"])
    w.trains(3.0, 4.0, None)
    w.steps(4.0, 1, 40, 1.0)
    w.at(43.5, NodeLost(node="n3", why="connection closed"), gone("n3"))
    w.at(43.9, WorkersStopped(nodes=3, seconds=0.4))
    why = "too few nodes: training needs 4, 3 are left and there is no spare"
    w.at(
        43.9,
        Verdict(
            action=VerdictAction.STOP,
            rule="node-lost",
            why=why,
            node="n3",
            kind=FaultKind.NODE_LOST,
        ),
        JobEnded(code=75, why=why),
    )
    w.at(44.2, Requeued(excluded=["n3"], start_in_s=35))
    w.attempt, w.cycle = 1, 1
    w.at(104.9, w.records[0].event)
    w.at(105.0, NodeExcluded(node="n3", reason="lost in attempt 0"))
    w.cycle_starts(106.0, ["n1", "n2", "n4", "n6"])
    w.trains(108.0, 109.0, 40)
    w.steps(109.0, 41, 60, 1.0)
    w.at(129.0, JobEnded(code=0, why="all 8 ranks exited with 0"))
    return w.records


def not_requeued() -> list[Record]:
    """The same, but the job may not be requeued; the silent node was noticed late."""
    records = []
    for record in requeued():
        match record.event:
            case WorkersStopped():
                event: AnyEvent = WorkersStopped(nodes=3, seconds=0.4, stalled_s=4.4)
            case Requeued():
                event = NotRequeued(why="job 4711 was submitted with --no-requeue")
            case _:
                event = record.event
        if record.attempt == 0:
            records.append(Record(ts=record.ts, job=record.job, attempt=0, cycle=record.cycle, event=event))
    return records


def drained() -> list[Record]:
    """The time limit comes near: the ranks save and end in good order."""
    w = Writer()
    w.job_started(0.0)
    w.cycle_starts(2.5, ["n1", "n2", "n3", "n4"], ["n5"])
    w.trains(5.0, 6.0, None)
    w.steps(6.0, 1, 20, 0.5)
    w.at(15.7, StopRequested(signal="SIGUSR2"))
    w.at(17.0, JobEnded(code=75, why="asked to stop; every rank has ended in good order"))
    return w.records


def write(records: Iterable[Record], path: Path) -> Path:
    """Write a journal file."""
    path.write_bytes(b"".join(record.to_line() for record in records))
    return path
