"""The events of a job, as they stand in ``journal.jsonl``.

One line is ``{"v":1,"ts":…,"job":"123","attempt":0,"cycle":2,"event":"fault_detected", …}``: the envelope
of :class:`Record` and the fields of one event beside it. Fields are only ever added; a reader skips events
and fields that it does not know.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from nvrx_slurm.pace import StragglerVerdict

JOURNAL_VERSION = 1
MOST_RANKS_LISTED = 128
"""In one :class:`RankScores`: some 2 KiB, however many ranks there are."""


class FaultKind(str, enum.Enum):
    """What was seen to go wrong, before anybody asks why."""

    EXIT = "exit"
    """A rank exited with a non-zero code."""
    SIGNAL = "signal"
    """A rank was killed by a signal that was not ours."""
    OOM = "oom"
    """The kernel killed a rank because memory had run out."""
    HANG = "hang"
    """A rank missed a deadline."""
    NODE_LOST = "node_lost"
    """A node's agent is gone: power, network, or the agent itself."""
    START = "start"
    """A node could not start its workers."""
    UNHEALTHY = "unhealthy"
    """A node's own checks say that no rank there can go on."""
    REQUEST = "request"
    """A rank asked for its node to be left out."""
    SLOW = "slow"
    """A rank has been slower than comparable ones for several reports, and a spare is there."""
    NO_PROGRESS = "no_progress"
    """Restarts in process, several in a row, got no further."""


class VerdictAction(str, enum.Enum):
    """What happens after a cycle ended."""

    RESTART = "restart"
    STOP = "stop"


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events; the class's tag is the ``event`` field of the line."""


class JobStarted(Event, frozen=True, tag="job_started"):
    """A Coordinator took charge; written once per attempt."""

    nodes: list[str]
    """The allocation, in Slurm's order; empty where nobody knows beforehand who will join."""
    active_nodes: int
    spares: int
    max_restarts: int
    argv: list[str]
    """The user's program and its arguments."""
    host: str
    """Where the Coordinator runs."""
    fence: str
    """``job.restart.attempt``."""
    version: str
    submitted: int = 0
    """When Slurm took the job, Unix seconds; a requeue changes it. 0: not known."""
    launches: int = 0
    """How often Slurm has had to launch it (``BatchFlag``): once unless a launch failed. 0: not known."""
    max_batch_requeue: int | None = None
    """After so many launches only an administrator can release the job; None: not known."""


class NodeJoined(Event, frozen=True, tag="node_joined"):
    node: str
    slots: int
    """Workers that this node runs when it is active."""
    returned: bool = False
    """It had been lost before, and has a new agent now."""


class HealthFinding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that a check of a node warned of, or held to be broken."""

    check: str
    scope: str = "node"
    """``node``, or a part of it: ``gpu 3``."""
    failed: bool = False
    """False: a warning."""
    evidence: str = ""
    remedy: str = ""


class HealthChecked(Event, frozen=True, tag="health_checked"):
    """What a node's own checks said: its first verdict, and every other one later."""

    node: str
    status: str
    """``ok``, ``warn``, ``fail``."""
    seconds: float
    """How long the checks took."""
    findings: list[HealthFinding] = []


class HealthDisbelieved(Event, frozen=True, tag="health_disbelieved"):
    """A check fails on most nodes, so it is not them: they stay."""

    check: str
    nodes: int
    """How many were there."""


class NodeLost(Event, frozen=True, tag="node_lost"):
    node: str
    why: str


class NodesAwaited(Event, frozen=True, tag="nodes_awaited"):
    """Nodes lack for the next cycle, and lost ones may come back."""

    nodes: list[str]
    needed: int
    here: int
    seconds: float
    """How long they are waited for at most."""


class NodeGivenUp(Event, frozen=True, tag="node_given_up"):
    """Nobody tries any more to bring a lost node back."""

    node: str
    why: str


class TopologyIgnored(Event, frozen=True, tag="topology_ignored"):
    """Ranks are not placed by the network's topology, although Slurm tells one."""

    why: str


class NodeExcluded(Event, frozen=True, tag="node_excluded"):
    """The node stays out of every later cycle of this attempt."""

    node: str
    reason: str
    on_trial: bool = False
    """A spare was tried in its place because of its many faults: a requeue excludes the node only if training
    got further without it.
    """


class NodeSuspected(Event, frozen=True, tag="node_suspected"):
    """The node has had as many faults of its own as ``--exclude-after`` allows, and stays nevertheless."""

    node: str
    faults: int
    why: str
    """Why it stays."""


class CycleStarted(Event, frozen=True, tag="cycle_started"):
    world_size: int
    nodes: list[str]
    """Active nodes; position is the group rank."""
    spares: list[str]


class WorkersStarted(Event, frozen=True, tag="workers_started"):
    """One active node has its rank processes."""

    node: str
    ranks: list[int]
    pids: list[int]
    """Process ids as the node sees them, in the order of ``ranks``."""
    warm: bool
    """Forked from an interpreter that had already imported torch."""
    why_cold: str = ""


class RankReady(Event, frozen=True, tag="rank_ready"):
    """The last rank of the cycle has called ``init_workload_monitoring``."""

    ranks: int


class FirstStep(Event, frozen=True, tag="first_step"):
    """The last rank of the cycle has sent its first heartbeat: training is running again."""

    ranks: int
    step: int | None = None


class Progress(Event, frozen=True, tag="progress"):
    step: int


class TimeoutsCalculated(Event, frozen=True, tag="timeouts_calculated"):
    """What the ranks are held to from now on, in seconds."""

    initial: float | None
    subsequent: float | None
    section: dict[str, float | None] = {}
    out_of_section: float | None = None


class StragglerReport(Event, StragglerVerdict, frozen=True, tag="straggler_report"):
    """A rank is slower than those that do the same work, and has been for several reports."""

    told_by: int | None = None
    """The rank whose script says so; None: the Coordinator has judged by the times of all ranks."""


class RankScores(Event, frozen=True, tag="rank_scores"):
    """How the ranks stood in one report. Kept are the worst :data:`MOST_RANKS_LISTED`, and nodes."""

    compared: int
    """Ranks that have a score."""
    missing: int
    """Ranks that told nothing, or nothing that can be compared."""
    median: float
    """0 to 1, as the scores: the median of comparable ranks over a rank's own time, where it is worst."""
    sections: list[str]
    ranks: list[int]
    """The worst first."""
    scores: list[float]
    """Of :attr:`ranks`."""
    worst_in: list[int]
    """Where each of :attr:`ranks` is worst: place in :attr:`sections`."""
    nodes: dict[str, float] = {}
    """The nodes whose ranks are worst: the mean of their ranks' scores; as many as ranks."""


class JobSlowed(Event, frozen=True, tag="job_slowed"):
    """Most ranks take longer than they did: no rank stands out, and the job is slow all the same."""

    section: str
    score: float
    """0 to 1: the ranks' middle time as it was in the last reports over that of now."""
    ranks: int
    reports: int
    of_reports: int


class StragglerKept(Event, frozen=True, tag="straggler_kept"):
    """``--straggler-action exclude`` would have a node leave, and it stays."""

    node: str
    why: str


class CheckpointSaved(Event, frozen=True, tag="checkpoint_saved"):
    step: int
    layer: str
    rank: int


class CheckpointLoaded(Event, frozen=True, tag="checkpoint_loaded"):
    step: int
    layer: str
    rank: int
    why: str = ""
    """Why this one, where several were to be had."""


class CheckpointHeldUp(Event, frozen=True, tag="checkpoint_held_up"):
    """A save found no room: the storage is slower than what is saved, or memory is short."""

    save: int
    """Which one of the rank's queue, from 0."""
    rank: int
    why: str
    """Begins with what follows: waited, skipped or failed."""


class InprocessRestart(Event, frozen=True, tag="inprocess_restart"):
    """The ranks called their function again without ending: no new cycle, nothing of the restart budget.

    As long as training gets further: if it does not, ``fault_detected`` (``no_progress``) ends the cycle.
    """

    iteration: int
    """The one that begins; 1 for the first such restart of a call."""
    ranks: list[int]
    """Those with a fault, numbered as in the iteration before; 128 at most."""
    terminated: int
    """How many ranks are gone."""
    world_size: int
    """How many go on, spares included."""
    took_s: float
    """From the fault to the function, on the rank that told it."""
    phases_s: dict[str, float]
    """Its parts: interrupt, finalize, health_check, barrier, assignment."""
    why: str


class FaultDetected(Event, frozen=True, tag="fault_detected"):
    """Something was seen. A cycle may have several: a first and its cascade; the verdict names the cause."""

    kind: FaultKind
    node: str
    detector: str
    """What saw it: ``child`` (exit status), ``heartbeat`` (any deadline of a rank), ``stream`` (connection),
    ``start``.
    """
    rank: int | None = None
    exit: int | None = None
    signal: str | None = None
    """Name such as ``SIGKILL``."""
    detail: str = ""
    """One sentence of evidence."""


class HangEvidence(Event, frozen=True, tag="hang_evidence"):
    """What a hung rank was doing before it was killed; the whole is in ``file``."""

    node: str
    rank: int
    pid: int
    heartbeats: int
    silent_s: float
    """Since its last sign of life."""
    sections: dict[str, float]
    """The open ones, and for how many seconds they had been."""
    process_state: str
    """Letter as in ps(1): R runs, S sleeps, D is stuck in the kernel, T was stopped."""
    seconds: float
    """How long it took to find this out."""
    file: str
    """In the run directory."""
    wchan: str = ""
    source: str = ""
    """Who wrote the stacks: ``py-spy``, ``faulthandler``; empty: there are none, and ``note`` says why."""
    stacks: str = ""
    """Their beginning."""
    note: str = ""


class TracesKept(Event, frozen=True, tag="traces_kept"):
    """A node's Flight Recorders when a hang was declared, fetched before anything was killed."""

    node: str
    ranks: list[int]
    """Those in ``folder``, as ``rank_R`` with a manifest beside it."""
    folder: str
    """In the run directory."""
    seconds: float
    missing: dict[int, str] = {}
    """Ranks without one, and why."""


class StopRequested(Event, frozen=True, tag="stop_requested"):
    """The job was asked from outside to stop, by signal or because its time is nearly over."""

    @property
    def by(self) -> str:
        """Return what asked, in words."""
        return self.signal or self.why

    signal: str
    """Empty: it was no signal, and ``why`` says what."""
    why: str = ""
    """What asked for it, such as ``the time limit, 120 s away``."""
    preempted: bool = False
    """Slurm takes the nodes for another job."""


class ControlRequested(Event, frozen=True, tag="control_requested"):
    """A rank asked for something with ``send_workload_control_request``; it is done at once."""

    action: str
    """``ExcludeThisNode`` or ``ShutdownWorkload``."""
    node: str
    rank: int
    why: str
    """The rank's own description."""


class WorkersStopped(Event, frozen=True, tag="workers_stopped"):
    """No process of the cycle is left on any node that still answers."""

    nodes: int
    seconds: float
    """From the decision to stop until the last node had stopped."""
    stalled_s: float | None = None
    """When the stop began: since the last heartbeat of any rank that can still tell. None without heartbeats.
    Training had stood still for that long before the fault was seen, less one step at most."""


class GpuMemoryLeft(Event, frozen=True, tag="gpu_memory_left"):
    """The next cycle starts although a GPU's memory is still in use: the time to wait for it is over."""

    node: str
    gpu: str
    used_mb: float
    waited_s: float
    processes: list[str] = []
    """Those that hold it, as people read them; empty: the driver names none."""


class Verdict(Event, frozen=True, tag="verdict"):
    """What follows from the cycle's faults, by which rule, and who is held to be the cause."""

    action: VerdictAction
    rule: str
    why: str
    node: str | None = None
    rank: int | None = None
    kind: FaultKind | None = None


class CycleScored(Event, frozen=True, tag="cycle_scored"):
    """Whether the cycle took training further than every earlier one of the job."""

    progressed: bool | None
    """None: that can't be told, because nobody says a step."""
    in_a_row: int
    """Cycles without progress up to this one, over requeues."""
    step: int | None = None
    """The highest that counts, of all cycles."""
    checkpoints: bool = False
    """It is the highest step of a checkpoint; else of a heartbeat."""
    early_end: str = ""
    """How a cycle ended that never came to a step; the same again and again counts as no progress."""


class Implicated(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rank, GPU or node that is held to be the cause of a cycle's end."""

    kind: str
    """``rank``, ``gpu``, ``node``."""
    id: str
    confidence: float
    """0 to 1."""
    node: str | None = None
    rank: int | None = None
    why: str = ""
    by_traces: bool = False
    """Flight Recorder traces show it."""


class CycleAttributed(Event, frozen=True, tag="cycle_attributed"):
    """What logs and traces tell of a cycle that a fault has ended.

    It is found out in the background, often while the next one runs already.
    """

    by: str = "rules"
    """``rules``: nvrx-attribute; ``service``: the one that ``--ft-attribution-endpoint`` names."""
    failed: str = ""
    """Why nothing could be found out; all else is empty then."""
    category: str = ""
    """The first cause's family; ``unknown``: nothing says what failed."""
    says: str = ""
    """The same in words."""
    action: str = ""
    """What the policy would do: ``restart``, ``restart_exclude``, ``hold``, ``wait``, ``stop``."""
    rule: str = ""
    why: str = ""
    confidence: float = 0.0
    """0 to 1."""
    where: str = ""
    """File and line of the first cause; the file in the run directory."""
    excerpt: str = ""
    """That line."""
    culprits: list[Implicated] = []
    """The surest first."""
    exclude: list[str] = []
    """Nodes that evidence implicates which no program can print."""
    file: str = ""
    """The whole document, in the run directory."""
    seconds: float = 0.0
    """How long it took."""
    delay_s: float = 0.0
    """How long the policy would wait before the restart."""


class RestartDelayed(Event, frozen=True, tag="restart_delayed"):
    """The next cycle waits: the policy of attribution says so, and may act."""

    seconds: float
    rule: str
    why: str


class JobEnded(Event, frozen=True, tag="job_ended"):
    code: int
    why: str


class Requeued(Event, frozen=True, tag="requeued"):
    """Slurm will start the job again; nodes that it excludes now, earlier ones included."""

    excluded: list[str]
    start_in_s: int
    warnings: list[str] = []
    held: str = ""
    """Why Slurm holds the job until somebody releases it; empty: it does not."""


class NotRequeued(Event, frozen=True, tag="not_requeued"):
    """The job should be started again, but this could not be arranged."""

    why: str


class CoordinatorLost(Event, frozen=True, tag="coordinator_lost"):
    """The host of the Coordinator fell silent, and another node of the job has taken charge."""

    host: str
    successor: str
    """The node that has taken charge; the events from here on are written there."""
    fence: str
    """Its ``job.restart.attempt``."""
    silent_s: float
    """For how long that node had seen no sign of life."""


class ExitDeferred(Event, frozen=True, tag="exit_deferred"):
    """The job has ended while its batch script was gone with its host: it is requeued, but only so that Slurm
    learns the exit code."""

    code: int


class ExitReported(Event, frozen=True, tag="exit_reported"):
    """The nvrx-srun that was started for that exits with the code."""

    code: int


AnyEvent = (
    JobStarted
    | NodeJoined
    | HealthChecked
    | HealthDisbelieved
    | NodeLost
    | NodesAwaited
    | NodeGivenUp
    | TopologyIgnored
    | NodeExcluded
    | NodeSuspected
    | CycleStarted
    | WorkersStarted
    | RankReady
    | FirstStep
    | Progress
    | TimeoutsCalculated
    | CheckpointSaved
    | CheckpointLoaded
    | CheckpointHeldUp
    | InprocessRestart
    | StragglerReport
    | RankScores
    | JobSlowed
    | StragglerKept
    | FaultDetected
    | HangEvidence
    | TracesKept
    | StopRequested
    | ControlRequested
    | WorkersStopped
    | CycleScored
    | CycleAttributed
    | GpuMemoryLeft
    | Verdict
    | JobEnded
    | RestartDelayed
    | Requeued
    | NotRequeued
    | CoordinatorLost
    | ExitDeferred
    | ExitReported
)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One journal line: the envelope and its event."""

    ts: float
    """Unix seconds; never decreases within one writer."""
    job: str
    attempt: int
    """How often Slurm has requeued the job before."""
    cycle: int
    """Attempt of the worker group; counts on over requeues. The coming cycle while none runs."""
    event: AnyEvent

    def to_line(self) -> bytes:
        """Return the line, newline included."""
        line: dict[str, Any] = {
            "v": JOURNAL_VERSION,
            "ts": self.ts,
            "job": self.job,
            "attempt": self.attempt,
            "cycle": self.cycle,
        }
        line.update(msgspec.to_builtins(self.event))
        return msgspec.json.encode(line) + b"\n"
