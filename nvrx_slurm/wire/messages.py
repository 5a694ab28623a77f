"""Messages between Coordinator and agent, encoded as MessagePack arrays.

Decoding checks every type, so what arrives is well-formed or is refused. Nothing in a message names a path:
a peer can't choose where the other writes.
"""

from __future__ import annotations

import enum

import msgspec

from nvrx_slurm.pace import StragglerVerdict
from nvrx_slurm.pace.exchange import NodePeriod, Scores
from nvrx_slurm.wire.node_options import NodeOptions
from nvrx_slurm.wire.rank_channel import CheckpointEvent, InProcessRestart, WorkloadAction
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Base of all messages."""


# --- both ways, inside other messages -----------------------------------------------------------------


class ProgramKind(str, enum.Enum):
    """How torchrun's options of the same names would start it."""

    SCRIPT = "script"
    """A Python file."""
    MODULE = "module"
    """``python -m``."""
    EXECUTABLE = "executable"
    """Anything that can be executed (``--no-python``); always started afresh."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank runs."""

    kind: ProgramKind
    target: str
    """Path of the script or executable, or name of the module."""
    args: list[str]
    cwd: str


class RankSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent can tell about one of its ranks without asking the rank."""

    rank: int
    heartbeats: int
    """Since the start of the cycle."""
    age_s: float
    """Since its last heartbeat or section or, before the first, since monitoring began."""
    process_state: str
    """Letter of ``/proc/<pid>/stat`` (proc(5)); empty when the process is gone."""
    monitored: bool


class GpuMemoryLeft(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU whose memory was still in use when the wait for it was over."""

    gpu: str
    used_mb: float
    waited_s: float
    processes: list[str]
    """Those that held it, as people read them."""


class NodeLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node is, and with whom; empty: not known."""

    topology_addr: str = ""
    """``SLURM_TOPOLOGY_ADDR``: switches or blocks from the root down, and the node."""
    topology_pattern: str = ""
    """``SLURM_TOPOLOGY_ADDR_PATTERN``: what each part of the address is."""
    domain: str = ""
    """The NVLink domain of the node's GPUs."""
    group: str = ""
    """``NVRX_REPLACEMENT_GROUP_ID``: nodes that are only used together."""


UNKNOWN_LOCATION = NodeLocation()


# --- agent to Coordinator ----------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a stream."""

    version: int
    node: str
    fence: str
    """``job.restart.attempt``; an agent of an older one is refused."""


class HealthFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a check of the node warns of, or holds to be broken."""

    check: str
    scope: str
    """``node``, or a part of it: ``gpu 3``."""
    failed: bool
    """False: a warning."""
    evidence: str
    remedy: str = ""
    node_lost: bool = False
    """No rank of the node can go on."""


class NodeHealth(Message, frozen=True):
    """What the node's checks say, sent when it is something else than the last time."""

    findings: list[HealthFinding]
    """Empty: nothing to complain about."""
    seconds: float
    """How long the checks took."""


class Joined(Message, frozen=True):
    """Answer to :class:`Welcome`: the node can be used."""

    slots: int
    """Ranks that this node runs."""
    place: int | None = None
    """Where the node wants to stand among nodes that are not known beforehand; the lowest is preferred."""
    location: NodeLocation = UNKNOWN_LOCATION
    health: NodeHealth | None = None
    """The first verdict; None: the checks are not done yet, or are switched off."""


class WorkersStarted(Message, frozen=True):
    cycle: int
    ranks: list[int]
    pids: list[int]
    warm: bool
    why_cold: str


class StartFailed(Message, frozen=True):
    cycle: int
    why: str


class RankExited(Message, frozen=True):
    cycle: int
    rank: int
    exit: int
    """Exit code; negative: minus the signal's number."""
    after_stop: bool
    """The agent had already begun to stop the cycle: a consequence, not a fault."""
    detail: str = ""
    oom: str = ""
    """What says that memory had run out; empty: nothing does."""


class RankStalled(Message, frozen=True):
    """A deadline has passed."""

    cycle: int
    rank: int
    timeout_s: float
    snapshots: list[RankSnapshot]
    """All ranks of the node."""
    why: str = ""
    """Which deadlines, as one clause."""


class Snapshots(Message, frozen=True):
    """Answer to :class:`Probe`."""

    cycle: int
    snapshots: list[RankSnapshot]


class RanksReady(Message, frozen=True):
    """All ranks of this node have begun monitoring."""

    cycle: int


class RanksStepping(Message, frozen=True):
    """All ranks of this node have sent their first heartbeat."""

    cycle: int
    step: int | None


class StepReached(Message, frozen=True):
    """The lowest step among the node's ranks that report one."""

    cycle: int
    step: int


class CheckpointReport(Message, frozen=True):
    cycle: int
    rank: int
    what: CheckpointEvent
    step: int
    layer: str
    why: str = ""


class StragglerReport(Message, frozen=True):
    """A rank of this node says that one of the job's is slow."""

    cycle: int
    rank: int
    verdict: StragglerVerdict


class InProcessRestarted(Message, frozen=True):
    """All ranks have called their function again, in their processes; told by one of this node."""

    cycle: int
    restart: InProcessRestart


class RankGivenUp(Message, frozen=True):
    """A rank of this node hangs, and the supervisor of its in-process restart kills it."""

    cycle: int
    rank: int
    why: str


class NodePace(Message, frozen=True):
    """How long the ranks of this node took, as many as told it at about the same time."""

    cycle: int
    period: NodePeriod


class ControlRequest(Message, frozen=True):
    """A rank wants its node out of the job, or the job to end."""

    cycle: int
    rank: int
    action: WorkloadAction
    why: str


class HangEvidence(Message, frozen=True):
    """What a hung rank was doing when it was about to be killed."""

    cycle: int
    rank: int
    pid: int
    heartbeats: int
    silent_s: float
    """Since its last sign of life."""
    sections: dict[str, float]
    """The open ones, and for how many seconds they have been."""
    process_state: str
    wchan: str
    kernel_stack: str
    source: str
    """Who wrote the stacks; empty: nobody."""
    stacks: str
    note: str
    seconds: float
    """How long it took to find all this out."""


class TracesKept(Message, frozen=True):
    """The Flight Recorders of the node's ranks when a hang was declared are in the run directory."""

    cycle: int
    ranks: list[int]
    missing: dict[int, str]
    """Ranks without one, and why."""
    seconds: float
    """How long it took to fetch them, before anything was killed."""


class TimeoutsCalculated(Message, frozen=True):
    """A rank enforces these from now on, and later cycles should begin with them."""

    cycle: int
    heartbeat: HeartbeatTimeouts
    section: SectionTimeouts


class WorkersGone(Message, frozen=True):
    """No process of the cycle is left on this node."""

    cycle: int
    stalled_s: float | None = None
    """When the stop began: since the last heartbeat of any rank of the node; None if there was none."""
    gpus_left: list[GpuMemoryLeft] = []


class Leaving(Message, frozen=True):
    """The agent goes, and says why; its ranks are being stopped."""

    why: str
    by_signal: bool
    """Somebody asked it to go: Slurm, when the job is cancelled or its time is over."""


AgentMessage = (
    Hello
    | Joined
    | NodeHealth
    | WorkersStarted
    | StartFailed
    | RankExited
    | RankStalled
    | Snapshots
    | RanksReady
    | RanksStepping
    | StepReached
    | CheckpointReport
    | StragglerReport
    | InProcessRestarted
    | RankGivenUp
    | NodePace
    | ControlRequest
    | HangEvidence
    | TracesKept
    | TimeoutsCalculated
    | WorkersGone
    | Leaving
)


# --- Coordinator to agent ----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to :class:`Hello`: everything that stays the same over the cycles."""

    program: Program
    job_id: str
    run_dir: str
    nproc_per_node: str
    """As given by the user: a number, ``auto``, ``gpu`` or ``cpu``."""
    warm_start: bool
    max_restarts: int
    stop_timeout_s: float
    """SIGTERM to SIGKILL."""
    role: str = "default"
    """torchrun's name for all ranks."""
    virtual_local_rank: bool = False
    """Each rank sees one GPU, as device 0, and is local rank 0."""
    node: NodeOptions = NodeOptions()
    segment: int = 1
    """So many nodes of the group must be of one NVLink domain; above 1, agents tell theirs."""
    cycle_info: str = ""
    """Where ranks find what is known of their cycle; empty: nowhere."""


class Refused(Message, frozen=True):
    """The agent must exit; nothing that it does counts."""

    why: str


class StartWorkers(Message, frozen=True):
    cycle: int
    group_rank: int
    group_world_size: int
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    monitoring: Monitoring


class StopWorkers(Message, frozen=True):
    cycle: int
    hung: list[int]
    """Ranks to kill at once: they would not hear SIGTERM."""
    signal: int = 15
    """What the others get first."""
    grace_s: float | None = None
    """That signal to SIGKILL; None: as :class:`Welcome` said."""
    look_s: float = 0.0
    """How long :class:`WorkersGone` may wait for a fresh verdict on the node's health."""


class Probe(Message, frozen=True):
    """Send :class:`Snapshots` at once."""

    cycle: int


class AskToStop(Message, frozen=True):
    """Raise ``RankMonitorClient.should_stop`` on every rank."""

    cycle: int


class PaceScores(Message, frozen=True):
    """How the ranks stood in the last report, for some ranks of this node."""

    cycle: int
    to: list[int]
    scores: Scores


class Shutdown(Message, frozen=True):
    """Stop the workers, send what is left of their output, and exit 0."""

    code: int = 0
    """The job's exit code."""


CoordinatorMessage = (
    Welcome | Refused | StartWorkers | StopWorkers | Probe | AskToStop | PaceScores | Shutdown
)


# --- agent to Coordinator, on the stream of logs ------------------------------------------------------


class LogHello(Message, frozen=True):
    node: str


class LogChunk(Message, frozen=True):
    """Raw output of one rank; a chunk ends anywhere."""

    cycle: int
    rank: int
    ts: float
    """Unix seconds on the node when the bytes were read."""
    data: bytes


class LogEnd(Message, frozen=True):
    """The rank's output is complete: every process that held its pipe is gone."""

    cycle: int
    rank: int


LogMessage = LogHello | LogChunk | LogEnd
