"""The job's state machine: events in, commands out; no clock, no I/O.

::

    FORMING ──enough nodes──▶ RUNNING ──fault──▶ STOPPING ──all stopped──▶ FORMING | ENDED
                                 │  ▲                ▲
                        deadline ▼  │                │
                             DIAGNOSING ──culprit────┘

* A *cycle* is one attempt of the whole worker group: one fails, all restart.
* Whatever a message says about another cycle than the current one is ignored.
* The job succeeds only when every rank of one cycle has been seen to exit with 0.
* Survivors keep their group rank; a spare takes the place of a node that is gone.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field

from nvrx_slurm import journal
from nvrx_slurm.coordinator.blame import Blame, find_culprit, find_hung_rank
from nvrx_slurm.coordinator.steps import (
    Arm,
    AskRanksToStop,
    Command,
    ConsultSlurm,
    Disarm,
    Disconnect,
    DrainRequested,
    End,
    Event,
    NodeJoined,
    NodeLost,
    NodeReady,
    NodeStepping,
    NodeStopped,
    NodeUnusable,
    ProbeNodes,
    RankExited,
    RankStalled,
    SlurmAnswered,
    SnapshotsTaken,
    StartCycle,
    StartFailed,
    StepEnded,
    StopCycle,
    StopRequested,
    StoreLost,
    Timer,
    TimerFired,
    Write,
)
from nvrx_slurm.journal import FaultDetected, FaultKind, VerdictAction
from nvrx_slurm.wire.messages import RankSnapshot

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_RESTART_ELSEWHERE = 75


@dataclass(frozen=True)
class Policy:
    """What the user decided."""

    nodes: tuple[str, ...]
    """The allocation in the order in which nodes are preferred as active."""
    active_nodes: int
    max_restarts: int
    first_cycle: int = 0
    join_timeout_s: float = 300.0
    """Too few nodes, some never heard of: how long to wait for those."""
    form_grace_s: float = 2.0
    """Enough nodes at the start: how long to wait for the rest, so that a spare stays one."""
    stop_timeout_s: float = 30.0
    """A node that has not stopped its workers by then leaves the job."""
    probe_timeout_s: float = 1.0
    """How long the search for the hung rank may delay the restart."""
    consult_timeout_s: float = 10.0
    """How long Slurm may take to say whether it is ending the job."""


class Phase(enum.Enum):
    FORMING = "forming"
    RUNNING = "running"
    DIAGNOSING = "diagnosing"
    STOPPING = "stopping"
    CONSULTING = "consulting"
    """Nodes have gone because somebody asked their agents to: Slurm is asked whether it ends the job."""
    ENDED = "ended"


@dataclass
class _Cycle:
    """What is known of the running cycle."""

    finished: set[int] = field(default_factory=set)
    ready: set[str] = field(default_factory=set)
    stepping: set[str] = field(default_factory=set)
    faults: list[FaultDetected] = field(default_factory=list)
    snapshots: dict[str, tuple[RankSnapshot, ...]] = field(default_factory=dict)
    stalled: RankStalled | None = None
    to_probe: set[str] = field(default_factory=set)
    stopping: set[str] = field(default_factory=set)
    stop_began: float = 0.0


class CycleMachine:
    """One job's membership, cycles and budget.

    Feed every event to :meth:`handle` with the caller's clock (seconds, any origin) and carry out the
    commands in order.
    """

    def __init__(self, policy: Policy) -> None:
        if not 0 < policy.active_nodes <= len(policy.nodes):
            raise ValueError(f"active_nodes {policy.active_nodes} is not within 1…{len(policy.nodes)}")
        self.policy = policy
        self.phase = Phase.FORMING
        self.cycle = policy.first_cycle
        self.restarts = 0
        self.active: tuple[str, ...] = ()
        self._group_ranks: dict[str, int] = {}
        self._known = frozenset(policy.nodes)
        self.nodes: dict[str, int] = {}
        """Slots of the nodes whose agents are connected."""
        self.slots = 0
        """Ranks per node, set by the first node that joins."""
        self._never_joined = set(policy.nodes)
        self._banned: dict[str, str] = {}
        self._current = _Cycle()
        self._grace_over = False
        self._ending: End | None = None
        self._draining = False
        self._left_by_signal = False
        self._for_lack_of_nodes: End | None = None
        self._commands: list[Command] = []
        self._now = 0.0

    @property
    def world_size(self) -> int:
        return self.policy.active_nodes * self.slots

    @property
    def spares(self) -> tuple[str, ...]:
        """Connected nodes without ranks, in order of preference."""
        return tuple(
            node for node in self.policy.nodes if node in self.nodes and node not in self._group_ranks
        )

    def start(self) -> list[Command]:
        """Begin to form the first cycle."""
        return [Arm(Timer.JOIN, self.policy.join_timeout_s)]

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event; return what to do, in order."""
        self._commands = []
        self._now = now
        if self.phase is not Phase.ENDED:
            self._dispatch(event)
        return self._commands

    def _dispatch(self, event: Event) -> None:
        match event:
            case NodeJoined():
                self._joined(event)
            case NodeUnusable():
                self._unusable(event)
            case NodeLost():
                self._left_by_signal |= event.by_signal
                self._lost(event.node, event.why)
            case SlurmAnswered():
                self._slurm_answered(event)
            case StepEnded():
                self._step_ended(event)
            case StopRequested():
                self._stop_requested(event)
            case DrainRequested():
                self._drain_requested(event)
            case StoreLost():
                self._fault(
                    FaultDetected(kind=FaultKind.START, node=event.host, detector="store", detail=event.why)
                )
            case TimerFired():
                self._timer_fired(event.timer)
            case _ if event.cycle == self.cycle and event.node in self._group_ranks:
                self._cycle_event(event)

    def _cycle_event(
        self,
        event: StartFailed
        | RankExited
        | RankStalled
        | SnapshotsTaken
        | NodeReady
        | NodeStepping
        | NodeStopped,
    ) -> None:
        match event:
            case StartFailed():
                self._fault(
                    FaultDetected(kind=FaultKind.START, node=event.node, detector="start", detail=event.why)
                )
            case RankExited():
                self._rank_exited(event)
            case RankStalled():
                self._rank_stalled(event)
            case SnapshotsTaken():
                self._snapshots_taken(event)
            case NodeReady():
                self._node_ready(event)
            case NodeStepping():
                self._node_stepping(event)
            case NodeStopped():
                self._node_stopped(event.node)

    def _do(self, *commands: Command) -> None:
        self._commands.extend(commands)

    def _write(self, event: journal.events.AnyEvent) -> None:
        self._do(Write(event, self.cycle))

    # --- membership ----------------------------------------------------------------------------------

    def _joined(self, event: NodeJoined) -> None:
        node = event.node
        if node in self.nodes:
            self._lost(node, "another agent of this node took its place")
            if self.phase is Phase.ENDED:
                return
        if node not in self._known:
            self._do(Disconnect(node, f"{node} is not a node of this job"))
            return
        if node in self._banned:
            self._do(Disconnect(node, self._banned[node]))
            return
        if self.slots and event.slots != self.slots:
            self._never_joined.discard(node)
            self._ban(node, f"offers {event.slots} worker slots where the other nodes offer {self.slots}")
            self._do(Disconnect(node, self._banned[node]))
        else:
            self._never_joined.discard(node)
            self.nodes[node] = self.slots = event.slots
            self._write(journal.NodeJoined(node=node, slots=event.slots))
        if self.phase is Phase.FORMING:
            self._form()

    def _unusable(self, event: NodeUnusable) -> None:
        self._never_joined.discard(event.node)
        self._ban(event.node, event.why)
        if self.phase is Phase.FORMING:
            self._form()

    def _lost(self, node: str, why: str) -> None:
        if node not in self.nodes:
            return
        del self.nodes[node]
        self._write(journal.NodeLost(node=node, why=why))
        was_active = node in self._group_ranks
        match self.phase:
            case Phase.FORMING:
                self._form()
            case Phase.RUNNING | Phase.DIAGNOSING if was_active and not self._all_finished_on(node):
                self._fault(FaultDetected(kind=FaultKind.NODE_LOST, node=node, detector="stream", detail=why))
            case Phase.STOPPING if was_active:
                if node in self._current.stopping and self._ending is None:
                    self._fault(
                        FaultDetected(kind=FaultKind.NODE_LOST, node=node, detector="stream", detail=why)
                    )
                self._node_stopped(node)
            case _:
                pass

    def _ban(self, node: str, reason: str) -> None:
        self._banned[node] = reason
        self._write(journal.NodeExcluded(node=node, reason=reason))

    def _step_ended(self, event: StepEnded) -> None:
        nobody_ever = len(self._never_joined) == len(self.policy.nodes)
        self._never_joined.clear()
        if nobody_ever:
            self._end(EXIT_FAILED, f"no agent ever joined: {event.why}")
        elif self.phase is Phase.FORMING:
            self._form()

    # --- forming -------------------------------------------------------------------------------------

    def _form(self) -> None:
        """Start the next cycle if there are nodes for it; end the job if there never will be."""
        policy = self.policy
        if self._draining:
            self._end(EXIT_RESTART_ELSEWHERE, "asked to stop before a new cycle could begin")
            return
        if len(self.nodes) + len(self._never_joined) < policy.active_nodes:
            self._end_for_lack_of_nodes(End(EXIT_RESTART_ELSEWHERE, self._too_few()))
            return
        if len(self.nodes) < policy.active_nodes:
            return
        if self._never_joined and not self._grace_over and self.restarts == 0:
            self._do(Arm(Timer.FORM_GRACE, policy.form_grace_s))
            return
        self._start_cycle()

    def _too_few(self) -> str:
        left = len(self.nodes)
        return (
            f"too few nodes: training needs {self.policy.active_nodes}, {left} "
            f"{'is' if left == 1 else 'are'} left and there is no spare"
        )

    def _start_cycle(self) -> None:
        self.active = self._choose_active()
        self._group_ranks = {node: group_rank for group_rank, node in enumerate(self.active)}
        self._current = _Cycle()
        self.phase = Phase.RUNNING
        self._do(Disarm(Timer.JOIN), Disarm(Timer.FORM_GRACE))
        self._write(
            journal.CycleStarted(
                world_size=self.world_size, nodes=list(self.active), spares=list(self.spares)
            )
        )
        self._do(StartCycle(self.cycle, self.active, self.slots))

    def _choose_active(self) -> tuple[str, ...]:
        """Survivors keep their place; the first spares fill the gaps."""
        places: list[str | None] = [node if node in self.nodes else None for node in self.active]
        places += [None] * (self.policy.active_nodes - len(places))
        taken = set(places)
        free = iter([node for node in self.policy.nodes if node in self.nodes and node not in taken])
        return tuple(node if node is not None else next(free) for node in places)

    # --- running -------------------------------------------------------------------------------------

    def _node_of(self, rank: int) -> str:
        return self.active[rank // self.slots]

    def _all_finished_on(self, node: str) -> bool:
        first = self._group_ranks[node] * self.slots
        return all(rank in self._current.finished for rank in range(first, first + self.slots))

    def _node_ready(self, event: NodeReady) -> None:
        self._current.ready.add(event.node)
        if len(self._current.ready) == len(self.active):
            self._write(journal.RankReady(ranks=self.world_size))

    def _node_stepping(self, event: NodeStepping) -> None:
        self._current.stepping.add(event.node)
        if len(self._current.stepping) == len(self.active):
            self._write(journal.FirstStep(ranks=self.world_size, step=event.step))

    def _rank_exited(self, event: RankExited) -> None:
        if not 0 <= event.rank < self.world_size or self._node_of(event.rank) != event.node:
            return
        if event.exit != 0:
            if not event.after_stop:
                self._fault(_exit_fault(event))
            return
        self._current.finished.add(event.rank)
        if self.phase in (Phase.RUNNING, Phase.DIAGNOSING) and len(self._current.finished) == self.world_size:
            if self._draining:
                self._end(EXIT_RESTART_ELSEWHERE, "asked to stop; every rank has ended in good order")
            else:
                self._end(EXIT_OK, f"all {self.world_size} ranks exited with 0")

    def _rank_stalled(self, event: RankStalled) -> None:
        if self.phase is not Phase.RUNNING:
            self._snapshots_taken(SnapshotsTaken(event.node, event.cycle, event.snapshots))
            return
        self.phase = Phase.DIAGNOSING
        self._current.stalled = event
        self._current.snapshots[event.node] = event.snapshots
        others = tuple(node for node in self.active if node in self.nodes and node != event.node)
        self._current.to_probe = set(others)
        if others:
            self._do(ProbeNodes(self.cycle, others), Arm(Timer.PROBE, self.policy.probe_timeout_s))
        else:
            self._diagnosed()

    def _snapshots_taken(self, event: SnapshotsTaken) -> None:
        if self.phase is not Phase.DIAGNOSING:
            return
        self._current.snapshots[event.node] = event.snapshots
        self._current.to_probe.discard(event.node)
        if not self._current.to_probe:
            self._diagnosed()

    def _diagnosed(self) -> None:
        stalled = self._current.stalled
        assert stalled is not None
        snapshots = [snapshot for taken in self._current.snapshots.values() for snapshot in taken]
        rank, why = find_hung_rank(snapshots, stalled.rank)
        if not 0 <= rank < self.world_size:
            rank, why = stalled.rank, "its deadline passed first"
        self._fault(
            FaultDetected(
                kind=FaultKind.HANG,
                node=self._node_of(rank),
                rank=rank,
                detector="heartbeat",
                detail=f"no heartbeat for {stalled.timeout_s:g} s; {why}",
            )
        )

    # --- stopping ------------------------------------------------------------------------------------

    def _fault(self, fault: FaultDetected) -> None:
        if self.phase in (Phase.FORMING, Phase.CONSULTING):
            return
        self._current.faults.append(fault)
        self._write(fault)
        if self.phase is not Phase.STOPPING:
            self._stop_workers()

    def _stop_workers(self) -> None:
        self.phase = Phase.STOPPING
        self._current.stopping = {node for node in self.active if node in self.nodes}
        self._current.stop_began = self._now
        waiting = tuple(node for node in self.active if node in self._current.stopping)
        hung = tuple(f.rank for f in self._current.faults if f.kind is FaultKind.HANG and f.rank is not None)
        self._do(Disarm(Timer.PROBE), StopCycle(self.cycle, waiting, hung))
        self._do(Arm(Timer.STOP, self.policy.stop_timeout_s))
        if not waiting:
            self._all_stopped()

    def _node_stopped(self, node: str) -> None:
        if self.phase is not Phase.STOPPING or node not in self._current.stopping:
            return
        self._current.stopping.discard(node)
        if not self._current.stopping:
            self._all_stopped()

    def _all_stopped(self) -> None:
        self._do(Disarm(Timer.STOP))
        self._write(
            journal.WorkersStopped(
                nodes=sum(node in self.nodes for node in self.active),
                seconds=round(max(0.0, self._now - self._current.stop_began), 6),
            )
        )
        if self._ending is not None:
            self._end(self._ending.code, self._ending.why)
            return
        blame = find_culprit(self._current.faults)
        stop = self._reason_to_stop(blame)
        if stop is not None:
            self._verdict(VerdictAction.STOP, blame, stop.why)
            if stop.code == EXIT_RESTART_ELSEWHERE and not self._draining:
                self._end_for_lack_of_nodes(stop)
            else:
                self._end(stop.code, stop.why)
            return
        self._verdict(VerdictAction.RESTART, blame, blame.why)
        self.restarts += 1
        self.cycle += 1
        self.phase = Phase.FORMING
        self._do(Arm(Timer.JOIN, self.policy.join_timeout_s))
        self._form()

    def _reason_to_stop(self, blame: Blame) -> End | None:
        if self._draining:
            return End(EXIT_RESTART_ELSEWHERE, f"asked to stop, and then: {blame.why}")
        if self.restarts >= self.policy.max_restarts:
            return End(EXIT_FAILED, f"restart budget of {self.policy.max_restarts} used up: {blame.why}")
        if len(self.nodes) + len(self._never_joined) < self.policy.active_nodes:
            return End(EXIT_RESTART_ELSEWHERE, f"{self._too_few()}: {blame.why}")
        return None

    def _verdict(self, action: VerdictAction, blame: Blame, why: str) -> None:
        fault = blame.fault
        self._write(
            journal.Verdict(
                action=action, rule=blame.rule, why=why, node=fault.node, rank=fault.rank, kind=fault.kind
            )
        )

    def _end_for_lack_of_nodes(self, end: End) -> None:
        """Ask for a requeue, unless the nodes went because Slurm is ending the job anyway."""
        if not self._left_by_signal:
            self._end(end.code, end.why)
            return
        self.phase = Phase.CONSULTING
        self._for_lack_of_nodes = end
        self._do(ConsultSlurm(), Arm(Timer.CONSULT, self.policy.consult_timeout_s))

    def _slurm_answered(self, event: SlurmAnswered) -> None:
        end = self._for_lack_of_nodes
        if self.phase is not Phase.CONSULTING or end is None:
            return
        if event.job_state in (None, "RUNNING"):
            self._end(end.code, end.why)
        else:
            self._end(128 + signal.SIGTERM, f"Slurm has ended the job: {event.job_state}")

    def _stop_requested(self, event: StopRequested) -> None:
        self._write(journal.StopRequested(signal=event.signal.name))
        end = End(128 + event.signal, f"asked to stop by {event.signal.name}")
        again = self._ending is not None
        self._ending = end
        if self.phase in (Phase.FORMING, Phase.CONSULTING) or again:
            self._end(end.code, end.why)
        elif self.phase is not Phase.STOPPING:
            self._stop_workers()

    def _drain_requested(self, event: DrainRequested) -> None:
        if self._draining:
            return
        self._draining = True
        self._write(journal.StopRequested(signal=event.signal.name))
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in (Phase.RUNNING, Phase.DIAGNOSING):
            self._do(AskRanksToStop(self.cycle, tuple(node for node in self.active if node in self.nodes)))

    def _timer_fired(self, timer: Timer) -> None:
        match timer:
            case Timer.JOIN if self.phase is Phase.FORMING:
                for node in self.policy.nodes:
                    if node in self._never_joined:
                        self._write(journal.NodeLost(node=node, why="its agent never joined"))
                self._never_joined.clear()
                self._form()
            case Timer.FORM_GRACE if self.phase is Phase.FORMING:
                self._grace_over = True
                self._form()
            case Timer.PROBE if self.phase is Phase.DIAGNOSING:
                self._diagnosed()
            case Timer.CONSULT:
                self._slurm_answered(SlurmAnswered(None))
            case Timer.STOP if self.phase is Phase.STOPPING:
                self._drop_slow_nodes()
            case _:
                pass

    def _drop_slow_nodes(self) -> None:
        slow = [node for node in self.active if node in self._current.stopping]
        for node in slow:
            del self.nodes[node]
            self._ban(node, f"did not stop its workers within {self.policy.stop_timeout_s:g} s")
            self._do(Disconnect(node, self._banned[node]))
        self._current.stopping.clear()
        self._all_stopped()

    def _end(self, code: int, why: str) -> None:
        self.phase = Phase.ENDED
        self._do(*(Disarm(timer) for timer in Timer))
        self._write(journal.JobEnded(code=code, why=why))
        self._do(End(code, why))


def _exit_fault(event: RankExited) -> FaultDetected:
    if event.exit < 0:
        try:
            name = signal.Signals(-event.exit).name
        except ValueError:
            name = f"signal {-event.exit}"
        return FaultDetected(
            kind=FaultKind.SIGNAL,
            node=event.node,
            rank=event.rank,
            signal=name,
            detector="child",
            detail=event.detail,
        )
    return FaultDetected(
        kind=FaultKind.EXIT,
        node=event.node,
        rank=event.rank,
        exit=event.exit,
        detector="child",
        detail=event.detail,
    )
