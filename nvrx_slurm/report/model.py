"""What a report says, as values: built by :func:`nvrx_slurm.report.build_report`, read by the renderers.

Times are Unix seconds on the journal's clock (``*_at``), durations are seconds (``*_s``). ``None`` means that
the journal does not tell.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from nvrx_slurm.journal import FaultKind, VerdictAction


class JobState(str, enum.Enum):
    """Where the job stands, as far as its journal tells."""

    EMPTY = "empty"
    """The journal holds no event."""
    RUNNING = "running"
    FINISHED = "finished"
    """Ended with code 0."""
    FAILED = "failed"
    """Ended with another code, not because somebody asked it to stop."""
    STOPPED = "stopped"
    """Ended after it was asked to stop."""
    REQUEUE = "requeue"
    """Ended with code 75, which asks for a requeue, and nothing says that there is none; no later attempt has
    begun."""
    NO_END = "no_end"
    """No end is recorded and nothing was written for a while: it trains silently, or nobody is in charge."""


class Phase(str, enum.Enum):
    """What the job's wall time goes to; at every moment exactly one."""

    STARTING = "starting"
    """No step yet, and no fault is the reason."""
    TRAINING = "training"
    """Steps that no earlier cycle had reached."""
    REDOING = "redoing"
    """Steps that an earlier cycle had done and a restart took back."""
    RECOVERING = "recovering"
    """From a fault, or from when training stood still because of it, to the first step after it."""
    STOPPING = "stopping"
    """From the last cycle's end, or the request to stop, to the end of the attempt."""
    QUEUED = "queued"
    """Between two attempts."""


class CycleEnd(str, enum.Enum):
    """Why a cycle is over."""

    RUNNING = "running"
    """It is not."""
    FAULT = "fault"
    FINISHED = "finished"
    STOPPED = "stopped"
    """The job was asked to stop, or ended without a fault in this cycle."""
    CUT_OFF = "cut_off"
    """Something else followed and no end is recorded: the Coordinator was lost."""


class RecoveryEnd(str, enum.Enum):
    """What became of the time after a cycle."""

    RESUMED = "resumed"
    """A later cycle reached its first step."""
    FAILED_AGAIN = "failed_again"
    """The next cycle failed before its first step; what follows is counted there."""
    ONGOING = "ongoing"
    ENDED = "ended"
    """The job ended first."""


class ResumeSource(str, enum.Enum):
    """How the step that a cycle resumed from is known."""

    CHECKPOINT = "checkpoint"
    """``checkpoint_loaded``."""
    FIRST_STEP = "first_step"
    """The step before the one that ``first_step`` tells."""
    START = "start"
    """The cycle trained and neither of these was recorded: step 0."""


class MomentKind(str, enum.Enum):
    """What a line of the timeline is about."""

    JOB_STARTED = "job_started"
    COORDINATOR_LOST = "coordinator_lost"
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    NODES_AWAITED = "nodes_awaited"
    NODE_GIVEN_UP = "node_given_up"
    NODE_EXCLUDED = "node_excluded"
    NODE_SUSPECTED = "node_suspected"
    TOPOLOGY_IGNORED = "topology_ignored"
    HEALTH = "health_checked"
    CYCLE_STARTED = "cycle_started"
    COLD_START = "cold_start"
    TRACES_KEPT = "traces_kept"
    GPU_MEMORY_LEFT = "gpu_memory_left"
    FIRST_STEP = "first_step"
    CHECKPOINT_LOADED = "checkpoint_loaded"
    STRAGGLER = "straggler_report"
    INPROCESS_RESTART = "inprocess_restart"
    FAULT = "fault"
    CASCADE = "cascade"
    WORKERS_STOPPED = "workers_stopped"
    HANG_EVIDENCE = "hang_evidence"
    VERDICT = "verdict"
    ATTRIBUTED = "attributed"
    TIMEOUTS = "timeouts_calculated"
    STOP_REQUESTED = "stop_requested"
    CONTROL_REQUESTED = "control_requested"
    NO_PROGRESS = "no_progress"
    JOB_ENDED = "job_ended"
    RESTART_DELAYED = "restart_delayed"
    REQUEUED = "requeued"
    NOT_REQUEUED = "not_requeued"
    EXIT_DEFERRED = "exit_deferred"
    EXIT_REPORTED = "exit_reported"
    NO_END = "no_end"


@dataclass(frozen=True)
class SeenFault:
    """One ``fault_detected``."""

    at: float
    kind: FaultKind
    node: str
    detector: str
    rank: int | None = None
    exit: int | None = None
    signal: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Cause:
    """Who is held to have ended a cycle: the verdict's culprit, else what was seen first."""

    node: str | None
    rank: int | None
    kind: FaultKind | None
    exit: int | None = None
    signal: str | None = None
    detector: str | None = None
    """What saw it; None when the verdict names something that no detector saw."""
    detail: str = ""
    from_verdict: bool = False


@dataclass(frozen=True)
class HangFound:
    """One ``hang_evidence``: what a hung rank was doing before it was killed."""

    node: str
    rank: int
    silent_s: float
    """Since its last sign of life."""
    sections: tuple[tuple[str, float], ...]
    """The open ones, and for how many seconds they had been."""
    process_state: str
    """Letter as in ps(1)."""
    wchan: str
    frame: str | None
    """Where its main thread was, innermost; None when no stack tells."""
    file: str
    """The whole evidence, in the run directory."""
    note: str
    """Why there are no stacks, or worse ones than could be."""


@dataclass(frozen=True)
class RequeueTaken:
    """One ``requeued``."""

    at: float
    excluded: tuple[str, ...]
    start_in_s: int
    warnings: tuple[str, ...]
    held: str
    """Why it waits until somebody releases it; empty: it does not."""


@dataclass(frozen=True)
class VerdictTaken:
    """One ``verdict``."""

    at: float
    action: VerdictAction
    rule: str
    why: str


@dataclass(frozen=True)
class Culprit:
    """One rank, GPU or node that attribution holds to be the cause."""

    kind: str
    id: str
    confidence: float
    node: str | None
    rank: int | None
    why: str


@dataclass(frozen=True)
class Attributed:
    """What logs and traces tell of the end of a cycle: one ``cycle_attributed``."""

    category: str
    says: str
    action: str
    rule: str
    why: str
    confidence: float
    where: str
    culprits: tuple[Culprit, ...]
    exclude: tuple[str, ...]
    file: str


@dataclass(frozen=True)
class Recovery:
    """The time from when a cycle's training stood still to the first step after it, cut into phases.

    The phases that are known add up to ``lost_s``, except that a recovery which was cut short has the rest in
    none of them.
    """

    end: RecoveryEnd
    lost_s: float
    detect_s: float | None
    """From the last heartbeat of any rank until the fault was seen; None when that is not known."""
    stop_s: float | None
    """Until no process of the cycle was left."""
    queue_s: float | None
    """Between two attempts of the job; None within one attempt."""
    form_s: float | None
    """Until the next cycle had its nodes."""
    ready_s: float | None
    """Until all its ranks had begun monitoring."""
    first_step_s: float | None
    """Until all its ranks had made a step."""
    steps_lost: int | None
    """Last step known of the cycle, less the step that the next one resumed from."""


@dataclass(frozen=True)
class CycleReport:
    """One attempt of the whole worker group."""

    number: int
    attempt: int
    started_at: float | None
    """None when only its end is recorded."""
    ready_at: float | None
    first_step_at: float | None
    ended_at: float | None
    """First fault, request to stop or end of the job; None while it runs."""
    end: CycleEnd
    world_size: int | None
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    cold: tuple[tuple[str, str], ...]
    """Nodes that could not start their ranks warm, and why."""
    stop_signal: str | None
    """The signal that asked the job to stop, where that ended the cycle."""
    cause: Cause | None
    cascade: tuple[SeenFault, ...]
    """Everything else that was seen to fail."""
    evidence: tuple[HangFound, ...]
    """What its hung ranks were doing."""
    verdict: VerdictTaken | None
    attributed: Attributed | None
    """None: nothing was found out, or not yet."""
    resumed_from: int | None
    resumed_by: ResumeSource | None
    last_step: int | None
    """Last step that the cycle is known to have done."""
    saved: Mapping[str, int]
    """Newest checkpoint that was saved in it, by layer."""
    trained_s: float
    """New steps only."""
    redone_s: float
    recovery: Recovery | None
    """None while it runs, when it was the last and not ended by a fault, and when it finished."""


@dataclass(frozen=True)
class AttemptReport:
    """One life of the Coordinator: the job's first start, a requeue, or a further start in the allocation."""

    number: int
    """How often Slurm had requeued the job before."""
    started_at: float
    ended_at: float | None
    """``job_ended``."""
    last_event_at: float
    code: int | None
    why: str
    stop_signal: str | None
    """The signal by which the job was asked to stop."""
    queue_s: float | None
    """Since the attempt before ended, or wrote its last event; None for the first."""
    host: str
    nodes: tuple[str, ...]
    max_restarts: int | None
    restarts: int
    """Verdicts to restart."""
    requeued: RequeueTaken | None
    not_requeued: str | None
    """Why the job could not be requeued, where it should have been."""


@dataclass(frozen=True)
class NodeOut:
    """A node that was lost or excluded."""

    node: str
    at: float
    why: str
    cycle: int
    back_at: float | None = None
    """When it joined again."""


@dataclass(frozen=True)
class Span:
    """A piece of wall time; spans follow each other without gaps."""

    phase: Phase
    start: float
    end: float
    cycle: int | None
    """Index in :attr:`JobReport.cycles` of the cycle that trains; None while none does."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class TimeShare:
    """Where the wall time went. The shares of all phases add up to 1."""

    wall_s: float
    seconds: dict[Phase, float]
    redone_known: bool
    """False: some cycle may have repeated steps, and the journal does not tell how long that took."""

    def share(self, phase: Phase) -> float:
        """Return the phase's part of the wall time, 0 to 1."""
        return self.seconds[phase] / self.wall_s


@dataclass(frozen=True)
class Moment:
    """One line of the timeline."""

    at: float
    kind: MomentKind
    cycle: int
    text: str


@dataclass(frozen=True)
class ReadState:
    """What reading the journal met besides events."""

    torn: int = 0
    """Lines that are not whole; skipped."""
    unfinished: bool = False
    """The last line has no end: it is being written, or a crash tore it."""
    fenced: int = 0
    """Events of an older attempt after a newer one had begun; skipped."""
    unknown: int = 0
    """Events of a newer version; skipped."""


@dataclass(frozen=True)
class JobReport:
    """Everything that a report shows."""

    job: str
    state: JobState
    activity: Phase | None
    """What the job does now; None unless it is running."""
    now: float
    """When the report was made."""
    started_at: float | None = None
    until: float | None = None
    """End of the time that the report covers: the job's end, now, or its last event when no end is known."""
    last_event_at: float | None = None
    code: int | None = None
    why: str = ""
    version: str = ""
    argv: tuple[str, ...] = ()
    attempts: tuple[AttemptReport, ...] = ()
    cycles: tuple[CycleReport, ...] = ()
    lost: tuple[NodeOut, ...] = ()
    excluded: tuple[NodeOut, ...] = ()
    spans: tuple[Span, ...] = ()
    time: TimeShare | None = None
    """None when no time has passed."""
    timeline: tuple[Moment, ...] = ()
    last_step: int | None = None
    """Highest step that any cycle is known to have done."""
    in_slurm: bool | None = None
    """Whether Slurm still has the job; None when it was not asked or could not be."""
    read: ReadState = field(default_factory=ReadState)

    @property
    def faults(self) -> tuple[CycleReport, ...]:
        """The cycles that a fault ended."""
        return tuple(cycle for cycle in self.cycles if cycle.end is CycleEnd.FAULT)

    @property
    def recovered(self) -> tuple[CycleReport, ...]:
        """The faults after which training ran again before anything else failed."""
        return tuple(
            cycle
            for cycle in self.faults
            if cycle.recovery is not None and cycle.recovery.end is RecoveryEnd.RESUMED
        )

    @property
    def median_lost_s(self) -> float | None:
        """Median over :attr:`recovered`; None when it is empty."""
        lost = [cycle.recovery.lost_s for cycle in self.recovered if cycle.recovery is not None]
        return median(lost) if lost else None
