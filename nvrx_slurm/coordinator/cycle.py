"""The job's state machine: events in, commands out; no clock, no I/O.

::

    FORMING ──enough nodes──▶ RUNNING ──fault──▶ STOPPING ──all stopped──▶ FORMING | ENDED
                                 │  ▲                ▲
                        deadline ▼  │                │
                             DIAGNOSING ──culprit────┘

* A *cycle* is one attempt of the whole worker group: one fails, all restart.
* Whatever a message says about another cycle than the current one, or about another node's ranks, is ignored.
* The job succeeds only when every rank of one cycle has been seen to exit with 0, unasked.
* Survivors keep their group rank; a spare takes the place of a node that is gone (``placement.py``).
* A lost node may come back: to the end of the line of spares, or into the place that waits for it.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping
from dataclasses import replace

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.blame import Blame, find_culprit
from nvrx_slurm.coordinator.budget import NO_PROGRESS, Budget
from nvrx_slurm.coordinator.ending import Ending, Lack
from nvrx_slurm.coordinator.faults import (
    exit_fault,
    given_up_fault,
    lost_fault,
    request_fault,
    slow_fault,
    start_fault,
    unhealthy_fault,
)
from nvrx_slurm.coordinator.formation import Formation
from nvrx_slurm.coordinator.inprocess_restarts import InprocessRestarts
from nvrx_slurm.coordinator.judgement import Judgement, Replaced
from nvrx_slurm.coordinator.lost_nodes import LostNodes
from nvrx_slurm.coordinator.membership import Membership
from nvrx_slurm.coordinator.placement import Rules
from nvrx_slurm.coordinator.policy import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_RESTART_ELSEWHERE,
    EXIT_USAGE,
    Policy,
)
from nvrx_slurm.coordinator.progress import highest
from nvrx_slurm.coordinator.running_cycle import RunningCycle
from nvrx_slurm.coordinator.slow_ranks import SlowRanks
from nvrx_slurm.coordinator.steps import Arm, Disarm, End, Timer
from nvrx_slurm.coordinator.unhealthy import YOUNG_S, Complaint, Unhealthy
from nvrx_slurm.journal import FaultDetected, FaultKind, VerdictAction
from nvrx_slurm.wire.rank_channel import WorkloadAction


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
        if policy.active_nodes % policy.segment:
            raise ValueError(f"active_nodes {policy.active_nodes} is no multiple of segment {policy.segment}")
        rules = Rules(policy.active_nodes, policy.segment, policy.group_size)
        self.members = Membership(policy.nodes, rules, policy.last_choice, policy.max_unknown_nodes)
        self.budget = Budget(policy.max_restarts, policy.limits, replace(policy.past.progress))
        self._judgement = Judgement(policy, self.budget)
        self._formation = Formation(policy, self.members, self.budget)
        self._lost_nodes = LostNodes(policy, self.members)
        self._ending = Ending(policy)
        self._unhealthy = Unhealthy()
        self._slow_ranks = SlowRanks(policy.limits.straggler_action)
        self._current = RunningCycle()
        self._inprocess = InprocessRestarts(policy.limits, began=0.0)
        self._restart_why = ""
        """What ended the last cycle."""
        self._commands: list[steps.Command] = []
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

    @property
    def proven_bad(self) -> tuple[str, ...]:
        """Nodes on trial without which training got further; see :mod:`nvrx_slurm.coordinator.suspects`."""
        return self._judgement.proven_bad(self._now)

    def start(self, now: float) -> list[steps.Command]:
        """Begin to form the first cycle."""
        self._formation.began = now
        return [Arm(Timer.JOIN, self.policy.join_timeout_s), *self._judgement.start()]

    def take_over(
        self, now: float, lost: str, why: str, restarts: int, excluded: Mapping[str, str]
    ) -> list[steps.Command]:
        """Begin where another Coordinator stopped when its host ``lost`` fell silent: that costs a restart.

        Args:
            restarts: how many it had made.
            excluded: nodes that it had excluded, and why.
        """
        self._commands, self._now = [], now
        for node, reason in excluded.items():
            self.members.exclude(node, reason)
        self.budget.restarts = restarts
        self.cycle = max(0, self.policy.first_cycle - 1)
        fault = lost_fault(lost, "lease", why)
        self._write(fault)
        self._write(journal.NodeLost(node=lost, why=why))
        self._exclude(lost, "the Coordinator's host was lost")
        blame = find_culprit([fault])
        stop = self._reason_to_stop(blame)
        if stop is not None:
            self._end_for(*stop)
            return self._commands
        self._verdict(VerdictAction.RESTART, blame, blame.why)
        self.budget.spend(now)
        self.cycle = self.policy.first_cycle
        self._do(Arm(Timer.JOIN, self.policy.join_timeout_s))
        return self._commands

    def handle(self, event: steps.Event, now: float) -> list[steps.Command]:
        """Take one event; return what to do, in order."""
        self._commands = []
        self._now = now
        if self.phase is not Phase.ENDED:
            self._dispatch(event)
        elif isinstance(event, steps.CycleAttributed):
            # Whom it blames matters to a requeue.
            self._judgement.attributed(event, now)
        return self._commands

    def _dispatch(self, event: steps.Event) -> None:
        match event:
            case steps.NodeJoined():
                self._joined(event)
            case steps.NodeHealth():
                self._health_told(event)
            case steps.NodeUnusable():
                self._unusable(event)
            case steps.NodeLeaving():
                self._leaving(event)
            case steps.NodeLost():
                self._lost(event)
            case steps.NodeStaysAway():
                self._stays_away(event)
            case steps.SlurmAnswered():
                self._slurm_answered(event)
            case steps.StepEnded():
                self._step_ended(event)
            case steps.StopRequested():
                self._stop_requested(event)
            case steps.DrainRequested():
                self._drain_requested(event)
            case steps.IterationRead():
                self._iteration_read(event)
            case steps.CycleAttributed():
                self._attributed(event)
            case steps.RanksJudged():
                self._ranks_judged(event)
            case steps.StoreLost():
                self._fault(start_fault(event.host, "store", event.why))
            case steps.TimerFired():
                self._timer_fired(event.timer)
            case _ if event.cycle == self.cycle and self._has_ranks(event.node):
                self._cycle_event(event)
            case _:
                pass

    def _cycle_event(
        self,
        event: steps.StartFailed
        | steps.RankExited
        | steps.RankStalled
        | steps.SnapshotsTaken
        | steps.NodeReady
        | steps.NodeStepping
        | steps.StepReached
        | steps.CheckpointSaved
        | steps.CheckpointLoaded
        | steps.ControlRequested
        | steps.RankGivenUp
        | steps.RestartedInProcess
        | steps.NodeStopped,
    ) -> None:
        match event:
            case steps.StepReached() | steps.CheckpointSaved() | steps.CheckpointLoaded():
                self._current.note_step(event)
            case steps.ControlRequested():
                self._control_requested(event)
            case steps.RankGivenUp():
                if self._current.is_alive(event.node, event.rank):
                    self._fault(given_up_fault(event))
            case steps.RestartedInProcess():
                self._restarted_in_process(event)
            case steps.StartFailed():
                self._fault(start_fault(event.node, "start", event.why))
            case steps.RankExited():
                self._rank_exited(event)
            case steps.RankStalled():
                self._rank_stalled(event)
            case steps.SnapshotsTaken():
                self._snapshots_taken(event)
            case steps.NodeReady():
                self._node_ready(event)
            case steps.NodeStepping():
                self._node_stepping(event)
            case steps.NodeStopped():
                if self.phase is Phase.STOPPING:
                    self._current.note_stalled(event.stalled_s)
                self._node_stopped(event.node)

    def _do(self, *commands: steps.Command) -> None:
        self._commands.extend(commands)

    def _write(self, event: journal.events.AnyEvent) -> None:
        self._do(steps.Write(event, self.cycle))

    # --- membership ----------------------------------------------------------------------------------

    def _has_ranks(self, node: str) -> bool:
        """Tell whether ``node`` is a connected node of a cycle that has been started and is not over."""
        started = self.phase in (*_AT_WORK, Phase.STOPPING)
        return started and node in self._current and self.members.is_connected(node)

    def has_rank(self, node: str, rank: int) -> bool:
        """Tell whether ``rank`` of the running cycle is on ``node``."""
        return self._has_ranks(node) and rank in self._current.ranks_of(node)

    def node_of_rank(self, rank: int) -> str | None:
        """Return where ``rank`` of the running cycle is; None: there is no such rank."""
        return next((node for node in self._current.nodes if self.has_rank(node, rank)), None)

    def _joined(self, event: steps.NodeJoined) -> None:
        node, members = event.node, self.members
        if not members.admit(node, event.place):
            why = f"{node} is not a node of this job"
            if self.policy.max_unknown_nodes:
                why = f"the job has all the nodes that it may have: {self.policy.max_nodes}"
            self._do(steps.Disconnect(node, why))
            return
        refusal = members.reason_of(node)
        if refusal is not None:
            self._do(steps.Disconnect(node, refusal))
            return
        again = "another agent of this node took its place" if members.is_connected(node) else None
        if again is not None:
            self._write(journal.NodeLost(node=node, why=again))
        misfit = members.misfit(event.slots)
        if misfit is not None:
            self._put_out(node, misfit)
        else:
            returned = members.connect(node, event.slots, event.location)
            self._write(journal.NodeJoined(node=node, slots=event.slots, returned=returned))
        if again is not None:
            self._agent_is_gone(node, again)
        elif self.phase is Phase.FORMING:
            self._form()

    def _unusable(self, event: steps.NodeUnusable) -> None:
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

    def _health_told(self, event: steps.NodeHealth) -> None:
        """Note it for the next cycle; stop the running one if it is serious."""
        self._unhealthy.note(event.node, event.complaint)
        if event.complaint is None or not self.members.is_connected(event.node):
            return
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in _AT_WORK and event.node not in self._current:
            self._exclude_unhealthy(among=(event.node,))
        elif self.phase in _AT_WORK and self._current.needs(event.node) and self._is_serious(event.complaint):
            self._fault(unhealthy_fault(event.node, event.complaint))

    def _is_serious(self, complaint: Complaint) -> bool:
        """Tell whether to stop the cycle for it: no rank can go on there, or the cycle is young.

        It is young when the verdict comes that a restart has asked for; stopping it costs only its start.
        """
        current = self._current
        is_young = not current.signs.trained and self._now - current.began < YOUNG_S
        return complaint.node_lost or is_young

    def _exclude_unhealthy(self, among: tuple[str, ...] | None = None) -> None:
        """Leave out the nodes whose checks fail, unless they fail on most nodes."""
        connected = self.members.usable
        for node, what in self._unhealthy.believed(connected).items():
            if among is None or node in among:
                self._put_out(node, what)
        for check in self._unhealthy.tell_once(connected):
            self._write(journal.HealthDisbelieved(check=check, nodes=len(connected)))

    def _leaving(self, event: steps.NodeLeaving) -> None:
        if not self.members.is_connected(event.node):
            return
        self._ending.left_by_signal |= event.by_signal
        self.members.leave(event.node)
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in _AT_WORK and self._current.needs(event.node):
            # Its ranks are being stopped: the others would wait for them until the last has gone.
            self._node_lost(event.node, event.why, asked=event.by_signal)

    def _lost(self, event: steps.NodeLost) -> None:
        if not self.members.is_connected(event.node):
            return
        self._ending.left_by_signal |= event.by_signal
        self.members.lose(event.node)
        self._write(journal.NodeLost(node=event.node, why=event.why))
        worn_out = self._lost_nodes.worn_out(event.node)
        if worn_out is not None:
            self._exclude(event.node, worn_out)
        else:
            self._do(*self._lost_nodes.lost(event.node, asked=event.by_signal))
        self._agent_is_gone(event.node, event.why, asked=event.by_signal)

    def _agent_is_gone(self, node: str, why: str, asked: bool = False) -> None:
        """Do what follows when the ranks that an agent had are gone with it."""
        if self.phase is Phase.FORMING:
            self._form()
            return
        stopping = self.phase is Phase.STOPPING and node in self._current.stopping
        if self._current.needs(node) and (self.phase in _AT_WORK or (stopping and self._ending.end is None)):
            self._node_lost(node, why, asked)
        if stopping:
            self._node_stopped(node)

    def _stays_away(self, event: steps.NodeStaysAway) -> None:
        if event.node not in self.members or self.members.is_connected(event.node):
            return
        self.members.give_up(event.node)
        self._write(journal.NodeGivenUp(node=event.node, why=event.why))
        if self.phase is Phase.FORMING:
            self._form()

    def _node_lost(self, node: str, why: str, asked: bool) -> None:
        self._fault(lost_fault(node, "stream", why), tell=not asked)

    def _exclude(self, node: str, reason: str, on_trial: bool = False) -> None:
        self.members.exclude(node, reason)
        self._write(journal.NodeExcluded(node=node, reason=reason, on_trial=on_trial))

    def _put_out(self, node: str, reason: str) -> None:
        """Exclude a node that is connected, and tell it why."""
        self._exclude(node, reason)
        self._do(steps.Disconnect(node, reason))

    def _step_ended(self, event: steps.StepEnded) -> None:
        nobody_ever = self.members.nobody_came
        self.members.expect_no_more()
        if nobody_ever:
            self._end(EXIT_FAILED, f"no agent ever joined: {event.why}")
        elif self.phase is Phase.FORMING:
            self._form()

    # --- forming -------------------------------------------------------------------------------------

    def _form(self) -> None:
        """Start the next cycle if there are nodes for it; end the job if there never will be."""
        if self._ending.draining:
            self._end(EXIT_RESTART_ELSEWHERE, "asked to stop before a new cycle could begin")
            return
        if not self._formation.awaits_more:
            self._exclude_unhealthy()
        match self._formation.decide(self.active, self._restart_why, self._now):
            case End() as end:
                self._end_for_lack_of_nodes(end)
            case Arm() as arm:
                self._do(arm)
            case tuple() as nodes if not self._formation.waits_for:
                self._start_cycle(nodes)
            case None if self.active:
                awaited = self._formation.wait_once()
                if awaited is not None:
                    self._write(awaited)

    def _start_cycle(self, nodes: tuple[str, ...]) -> None:
        trouble = self._formation.trouble_once()
        if trouble:
            self._write(journal.TopologyIgnored(why=trouble))
        self._formation.over()
        self._current = RunningCycle(nodes, self.members.slots, began=self._now)
        progress = self.budget.progress
        self._inprocess = InprocessRestarts(
            self.policy.limits, began=self._now, saved=progress.saved, step=progress.step
        )
        self.phase = Phase.RUNNING
        self._do(Disarm(Timer.JOIN), Disarm(Timer.FORM_GRACE))
        self._write(
            journal.CycleStarted(
                world_size=self.world_size, nodes=list(self.active), spares=list(self.spares)
            )
        )
        self._do(steps.StartCycle(self.cycle, nodes, self.members.slots))
        self._do(*self._lost_nodes.recall_asked_away())

    # --- running -------------------------------------------------------------------------------------

    def _node_ready(self, event: steps.NodeReady) -> None:
        self._current.signs.monitored = True
        if self.phase in _AT_WORK and self._current.all_ready_with(event.node):
            self._write(journal.RankReady(ranks=self.world_size))

    def _node_stepping(self, event: steps.NodeStepping) -> None:
        signs = self._current.signs
        signs.heartbeat, signs.step = True, highest(signs.step, event.step)
        if self.phase in _AT_WORK and self._current.all_stepping_with(event.node):
            self._write(journal.FirstStep(ranks=self.world_size, step=event.step))

    def _rank_exited(self, event: steps.RankExited) -> None:
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
            if self._ending.draining:
                self._end(EXIT_RESTART_ELSEWHERE, "asked to stop; every rank has ended in good order")
            else:
                self._end(EXIT_OK, f"all {self.world_size} ranks exited with 0")

    def _rank_stalled(self, event: steps.RankStalled) -> None:
        current = self._current
        if not current.is_alive(event.node, event.rank):
            return
        current.note_stall(event.rank, event.why or f"no heartbeat for {event.timeout_s:g} s")
        if self.phase is Phase.RUNNING:
            self.phase = Phase.DIAGNOSING
            current.begin_probe(self._here)
            others = tuple(node for node in self._here if node != event.node)
            self._do(steps.ProbeNodes(self.cycle, others), Arm(Timer.PROBE, self.policy.probe_timeout_s))
        self._snapshots_taken(steps.SnapshotsTaken(event.node, event.cycle, event.snapshots))

    def _snapshots_taken(self, event: steps.SnapshotsTaken) -> None:
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

    def _restarted_in_process(self, event: steps.RestartedInProcess) -> None:
        """Restart processes, from the job's budget, where calling the function again gets no further."""
        useless = self._inprocess.note(self._current.signs, self._now)
        if useless is None or self.phase not in _AT_WORK:
            return
        rank = event.faulty[0] if event.faulty else None
        node = None if rank is None else self.node_of_rank(rank)
        self._fault(
            FaultDetected(
                kind=FaultKind.NO_PROGRESS,
                node=node or event.node,
                rank=None if node is None else rank,
                detector="in-process",
                detail=f"{useless}; the last: {event.why}",
            )
        )

    def _ranks_judged(self, event: steps.RanksJudged) -> None:
        """Have a node with a slow rank leave, now if a spare is there and a restart is left."""
        if event.cycle != self.cycle or self.phase not in _AT_WORK or self._ending.end is not None:
            return
        for kept in self._slow_ranks.judged(event.verdicts, self.active):
            self._write(kept)
        worst = self._slow_ranks.worst
        if worst is None or self._ending.draining:
            return
        used_up = self.budget.used_up(self._now)
        if not self._has_spare or used_up is not None:
            why = "there is no spare to take its place" if used_up is None else used_up.why
            for kept in self._slow_ranks.stays(why):
                self._write(kept)
            return
        self._fault(slow_fault(worst))

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
        self._do(*self._ending.stop(self.cycle, waiting, self._current.faults))
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
        self._exclude_as_asked()
        if self._ending.end is None:
            self._exclude_unhealthy()
            for node, reason in self._slow_ranks.leave(self._free_spares).items():
                self._put_out(node, reason)
        self._judgement.measure(self._current, self._now)
        shortage = self.members.shortage(self.active)
        untold = shortage is not None and self._ending.left_by_signal
        ask_slurm = untold or (shortage is not None and self._is_alone)
        if self._ending.end is None and not untold:
            self._tell_faults()
        self._write(
            journal.WorkersStopped(
                nodes=len(self._here),
                seconds=round(max(0.0, self._now - (self._current.stop_began or self._now)), 6),
                stalled_s=self._current.stalled_s,
            )
        )
        if self._ending.end is not None:
            self._end_unless_slurm_is_asked()
            return
        blame = find_culprit(self._current.faults)
        if ask_slurm:
            self._end_for_lack_of_nodes(End(EXIT_RESTART_ELSEWHERE, f"{shortage}: {blame.why}"), blame)
        else:
            self._restart_or_end(blame)

    def _restart_or_end(self, blame: Blame) -> None:
        self._do(*self._judgement.score(self.cycle, self._current, blame.fault, self._now))
        stop = self._reason_to_stop(blame)
        if stop is not None:
            self._end_for(*stop)
            return
        self._verdict(VerdictAction.RESTART, blame, blame.why)
        self._replace_culprit(blame.fault)
        self.budget.spend(self._now)
        self.cycle += 1
        self._restart_why = blame.why
        self._wait_before_the_next(ended=self.cycle - 1)
        self._form_again()

    def _wait_before_the_next(self, ended: int) -> None:
        delay = self._judgement.delay(self._now)
        if delay is not None:
            self._write(journal.RestartDelayed(seconds=delay.seconds, rule=delay.rule, why=delay.why))
            self._wait(Timer.DELAY, delay.seconds)
        patience_s = self._judgement.patience(ended, self._current, self._now)
        if patience_s > 0:
            self._wait(Timer.VERDICT, patience_s)

    def _wait(self, timer: Timer, seconds: float) -> None:
        self._formation.waits_for.add(timer)
        self._do(Arm(timer, seconds))

    def _wait_no_more(self, timer: Timer) -> None:
        self._formation.waits_for.discard(timer)
        self._form()

    def _form_again(self) -> None:
        self.phase = Phase.FORMING
        self._do(Arm(Timer.JOIN, self.policy.join_timeout_s))
        self._form()

    def _exclude_as_asked(self) -> None:
        for fault in self._current.faults:
            if fault.kind is FaultKind.REQUEST and self.members.reason_of(fault.node) is None:
                reason = f"rank {fault.rank} asked for it: {fault.detail}"
                self._put_out(fault.node, reason)

    def _replace_culprit(self, fault: FaultDetected) -> None:
        """Have a spare take the culprit's place where that is of use, and those of nodes that are accused."""
        place = self._place_held_by(fault.node)
        if place is not None:
            self._replace(fault.node, self._judgement.replacement(fault, place, self._has_spare, self._now))
        for node in self._judgement.accused:
            place = self._place_held_by(node)
            if place is not None:
                self._replace(node, self._judgement.without_accused(node, place, self._has_spare, self._now))

    def _place_held_by(self, node: str) -> int | None:
        """Return the group rank of a connected node of the cycle that is not excluded; None: it is none."""
        gone = not self.members.is_connected(node) or self.members.reason_of(node) is not None
        return None if gone else self._current.place_of(node)

    @property
    def _free_spares(self) -> int:
        """How many nodes can go before there are too few."""
        return self.members.usable_count - self.policy.active_nodes

    @property
    def _has_spare(self) -> bool:
        return self._free_spares > 0

    def _replace(self, node: str, decided: Replaced | journal.NodeSuspected | None) -> None:
        match decided:
            case Replaced() as replaced:
                self._exclude(node, replaced.reason, on_trial=replaced.on_trial)
                self._do(steps.Disconnect(node, replaced.farewell))
            case journal.NodeSuspected() as suspected:
                self._write(suspected)
            case None:
                pass

    def _reason_to_stop(self, blame: Blame) -> tuple[End, Blame] | None:
        if self._ending.draining:
            return End(EXIT_RESTART_ELSEWHERE, f"asked to stop, and then: {blame.why}"), blame
        no_restart = self._judgement.no_restart(blame, self._now)
        if no_restart is not None:
            return no_restart
        shortage = self.members.shortage(self.active)
        if shortage is not None:
            return End(EXIT_RESTART_ELSEWHERE, f"{shortage}: {blame.why}"), blame
        return None

    def _verdict(self, action: VerdictAction, blame: Blame, why: str) -> None:
        self._write(self._judgement.verdict(action, blame, why, self.cycle, self._current))

    def _attributed(self, event: steps.CycleAttributed) -> None:
        """Take what was found out of an ended cycle; stop the next if it is of no use."""
        self._judgement.attributed(event, self._now)
        if self._ending.end is not None or self.phase not in (Phase.FORMING, *_AT_WORK):
            return
        useless = self._judgement.useless(self._current if self.phase in _AT_WORK else None, self._now)
        if useless is None:
            if self._formation.waits_for and not self._judgement.awaited:
                self._do(Disarm(Timer.VERDICT))
                self._wait_no_more(Timer.VERDICT)
            return
        end, verdict = useless
        self._write(verdict)
        if self.phase is Phase.FORMING:
            self._end(end.code, end.why, end.hold)
        else:
            self._ending.end = end
            self._stop_workers()

    def _iteration_read(self, event: steps.IterationRead) -> None:
        """Judge the cycle that waited for it; stop the next, which may have begun, if that is of no use."""
        self._do(*self._judgement.iteration_read(event))
        end = self._judgement.stuck()
        if end is None or self._ending.end is not None:
            return
        if self.phase is Phase.FORMING:
            self._end(end.code, end.why)
        elif self.phase in _AT_WORK:
            self._ending.end = end
            self._write(journal.Verdict(action=VerdictAction.STOP, rule=NO_PROGRESS, why=end.why))
            self._stop_workers()

    # --- ending --------------------------------------------------------------------------------------

    def _end_for_lack_of_nodes(self, end: End, blame: Blame | None = None) -> None:
        """End the job; hear Slurm first if nodes went because they were asked to, or all of them went."""
        if end.code != EXIT_RESTART_ELSEWHERE or not (self._ending.left_by_signal or self._is_alone):
            self._end_for(end, blame)
            return
        self.phase = Phase.CONSULTING
        self._do(*self._ending.consult(Lack(end, blame)))

    @property
    def _is_alone(self) -> bool:
        """Tell whether no other host is left: this one may be the one that is cut off."""
        host = self.policy.host
        return host is not None and len(self.members) > 1 and not self.members.has_others_than(host)

    def _slurm_answered(self, event: steps.SlurmAnswered) -> None:
        if self._ending.take_answer(event, self.phase is Phase.CONSULTING):
            self._write(journal.StopRequested(signal="", why="a preemption by Slurm", preempted=True))
        if self.phase is not Phase.CONSULTING:
            return
        match self._ending.after_answer(event.job_state, self._is_alone):
            case End() as end:
                self._end(end.code, end.why)
            case Lack() as lack:
                self._go_on_or_end(lack)
            case command:
                self._do(command)

    def _go_on_or_end(self, lack: Lack) -> None:
        """Slurm is not ending the job: nodes whose agents were asked to go may come back."""
        self._do(*self._lost_nodes.recall_asked_away(), *self._lost_nodes.await_leaving())
        blame = lack.blame
        if self._ending.draining or self.members.shortage(self.active) is not None:
            self._end_for(lack.end, blame)
        elif blame is None:
            self._form_again()
        else:
            self._tell_faults()
            self._restart_or_end(blame)

    def _end_for(self, end: End, blame: Blame | None) -> None:
        self._tell_faults()
        if blame is not None:
            self._verdict(VerdictAction.STOP, blame, end.why)
        self._end(end.code, end.why, end.hold)

    def _stop_requested(self, event: steps.StopRequested) -> None:
        self._write(journal.StopRequested(signal=event.signal.name))
        at_once = self._ending.signalled(event)
        if at_once is not None:
            self._end(at_once.code, at_once.why)
            return
        if event.signal is signal.SIGTERM and self.phase is not Phase.CONSULTING:
            self._do(self._ending.ask_slurm())
        if self.phase is Phase.FORMING:
            self._end_unless_slurm_is_asked()
        elif self.phase in _AT_WORK:
            self._stop_workers()
        elif self.phase is Phase.STOPPING and self.policy.term_timeout_s is not None:
            # They have been told already, but of a shorter grace.
            slow = tuple(node for node in self.active if node in self._current.stopping)
            self._do(*self._ending.stop(self.cycle, slow, self._current.faults))

    def _end_unless_slurm_is_asked(self) -> None:
        """End as is intended; Slurm's answer, if one is awaited, may still change that."""
        end = self._ending.settled
        if end is not None:
            self._end(end.code, end.why, end.hold)
            return
        self.phase = Phase.CONSULTING
        self._do(Disarm(Timer.JOIN), Disarm(Timer.FORM_GRACE), self._ending.await_answer())

    def _drain_requested(self, event: steps.DrainRequested) -> None:
        if self._ending.draining:
            return
        self._ending.draining = True
        name = "" if event.signal is None else event.signal.name
        self._write(journal.StopRequested(signal=name, why=event.why))
        if self.phase is Phase.FORMING:
            self._form()
        elif self.phase in _AT_WORK:
            self._do(steps.AskRanksToStop(self.cycle, self._here))

    def _control_requested(self, event: steps.ControlRequested) -> None:
        """Do at once what a rank of the cycle wants; before its exit or after makes no difference."""
        if event.rank not in self._current.ranks_of(event.node):
            return
        who = f"rank {event.rank} on {event.node}"
        asked = journal.ControlRequested(
            action=event.action.name, node=event.node, rank=event.rank, why=event.why
        )
        match event.action:
            case WorkloadAction.ExcludeThisNode:
                fault = request_fault(event)
                if fault not in self._current.faults:
                    self._write(asked)
                    self._fault(fault)
            case WorkloadAction.ShutdownWorkload if self._ending.end is None:
                self._write(asked)
                self._ending.end = End(EXIT_OK, f"{who} asked to shut the workload down: {event.why}")
                if self.phase in _AT_WORK:
                    self._stop_workers()

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
            case Timer.REJOIN:
                self.members.await_nobody()
                if self.phase is Phase.FORMING:
                    self._form()
            case Timer.FORM_GRACE if self.phase is Phase.FORMING:
                self._formation.grace_over = True
                self._form()
            case Timer.DELAY | Timer.VERDICT if self.phase is Phase.FORMING:
                self._wait_no_more(timer)
            case Timer.PROBE if self.phase is Phase.DIAGNOSING:
                self._diagnosed()
            case Timer.CONSULT if self.phase is Phase.CONSULTING and self._is_alone:
                self._do(steps.ConsultSlurm(), self._ending.await_answer())
            case Timer.CONSULT:
                self._slurm_answered(steps.SlurmAnswered(None))
            case Timer.STOP if self.phase is Phase.STOPPING:
                self._drop_slow_nodes()
            case _:
                pass

    def _drop_slow_nodes(self) -> None:
        slow = [node for node in self.active if node in self._current.stopping]
        reason = f"did not stop its workers within {self.policy.stop_timeout_s:g} s"
        for node in slow:
            self._put_out(node, reason)
        self._current.stopping.clear()
        self._all_stopped()

    def _end(self, code: int, why: str, hold: bool = False) -> None:
        if code == EXIT_RESTART_ELSEWHERE and not hold:
            self._judgement.measure(self._current, self._now)
            useless = self._judgement.useless_to_requeue(self._ending.draining, self._ending.preempted)
            if useless is not None:
                code, why = self.policy.limits.no_restart_code, f"{useless}: {why}"
        self._judgement.close(self._current)
        self.phase = Phase.ENDED
        self._do(*(Disarm(timer) for timer in Timer))
        self._write(journal.JobEnded(code=code, why=why))
        self._do(End(code, why, hold))
