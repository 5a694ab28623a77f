"""The rules that the state machine must keep, whatever happens; see DESIGN, "What must never happen"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from cycle_course import Course

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.past import FRUITLESS_ATTEMPTS, LONG_ENOUGH_S
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.coordinator.unhealthy import Complaint
from nvrx_slurm.journal import FaultKind
from nvrx_slurm.wire.rank_channel import WorkloadAction

NOT_ITS_OWN = (FaultKind.EXIT, FaultKind.OOM, FaultKind.REQUEST, FaultKind.UNHEALTHY)
"""Faults that do not count against a node: its script's, or it is out for them anyway."""


def what_failed(fault: journal.FaultDetected) -> tuple[str, str, str, int | None]:
    ended = fault.kind in (FaultKind.EXIT, FaultKind.SIGNAL)
    return ("ended" if ended else fault.kind.value, fault.detector, fault.node, fault.rank)


class Referee:
    """Sees every event and what the machine makes of it, and knows the rules."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.connected: dict[str, int] = {}
        self.excluded: set[str] = set()
        self.never_heard_of = set(policy.nodes)
        self.stopped: set[str] = set()
        """Nodes that have said that nothing of the present cycle is left on them."""
        self.group: tuple[str, ...] = ()
        self.cycle = policy.first_cycle - 1
        self.exits: dict[int, int] = {}
        self.slots = 0
        self.faults: list[journal.FaultDetected] = []
        self.verdicts = 0
        self.starts = 0
        self.ended: steps.End | None = None
        self.asked_to_end: set[int] = set()
        self.draining = False
        self.leaving: set[str] = set()
        self.lacked_nodes = False
        self.slurm_said: str | None = None
        self.preempted = False
        self.signals = 0
        self.shut_down = False
        self.stuck = False
        self.wanted_out: set[str] = set()
        self.complaints: dict[str, Complaint | None] = {}
        self.course = Course(policy)
        self.own_faults: Counter[str] = Counter(policy.past.faults)
        self.trials: dict[int, str] = {}
        """Places that a spare has taken over from a suspect, and the suspect."""
        self.restarted_at: list[float] = []
        self.now = 0.0
        self.began = 0.0

    def before(self, event: steps.Event, now: float) -> None:
        """Note what the world knows, before the machine hears of it."""
        self.now = now
        self.course.before(event, self.of_this_cycle(event))
        match event:
            case steps.ControlRequested(node, _, rank, action) if self.of_this_cycle(event):
                if self.owner(rank) == node and action is WorkloadAction.ExcludeThisNode:
                    self.wanted_out.add(node)
                elif self.owner(rank) == node and action is WorkloadAction.ShutdownWorkload:
                    # Who was told to stop before stops for that reason.
                    self.shut_down |= not self.signals and not self.stuck
            case steps.NodeJoined(node, slots) if node in self.policy.nodes and node not in self.excluded:
                self.slots = self.slots or slots
                if slots == self.slots:
                    self.connected[node] = slots
                    self.stopped.add(node)
                    self.leaving.discard(node)
                self.never_heard_of.discard(node)
            case steps.NodeHealth(node, complaint):
                self.complaints[node] = complaint
            case steps.NodeUnusable(node):
                self.never_heard_of.discard(node)
            case steps.NodeLost(node):
                self.connected.pop(node, None)
            case steps.NodeLeaving(node):
                self.leaving.add(node)
            case steps.NodeStopped(node, cycle) if cycle == self.cycle and node in self.group:
                self.stopped.add(node)
            case steps.RankExited(node, cycle, rank, code, after_stop):
                if cycle == self.cycle and not after_stop and self.owner(rank) == node:
                    self.exits.setdefault(rank, code)
            case steps.StopRequested(sig):
                self.signals += 1
                self.asked_to_end.add(128 + sig)
            case steps.DrainRequested():
                self.draining = True
            case steps.SlurmAnswered(state, preempted):
                self.slurm_said = state
                self.preempted |= preempted
            case steps.StepEnded() | steps.TimerFired(Timer.JOIN):
                self.never_heard_of.clear()
            case _:
                pass

    def of_this_cycle(self, event: steps.Event) -> bool:
        """Whether the event is about the present cycle, from a node that has a part in it."""
        cycle, node = getattr(event, "cycle", None), getattr(event, "node", None)
        return cycle == self.cycle and node in self.group and node in self.connected and not self.over

    @property
    def over(self) -> bool:
        """The present cycle has been stopped."""
        return self.course.over

    def owner(self, rank: int) -> str | None:
        place, slots = rank // max(self.slots, 1), self.slots
        return self.group[place] if 0 <= rank < len(self.group) * slots else None

    def after(self, commands: Iterable[steps.Command]) -> None:
        """Judge what the machine said."""
        for command in commands:
            assert self.ended is None, f"{command} after the end"
            match command:
                case steps.Write(event, cycle):
                    self.written(event, cycle)
                case steps.Disconnect(node):
                    assert node not in self.connected or node in self.excluded
                    self.connected.pop(node, None)
                case steps.StartCycle():
                    self.cycle_started(command)
                case steps.StopCycle(cycle, asked):
                    self.course.begin_stop(self.now)
                    assert cycle == self.cycle
                    assert set(asked) <= set(self.group) & set(self.connected)
                case steps.ProbeNodes(cycle, asked) | steps.AskRanksToStop(cycle, asked):
                    assert cycle == self.cycle
                    assert set(asked) <= set(self.group) & set(self.connected)
                case steps.Recall(node):
                    assert node not in self.connected, "nobody is called who is there"
                    assert node not in self.excluded, "nor who must stay away"
                case steps.ConsultSlurm():
                    self.lacked_nodes = self.lacks_nodes()
                case steps.End():
                    self.ends(command)
                case _:
                    pass

    def written(self, event: object, cycle: int) -> None:
        match event:
            case journal.NodeExcluded(node=node, on_trial=on_trial):
                assert node in self.policy.nodes
                self.excluded.add(node)
                if on_trial:
                    self.tried_without(node)
            case journal.WorkersStopped():
                self.course.end_cycle()
            case journal.CycleScored():
                assert self.policy.limits.max_no_progress_cycles, "nobody asked"
            case journal.FaultDetected():
                assert cycle == self.cycle
                self.fault(event)
            case journal.Verdict():
                assert cycle == self.cycle
                self.verdicts += 1
                assert self.verdicts == 1, "one verdict per cycle"
                if event.rule == "no-progress":
                    assert event.action is journal.VerdictAction.STOP
                    self.stuck = True
                    self.course.may_stop()
                    if event.kind is None:
                        return
                named = {(fault.node, fault.rank, fault.kind) for fault in self.faults}
                assert (event.node, event.rank, event.kind) in named, "the verdict names a fault of its cycle"
                self.count_own_fault(event)
            case _:
                pass

    def fault(self, fault: journal.FaultDetected) -> None:
        assert what_failed(fault) not in map(what_failed, self.faults), f"journalled twice: {fault}"
        if fault.kind is FaultKind.NODE_LOST:
            assert not self.done(fault.node), "a node that has finished is not missed"
        if fault.kind is FaultKind.UNHEALTHY:
            complaint = self.complaints[fault.node]
            assert complaint is not None
            young = self.now - self.began < 5.0
            assert complaint.node_lost or young, "what training can go on with does not stop it"
            assert not self.done(fault.node)
        if fault.kind is FaultKind.REQUEST:
            assert fault.node in self.wanted_out
        elif fault.rank is not None:
            assert self.owner(fault.rank) == fault.node
            assert self.exits.get(fault.rank, 1) != 0, "who has exited with 0 is blamed for nothing"
        self.faults.append(fault)

    def count_own_fault(self, verdict: journal.Verdict) -> None:
        for fault in self.faults:
            if (fault.node, fault.rank, fault.kind) == (verdict.node, verdict.rank, verdict.kind):
                if fault.kind not in NOT_ITS_OWN:
                    self.own_faults[fault.node] += 1
                    if fault.node in self.group and self.may_be_the_nodes(fault):
                        self.trials.pop(self.group.index(fault.node), None)
                return

    def may_be_the_nodes(self, fault: journal.FaultDetected) -> bool:
        aborted = fault.signal in ("SIGABRT", "SIGTERM", "SIGPIPE")
        return not aborted and fault.detector != "store"

    def tried_without(self, node: str) -> None:
        assert self.own_faults[node] >= self.policy.limits.exclude_after > 0, (
            "it had too few faults of its own"
        )
        assert len(self.usable() - {node}) >= self.policy.active_nodes, "there is no spare"
        self.trials[self.group.index(node)] = node

    def cycle_started(self, start: steps.StartCycle) -> None:
        assert start.cycle == self.cycle + 1
        assert len(start.nodes) == len(set(start.nodes)) == self.policy.active_nodes
        for node in start.nodes:
            assert node in self.connected, f"{node} is not there"
            assert node not in self.excluded, f"{node} is excluded"
            assert node not in self.leaving, f"{node} is leaving"
            assert node not in self.wanted_out, f"a rank wanted {node} out"
            assert not self.is_broken(node), f"{node} says that it is broken"
        assert start.slots == self.slots > 0
        for place, node in enumerate(self.group):
            if node in self.connected and node not in self.leaving:
                assert start.nodes[place] == node, "survivors keep their place"
        left = {node for node in self.group if node in self.connected} - self.stopped
        assert not left, f"ranks of cycle {self.cycle} are left on {left}"
        if self.starts:
            assert self.faults, "no cycle ends without a reason"
            assert self.verdicts == 1
            self.restarted_at.append(self.now)
            self.course.may_go_on()
        self.starts += 1
        assert self.starts - 1 <= self.policy.max_restarts
        assert not self.shut_down
        assert not self.draining
        assert not self.preempted
        most = self.policy.limits.max_restarts_per_hour
        if most is not None and len(self.restarted_at) > most:
            assert self.now - self.restarted_at[-1 - most] >= 3600, "too many within an hour"
        self.course.begin_cycle(self.now)
        self.began = self.now
        self.cycle, self.group = start.cycle, start.nodes
        self.stopped, self.exits, self.faults, self.verdicts = set(), {}, [], 0

    def is_broken(self, node: str) -> bool:
        """A node's own checks fail, and not on most nodes that could be used."""
        complaint = self.complaints.get(node)
        if complaint is None:
            return False
        alike = [
            other
            for other in self.usable()
            if (said := self.complaints.get(other)) is not None and said.check == complaint.check
        ]
        return len(alike) < 2 or 2 * len(alike) <= len(self.usable())

    def usable(self) -> set[str]:
        return set(self.connected) - self.leaving - self.excluded

    def lacks_nodes(self) -> bool:
        return len(self.usable() | self.never_heard_of - self.excluded) < self.policy.active_nodes

    def done(self, node: str) -> bool:
        """Every rank of the node has exited with 0, of its own accord."""
        first = self.group.index(node) * self.slots
        return all(self.exits.get(rank) == 0 for rank in range(first, first + self.slots))

    def ends(self, end: steps.End) -> None:
        self.ended = end
        world = set(range(self.policy.active_nodes * self.slots))
        everyone_finished = bool(world) and {r for r, code in self.exits.items() if code == 0} == world
        match end.code:
            case 0:
                assert everyone_finished or self.shut_down
                assert not self.draining or self.shut_down
            case 1:
                out_of_budget = self.starts - 1 == self.policy.max_restarts and self.faults
                assert out_of_budget or self.too_fast() or not self.starts
            case 2:
                assert not self.starts
            case 75:
                assert self.draining or self.lacked_nodes or self.lacks_nodes() or self.preempted
                assert not self.useless(), "it never comes to a step"
            case 93:
                if not self.useless():
                    self.course.may_stop()
            case code:
                assert code in self.asked_to_end or (code == 143 and self.slurm_said not in (None, "RUNNING"))
        if everyone_finished and not self.draining and not self.faults and not self.asked_to_end:
            assert end.code in (0, 93) if self.policy.has_iteration_file else end.code == 0
        if self.shut_down and self.signals < 2 and not self.preempted:
            assert end.code == 0, "whenever a rank shuts the workload down, that is the end"

    def too_fast(self) -> bool:
        most = self.policy.limits.max_restarts_per_hour
        return (
            most is not None and len(self.restarted_at) >= most and self.now - self.restarted_at[-most] < 3600
        )

    def useless(self) -> bool:
        """As many attempts as are allowed have not come to a step, whatever has ended this one."""
        course = self.course
        if self.policy.past.fruitless + 1 < FRUITLESS_ATTEMPTS or course.ever_trained or self.preempted:
            return False
        return course.monitored or (course.longest(self.now) < LONG_ENOUGH_S and not self.draining)
