"""What the state machine takes and gives: plain values."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from nvrx_slurm.coordinator.unhealthy import Complaint
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.pace import StragglerVerdict
from nvrx_slurm.wire.messages import UNKNOWN_LOCATION, NodeLocation, RankSnapshot
from nvrx_slurm.wire.rank_channel import WorkloadAction


class Timer(enum.Enum):
    """Time-outs that the machine asks its caller to keep."""

    JOIN = "join"
    FORM_GRACE = "form_grace"
    STOP = "stop"
    PROBE = "probe"
    CONSULT = "consult"
    REJOIN = "rejoin"
    DELAY = "delay"
    VERDICT = "verdict"


# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NodeJoined:
    node: str
    slots: int
    place: int | None = None
    """Where it wants to stand; see :meth:`Membership.admit`."""
    location: NodeLocation = UNKNOWN_LOCATION


@dataclass(frozen=True)
class NodeHealth:
    """What the node's own checks say now. The machine hears the first verdict before :class:`NodeJoined`."""

    node: str
    complaint: Complaint | None
    """None: nothing, or nothing any more."""


@dataclass(frozen=True)
class NodeUnusable:
    """The node's agent came and said that it can't take part."""

    node: str
    why: str


@dataclass(frozen=True)
class NodeLeaving:
    """The node's agent has begun to stop its ranks of its own accord; it is lost when its stream ends."""

    node: str
    why: str
    by_signal: bool
    """It was asked to go, as Slurm does when it ends the job."""


@dataclass(frozen=True)
class NodeLost:
    node: str
    why: str
    by_signal: bool = False
    """Its agent was asked to go, as Slurm does when it ends the job."""


@dataclass(frozen=True)
class NodeStaysAway:
    """Answer to :class:`Recall`: no new agent will come from there."""

    node: str
    why: str


@dataclass(frozen=True)
class SlurmAnswered:
    """Answer to :class:`ConsultSlurm`."""

    job_state: str | None
    """Slurm's name of the job's state; None: Slurm could not be asked."""
    preempted: bool = False
    """It takes the nodes for another job."""


@dataclass(frozen=True)
class StartFailed:
    node: str
    cycle: int
    why: str


@dataclass(frozen=True)
class RankExited:
    node: str
    cycle: int
    rank: int
    exit: int
    """Negative: minus the signal's number."""
    after_stop: bool
    detail: str = ""
    oom: str = ""
    """What says that memory had run out; empty: nothing does."""


@dataclass(frozen=True)
class RankStalled:
    node: str
    cycle: int
    rank: int
    timeout_s: float
    snapshots: tuple[RankSnapshot, ...]
    why: str = ""
    """Which deadlines have passed, as one clause."""


@dataclass(frozen=True)
class SnapshotsTaken:
    node: str
    cycle: int
    snapshots: tuple[RankSnapshot, ...]


@dataclass(frozen=True)
class NodeReady:
    node: str
    cycle: int


@dataclass(frozen=True)
class NodeStepping:
    node: str
    cycle: int
    step: int | None


@dataclass(frozen=True)
class StepReached:
    """A heartbeat of one of the node's ranks told a higher step than the last that was told here."""

    node: str
    cycle: int
    step: int


@dataclass(frozen=True)
class CheckpointSaved:
    """A rank has reported a checkpoint."""

    node: str
    cycle: int
    step: int


@dataclass(frozen=True)
class CheckpointLoaded:
    """A rank has reported from which step on it trains."""

    node: str
    cycle: int
    step: int


@dataclass(frozen=True)
class RanksJudged:
    """The times of all ranks have been compared once more."""

    cycle: int
    verdicts: tuple[StragglerVerdict, ...]
    """Who is slow for good."""


@dataclass(frozen=True)
class IterationRead:
    """Answer to :class:`ReadIteration`, whenever it comes."""

    cycle: int | None
    step: int | None
    """None: the file is not there, can't be read in time, or holds no number."""


@dataclass(frozen=True)
class ControlRequested:
    """A rank wants its node out of the job, or the job to end."""

    node: str
    cycle: int
    rank: int
    action: WorkloadAction
    why: str


@dataclass(frozen=True)
class RankGivenUp:
    """A rank hangs, and the supervisor of its in-process restart kills it."""

    node: str
    cycle: int
    rank: int
    why: str


@dataclass(frozen=True)
class RestartedInProcess:
    """All ranks have called their function again in their processes."""

    node: str
    cycle: int
    faulty: tuple[int, ...]
    """Ranks that had a fault."""
    why: str


@dataclass(frozen=True)
class NodeStopped:
    node: str
    cycle: int
    stalled_s: float | None = None
    """When it began to stop: since the last heartbeat of any of its ranks."""


@dataclass(frozen=True)
class StoreLost:
    """The ranks' rendezvous store died."""

    host: str
    why: str


@dataclass(frozen=True)
class StepEnded:
    """``srun`` is gone: nobody joins any more."""

    why: str


@dataclass(frozen=True)
class StopRequested:
    """A signal asks the job to end now."""

    signal: signal.Signals


@dataclass(frozen=True)
class DrainRequested:
    """A signal, or what ``why`` names, asks the ranks to save and end soon."""

    signal: signal.Signals | None = None
    why: str = ""


@dataclass(frozen=True)
class CycleAttributed:
    """Logs and traces of an ended cycle have been looked at; a later one may run already."""

    cycle: int
    useless: bool = False
    """Another try would end the same."""
    hold: bool = False
    """It would until somebody has made room."""
    delay_s: float = 0.0
    """How long a further restart should wait."""
    rule: str = ""
    why: str = ""
    exclude: tuple[str, ...] = ()
    """Nodes that evidence implicates which no program can print."""
    hung: str | None = None
    """The node of the rank that all others wait for, as traces show."""


@dataclass(frozen=True)
class TimerFired:
    timer: Timer


Event = (
    NodeJoined
    | NodeHealth
    | NodeUnusable
    | NodeLeaving
    | NodeLost
    | NodeStaysAway
    | SlurmAnswered
    | StartFailed
    | RankExited
    | RankStalled
    | SnapshotsTaken
    | NodeReady
    | NodeStepping
    | StepReached
    | CheckpointSaved
    | CheckpointLoaded
    | ControlRequested
    | RankGivenUp
    | RestartedInProcess
    | NodeStopped
    | IterationRead
    | RanksJudged
    | StoreLost
    | StepEnded
    | CycleAttributed
    | StopRequested
    | DrainRequested
    | TimerFired
)

# --- commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Write:
    """Append to the journal."""

    event: AnyEvent
    cycle: int


@dataclass(frozen=True)
class StartCycle:
    """Start workers; position in ``nodes`` is the group rank."""

    cycle: int
    nodes: tuple[str, ...]
    slots: int


@dataclass(frozen=True)
class StopCycle:
    cycle: int
    nodes: tuple[str, ...]
    hung: tuple[int, ...] = ()
    """Ranks that would not hear SIGTERM."""
    signal: signal.Signals = signal.SIGTERM
    grace_s: float | None = None
    """From that signal to SIGKILL, if it is not what nodes know already."""
    look_s: float = 0.0
    """How long nodes may take to look at their health before they say that they have stopped."""


@dataclass(frozen=True)
class ProbeNodes:
    cycle: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class AskRanksToStop:
    cycle: int
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class ReadIteration:
    """Read the checkpoint-iteration file; ``cycle`` has ended, None: none has yet. Nothing waits for it."""

    cycle: int | None


@dataclass(frozen=True)
class ConsultSlurm:
    """Ask for the job's state, to tell a lost node from a job that is being ended."""


@dataclass(frozen=True)
class Recall:
    """Start a new agent on a node that has lost its own, as soon as the node is there."""

    node: str


@dataclass(frozen=True)
class Disconnect:
    node: str
    why: str


@dataclass(frozen=True)
class Arm:
    timer: Timer
    seconds: float


@dataclass(frozen=True)
class Disarm:
    timer: Timer


@dataclass(frozen=True)
class End:
    code: int
    why: str
    hold: bool = False
    """Slurm is to start the job again only when somebody has released it."""


Command = (
    Write
    | StartCycle
    | StopCycle
    | ProbeNodes
    | AskRanksToStop
    | ReadIteration
    | ConsultSlurm
    | Recall
    | Disconnect
    | Arm
    | Disarm
    | End
)
