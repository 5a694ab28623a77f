"""The job's state machine: events in, commands out; no clock, no I/O.

::

    FORMING ──enough nodes──▶ RUNNING ──fault──▶ STOPPING ──all stopped──▶ FORMING | ENDED
                                 │  ▲                ▲
                        deadline ▼  │                │
                             DIAGNOSING ──culprit────┘

* A *cycle* is one attempt of the whole worker group: one fails, all restart.
* Whatever a message says about another cycle than the current one, or about another node's ranks, is ignored.
* The job succeeds only when every rank of one cycle has been seen to exit with 0, unasked.
* Survivors keep their group rank; a spare takes the place of a node that is gone.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from nvrx_slurm import journal
from nvrx_slurm.coordinator.blame import Blame, find_culprit
from nvrx_slurm.coordinator.membership import Membership
from nvrx_slurm.coordinator.running_cycle import RunningCycle, exit_fault
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
    NodeLeaving,
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

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESTART_ELSEWHERE = 75


@dataclass(frozen=True)
class Policy:
    """What the user decided."""

    nodes: tuple[str, ...]
    """The allocation in the order in which nodes are preferred as active."""
    active_nodes: int
    max_restarts: int
    first_cycle: int = 0
    max_unknown_nodes: int = 0
    """How many nodes may join that are not known beforehand."""
    join_timeout_s: float = 300.0
    """Too few nodes, some never heard of: how long to wait for those."""
    form_grace_s: float = 2.0
    """Enough nodes at the start: how long to wait for the rest, so that a spare stays one."""
    stop_timeout_s: float = 30.0
    """A node that has not stopped its workers by then leaves the job."""
    term_timeout_s: float | None = None
    """Grace for the ranks when the job is asked to end: they get that signal then, and SIGKILL after this.
    None: they are stopped as for a restart."""
    probe_timeout_s: float = 1.0
    """How long the search for the hung rank may delay the restart."""
    consult_timeout_s: float = 10.0
    """How long Slurm may take to say whether it is ending the job."""

    @property
    def max_nodes(self) -> int:
        """Active nodes and spares."""
        return len(self.nodes) + self.max_unknown_nodes


class Phase(enum.Enum):
    FORMING = "forming"
    RUNNING = "running"
    DIAGNOSING = "diagnosing"
    STOPPING = "stopping"
    CONSULTING = "consulting"
    """Nodes have gone because somebody asked their agents to: Slurm is asked whether it ends the job."""
    ENDED = "ended"


_AT_WORK = (Phase.RUNNING, Phase.DIAGNOSING)


class CycleMachine:
    """One job's membership, cycles and budget.

    Feed every event to :meth:`handle` with the caller's clock (seconds, any origin) and carry out the
    commands in order.
    """

    def __init__(self, policy: Policy) -> None:
        if not 0 < policy.active_nodes <= policy.max_nodes:
            raise ValueError(f"active_nodes {policy.active_nodes} is not within 1…{policy.max_nodes}")
        self.policy = policy
        self.phase = Phase.FORMING
        self.cycle = policy.first_cycle
        self.restarts = 0
        self.members = Membership(policy.nodes, policy.max_unknown_nodes)
        self._current = RunningCycle()
        self._grace_over = False
        self._ending: End | None = None
        self._draining = False
        self._left_by_signal = False
        self._for_lack_of_nodes: tuple[End, Blame | None] | None = None
        self._commands: list[Command] = []
        self._now = 0.0

    @property
    def active(self) -> tuple[str, ...]:
        """Nodes of the last cycle that was started; position is the group rank."""
        return self._current.nodes

    @property
    def world_size(self) -> int:
        """Ranks of that cycle."""
        return self._current.world_size

    @property
    def _here(self) -> tuple[str, ...]:
        """Active nodes that can be told something."""
        return tuple(node for node in self.active if self.members.is_connected(node))

    @property
    def spares(self) -> tuple[str, ...]:
        """Usable nodes without ranks, in order of preference."""
        return tuple(node for node in self.members.usable if node not in self._current)

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
            case NodeLeaving():
                self._leaving(event)
            case NodeLost():
                self._lost(event)
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
            case _ if event.cycle == self.cycle and self._has_ranks(event.node):
                self._cycle_event(event)
            case _:
                pass

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
                if self.phase is Phase.STOPPING:
                    self._current.note_stalled(event.stalled_s)
                self._node_stopped(event.node)

    def _do(self, *commands: Command) -> None:
        self._commands.extend(commands)

    def _write(self, event: journal.events.AnyEvent) -> None:
        self._do(Write(event, self.cycle))

    # --- membership ----------------------------------------------------------------------------------

    def _has_ranks(self, node: str) -> bool:
        """Tell whether ``node`` is a connected node of a cycle that has been started and is not over."""
        started = self.phase in (*_AT_WORK, Phase.STOPPING)
        return started and node in self._current and self.members.is_connected(node)

    def has_rank(self, node: str, rank: int) -> bool:
        """Tell whether ``rank`` of the running cycle is on ``node``."""
        return self._has_ranks(node) and rank in self._current.ranks_of(node)

    def _joined(self, event: NodeJoined) -> None:
        node, members = event.node, self.members
        if not members.admit(node, event.place):
            why = f"{node} is not a node of this job"
            if self.policy.max_unknown_nodes:
                why = f"the job has all the nodes that it may have: {self.policy.max_nodes}"
            self._do(Disconnect(node, why))
            return
        refusal = members.reason_of(node)
        if refusal is not None:
            self._do(Disconnect(node, refusal))
            return
        again = "another agent of this node took its place" if members.is_connected(node) else None
        if again is not None:
            self._write(journal.NodeLost(node=node, why=again))
        misfit = members.misfit(event.slots)
        if misfit is not None:
            self._exclude(node, misfit)
            self._do(Disconnect(node, misfit))
        else:
            members.connect(node, event.slots)
            self._write(journal.NodeJoined(node=node, slots=event.slots))
        if again is not None:
            self._agent_is_gone(node, again)
        elif self.phase is Phase.FORMING:
            self._form()

    def _unusable(self, event: NodeUnusable) -> None:
        node = event.node
        # Where an agent is at work already, this one was too many, and going is all that it can do.
        known = self.members.admit(node)
        if not known or self.members.is_connected(node) or self.members.reason_of(node):
            return
        if not self.active:
            # What the user asked for can't be had on a node that Slurm gave for it: not the node's fault.
            self._end(EXIT_USAGE, f"{node}: {event.why}")
            return
        self._exclude(node, event.why)
        if self.phase is Phase.FORMING:
            self._form()

    def _leaving(self, event: NodeLeaving) -> None:
        if not self.members.is_connected(event.node):
            return
        self._left_by_signal |= event.by_signal
        self.members.leave(event.node)
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in _AT_WORK and self._current.needs(event.node):
            # Its ranks are being stopped: the others would wait for them until the last has gone.
            self._node_lost(event.node, event.why, asked=event.by_signal)

    def _lost(self, event: NodeLost) -> None:
        if not self.members.is_connected(event.node):
            return
        self._left_by_signal |= event.by_signal
        self.members.disconnect(event.node)
        self._write(journal.NodeLost(node=event.node, why=event.why))
        self._agent_is_gone(event.node, event.why, asked=event.by_signal)

    def _agent_is_gone(self, node: str, why: str, asked: bool = False) -> None:
        """Do what follows when the ranks that an agent had are gone with it."""
        if self.phase is Phase.FORMING:
            self._form()
            return
        stopping = self.phase is Phase.STOPPING and node in self._current.stopping
        if self._current.needs(node) and (self.phase in _AT_WORK or (stopping and self._ending is None)):
            self._node_lost(node, why, asked)
        if stopping:
            self._node_stopped(node)

    def _node_lost(self, node: str, why: str, asked: bool) -> None:
        fault = FaultDetected(kind=FaultKind.NODE_LOST, node=node, detector="stream", detail=why)
        self._fault(fault, tell=not asked)

    def _exclude(self, node: str, reason: str) -> None:
        self.members.exclude(node, reason)
        self._write(journal.NodeExcluded(node=node, reason=reason))

    def _step_ended(self, event: StepEnded) -> None:
        nobody_ever = self.members.nobody_came
        self.members.expect_no_more()
        if nobody_ever:
            self._end(EXIT_FAILED, f"no agent ever joined: {event.why}")
        elif self.phase is Phase.FORMING:
            self._form()

    # --- forming -------------------------------------------------------------------------------------

    def _form(self) -> None:
        """Start the next cycle if there are nodes for it; end the job if there never will be."""
        policy, members = self.policy, self.members
        if self._draining:
            self._end(EXIT_RESTART_ELSEWHERE, "asked to stop before a new cycle could begin")
            return
        if not members.can_fill(policy.active_nodes):
            self._end_for_lack_of_nodes(End(EXIT_RESTART_ELSEWHERE, self._too_few()))
            return
        if members.usable_count < policy.active_nodes:
            return
        if members.expects_more and not self._grace_over and self.restarts == 0:
            self._do(Arm(Timer.FORM_GRACE, policy.form_grace_s))
            return
        self._start_cycle()

    def _too_few(self) -> str:
        left = self.members.usable_count
        return (
            f"too few nodes: training needs {self.policy.active_nodes}, {left} "
            f"{'is' if left == 1 else 'are'} left and there is no spare"
        )

    def _start_cycle(self) -> None:
        nodes = self.members.choose(self.active, self.policy.active_nodes)
        self._current = RunningCycle(nodes, self.members.slots)
        self.phase = Phase.RUNNING
        self._do(Disarm(Timer.JOIN), Disarm(Timer.FORM_GRACE))
        self._write(
            journal.CycleStarted(
                world_size=self.world_size, nodes=list(self.active), spares=list(self.spares)
            )
        )
        self._do(StartCycle(self.cycle, nodes, self.members.slots))

    # --- running -------------------------------------------------------------------------------------

    def _node_ready(self, event: NodeReady) -> None:
        ready = self._current.ready
        if self.phase in _AT_WORK and event.node not in ready:
            ready.add(event.node)
            if len(ready) == len(self.active):
                self._write(journal.RankReady(ranks=self.world_size))

    def _node_stepping(self, event: NodeStepping) -> None:
        stepping = self._current.stepping
        if self.phase in _AT_WORK and event.node not in stepping:
            stepping.add(event.node)
            if len(stepping) == len(self.active):
                self._write(journal.FirstStep(ranks=self.world_size, step=event.step))

    def _rank_exited(self, event: RankExited) -> None:
        current = self._current
        if not current.is_alive(event.node, event.rank):
            return
        current.exited.add(event.rank)
        if event.after_stop:
            # It did what it was asked to do: neither a fault nor a success.
            return
        if event.exit != 0:
            self._fault(exit_fault(event), tell=event.exit != -signal.SIGTERM)
            return
        current.finished.add(event.rank)
        if self.phase in _AT_WORK and len(current.finished) == self.world_size:
            if self._draining:
                self._end(EXIT_RESTART_ELSEWHERE, "asked to stop; every rank has ended in good order")
            else:
                self._end(EXIT_OK, f"all {self.world_size} ranks exited with 0")

    def _rank_stalled(self, event: RankStalled) -> None:
        current = self._current
        if not current.is_alive(event.node, event.rank):
            return
        current.note_stall(event.rank, event.why or f"no heartbeat for {event.timeout_s:g} s")
        if self.phase is Phase.RUNNING:
            self.phase = Phase.DIAGNOSING
            current.begin_probe(self._here)
            others = tuple(node for node in self._here if node != event.node)
            self._do(ProbeNodes(self.cycle, others), Arm(Timer.PROBE, self.policy.probe_timeout_s))
        self._snapshots_taken(SnapshotsTaken(event.node, event.cycle, event.snapshots))

    def _snapshots_taken(self, event: SnapshotsTaken) -> None:
        if self.phase is Phase.DIAGNOSING:
            self._current.take_snapshots(event.node, event.snapshots)
            if not self._current.to_probe:
                self._diagnosed()

    def _diagnosed(self) -> None:
        self._do(Disarm(Timer.PROBE))
        self.phase = Phase.RUNNING
        hang = self._current.hang()
        if hang is not None:
            self._fault(hang)

    # --- stopping ------------------------------------------------------------------------------------

    def _fault(self, fault: FaultDetected, tell: bool = True) -> None:
        """Stop the cycle because of ``fault``.

        ``tell`` is False for what Slurm does to a job that it ends: SIGTERM to every process. The
        Coordinator's own may come a moment later: such a fault is told only when all have stopped without it.
        """
        if self.phase not in (*_AT_WORK, Phase.STOPPING):
            return
        if not self._current.note_fault(fault):
            return
        if tell:
            self._write(fault)
        else:
            self._current.untold.append(fault)
        if self.phase is not Phase.STOPPING:
            self._stop_workers()

    def _tell_faults(self) -> None:
        for fault in self._current.untold:
            self._write(fault)
        self._current.untold.clear()

    def _stop_workers(self) -> None:
        self.phase = Phase.STOPPING
        waiting = self._here
        self._current.stopping = set(waiting)
        self._current.stop_began = self._now
        self._do(Disarm(Timer.PROBE))
        self._order_stop(waiting)
        if not waiting:
            self._all_stopped()

    def _order_stop(self, nodes: tuple[str, ...]) -> None:
        policy = self.policy
        hung = tuple(f.rank for f in self._current.faults if f.kind is FaultKind.HANG and f.rank is not None)
        if self._ending is None or policy.term_timeout_s is None:
            self._do(StopCycle(self.cycle, nodes, hung), Arm(Timer.STOP, policy.stop_timeout_s))
            return
        asked = signal.Signals(self._ending.code - 128)
        self._do(StopCycle(self.cycle, nodes, hung, asked, policy.term_timeout_s))
        self._do(Arm(Timer.STOP, policy.stop_timeout_s + policy.term_timeout_s))

    def _node_stopped(self, node: str) -> None:
        if self.phase is not Phase.STOPPING or node not in self._current.stopping:
            return
        self._current.stopping.discard(node)
        if not self._current.stopping:
            self._all_stopped()

    def _all_stopped(self) -> None:
        self._do(Disarm(Timer.STOP))
        lack = not self.members.can_fill(self.policy.active_nodes)
        if self._ending is None and not (lack and self._left_by_signal):
            self._tell_faults()
        self._write(
            journal.WorkersStopped(
                nodes=len(self._here),
                seconds=round(max(0.0, self._now - self._current.stop_began), 6),
                stalled_s=self._current.stalled_s,
            )
        )
        if self._ending is not None:
            self._end(self._ending.code, self._ending.why)
            return
        blame = find_culprit(self._current.faults)
        stop = self._reason_to_stop(blame)
        if stop is not None:
            self._end_for_lack_of_nodes(stop, blame)
            return
        self._verdict(VerdictAction.RESTART, blame, blame.why)
        if blame.fault.detector == "start" and self.members.usable_count > self.policy.active_nodes:
            # It would fail there again, and there is a node that has not.
            self._exclude(blame.fault.node, f"could not start workers: {blame.fault.detail}")
            self._do(Disconnect(blame.fault.node, "a spare takes this node's place"))
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
        if not self.members.can_fill(self.policy.active_nodes):
            return End(EXIT_RESTART_ELSEWHERE, f"{self._too_few()}: {blame.why}")
        return None

    def _verdict(self, action: VerdictAction, blame: Blame, why: str) -> None:
        fault = blame.fault
        self._write(
            journal.Verdict(
                action=action, rule=blame.rule, why=why, node=fault.node, rank=fault.rank, kind=fault.kind
            )
        )

    def _end_for_lack_of_nodes(self, end: End, blame: Blame | None = None) -> None:
        """End the job; if nodes went because they were asked to, hear first whether Slurm is ending it."""
        if end.code != EXIT_RESTART_ELSEWHERE or not self._left_by_signal:
            self._end_for(end, blame)
            return
        self.phase = Phase.CONSULTING
        self._for_lack_of_nodes = end, blame
        self._do(ConsultSlurm(), Arm(Timer.CONSULT, self.policy.consult_timeout_s))

    def _slurm_answered(self, event: SlurmAnswered) -> None:
        if self.phase is not Phase.CONSULTING or self._for_lack_of_nodes is None:
            return
        if event.job_state in (None, "RUNNING"):
            self._end_for(*self._for_lack_of_nodes)
        else:
            self._end(128 + signal.SIGTERM, f"Slurm has ended the job: {event.job_state}")

    def _end_for(self, end: End, blame: Blame | None) -> None:
        self._tell_faults()
        if blame is not None:
            self._verdict(VerdictAction.STOP, blame, end.why)
        self._end(end.code, end.why)

    def _stop_requested(self, event: StopRequested) -> None:
        self._write(journal.StopRequested(signal=event.signal.name))
        end = End(128 + event.signal, f"asked to stop by {event.signal.name}")
        again = self._ending is not None
        self._ending = end
        if self.phase in (Phase.FORMING, Phase.CONSULTING) or again:
            self._end(end.code, end.why)
        elif self.phase is not Phase.STOPPING:
            self._stop_workers()
        elif self.policy.term_timeout_s is not None:
            # They have been told already, but of a shorter grace.
            self._order_stop(tuple(node for node in self.active if node in self._current.stopping))

    def _drain_requested(self, event: DrainRequested) -> None:
        if self._draining:
            return
        self._draining = True
        self._write(journal.StopRequested(signal=event.signal.name))
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in _AT_WORK:
            self._do(AskRanksToStop(self.cycle, self._here))

    def _timer_fired(self, timer: Timer) -> None:
        match timer:
            case Timer.JOIN if self.phase is Phase.FORMING and self.members.nobody_came:
                why = f"no agent joined within {self.policy.join_timeout_s:g} s"
                if not self.policy.max_unknown_nodes:
                    why += ": another step of this job may hold its nodes, or srun could not start"
                self._end(EXIT_FAILED, why)
            case Timer.JOIN if self.phase is Phase.FORMING:
                for node in self.members.expected:
                    self._write(journal.NodeLost(node=node, why="its agent never joined"))
                self.members.expect_no_more()
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
        reason = f"did not stop its workers within {self.policy.stop_timeout_s:g} s"
        for node in slow:
            self._exclude(node, reason)
            self._do(Disconnect(node, reason))
        self._current.stopping.clear()
        self._all_stopped()

    def _end(self, code: int, why: str) -> None:
        self.phase = Phase.ENDED
        self._do(*(Disarm(timer) for timer in Timer))
        self._write(journal.JobEnded(code=code, why=why))
        self._do(End(code, why))
