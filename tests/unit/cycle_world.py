"""A world around the state machine: agents, ranks, Slurm, and people who interfere.

The world behaves as real agents do: each rank exits once, what is asked is answered or its timer fires. On
top of that come messages that are late, repeated, or from somebody who has no business sending them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from cycle_driver import node_names, snapshot
from cycle_referee import Referee

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.past import Past
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.coordinator.unhealthy import Complaint
from nvrx_slurm.wire.messages import RankSnapshot
from nvrx_slurm.wire.rank_channel import WorkloadAction

T = TypeVar("T")
EXIT_CODES = (0, 0, 1, 3, -6, -9, -11, -15)

CYCLE_EVENTS = (
    steps.StartFailed,
    steps.RankExited,
    steps.RankStalled,
    steps.SnapshotsTaken,
    steps.NodeReady,
    steps.NodeStepping,
    steps.StepReached,
    steps.CheckpointSaved,
    steps.CheckpointLoaded,
    steps.ControlRequested,
    steps.NodeStopped,
)
NEEDED_TIMER = {
    Phase.FORMING: {Timer.JOIN, Timer.REJOIN},
    Phase.DIAGNOSING: {Timer.PROBE},
    Phase.STOPPING: {Timer.STOP},
    Phase.CONSULTING: {Timer.CONSULT},
}
"""In every phase in which the machine waits for somebody, one of these says for how long."""


class Setting(NamedTuple):
    """How a schedule begins."""

    active: int = 2
    spares: int = 1
    slots: int = 2
    max_restarts: int = 3
    first_cycle: int = 0
    here: int = 3
    """Nodes whose agents have joined."""
    no_progress: int = 3
    least_progress: int = 1
    per_hour: int | None = None
    exclude_after: int = 3
    iteration_file: bool = False
    past: Past = Past()
    rejoin_timeout_s: float = 0.0
    """How long lost nodes are waited for."""
    term_timeout_s: float | None = None
    host: str | None = None
    """Where the Coordinator runs, if another may take over."""


class Move(NamedTuple):
    """One thing that happens; the numbers say to whom and how, counted round among what is possible."""

    what: str
    who: int = 0
    how: int = 0


class World:
    """Plays a schedule. A move that is not possible at the moment is left out."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.policy = Policy(
            nodes=node_names(setting.active + setting.spares),
            active_nodes=setting.active,
            max_restarts=setting.max_restarts,
            first_cycle=setting.first_cycle,
            limits=Limits(
                max_no_progress_cycles=setting.no_progress,
                min_progress_iterations=setting.least_progress,
                max_restarts_per_hour=setting.per_hour,
                exclude_after=setting.exclude_after,
            ),
            past=setting.past,
            has_iteration_file=setting.iteration_file,
            rejoin_timeout_s=setting.rejoin_timeout_s,
            term_timeout_s=setting.term_timeout_s,
            host=setting.host,
        )
        self.slots = setting.slots
        self.machine = CycleMachine(self.policy)
        self.referee = Referee(self.policy)
        self.timers: set[Timer] = set()
        self.alive: dict[str, set[int]] = {}
        """Ranks that run, per node."""
        self.asked_to_stop: set[str] = set()
        self.probed: set[str] = set()
        self.consulting = False
        self.to_read: list[int | None] = []
        """Cycles for which the iteration file is being read."""
        self.recalled: set[str] = set()
        self.past: list[steps.Event] = []
        self.now = 0.0
        self.carry_out(self.machine.start(self.now))
        for node in self.policy.nodes[: setting.here]:
            self.feed(steps.NodeJoined(node, setting.slots))

    def play(self, move: Move) -> None:
        if self.machine.phase is not Phase.ENDED or move.what == "an_old_message_comes_again":
            MOVES[move.what][1](self, move.who, move.how)

    # --- events in, commands out ---------------------------------------------------------------------

    def feed(self, event: steps.Event) -> None:
        self.now += 0.25
        was = self.machine.phase
        self.referee.before(event, self.now)
        commands = self.machine.handle(event, self.now)
        self.referee.after(commands)
        self.carry_out(commands)
        self.past.append(event)
        self.check(was, commands)

    def carry_out(self, commands: Iterable[steps.Command]) -> None:
        for command in commands:
            match command:
                case steps.Arm(timer):
                    self.timers.add(timer)
                case steps.Disarm(timer):
                    self.timers.discard(timer)
                case steps.StartCycle(_, active, slots):
                    self.asked_to_stop.clear()
                    self.probed.clear()
                    for place, node in enumerate(active):
                        self.alive[node] = set(range(place * slots, (place + 1) * slots))
                case steps.StopCycle(_, asked):
                    self.asked_to_stop |= set(asked)
                case steps.ProbeNodes(_, asked):
                    self.probed |= set(asked)
                case steps.Disconnect(node):
                    self.gone(node)
                case steps.ConsultSlurm():
                    self.consulting = True
                case steps.ReadIteration(cycle):
                    self.to_read.append(cycle)
                case steps.Recall(node):
                    self.recalled.add(node)
                case _:
                    pass

    def check(self, was: Phase, commands: Sequence[steps.Command]) -> None:
        """What holds after every event."""
        machine = self.machine
        written = [command.event for command in commands if isinstance(command, steps.Write)]
        faulty = any(isinstance(event, journal.FaultDetected) for event in written)
        if faulty and was in (Phase.RUNNING, Phase.DIAGNOSING):
            stops = any(isinstance(command, steps.StopCycle) for command in commands)
            assert stops, "a fault stops all ranks at once"
        proven = set(machine.proven_bad)
        assert proven <= set(self.referee.trials.values()), "a node whose fault has stayed is not the cause"
        if machine.phase is Phase.ENDED:
            assert not self.timers
            return
        needed = NEEDED_TIMER.get(machine.phase)
        assert needed is None or needed & self.timers, "whoever waits has a timer"
        referee = self.referee
        assert set(machine.members.usable) == referee.usable()
        match machine.phase:
            case Phase.FORMING:
                lacks = len(referee.usable()) < self.policy.active_nodes
                assert lacks or Timer.FORM_GRACE in self.timers, "it forms for no reason"
            case Phase.RUNNING | Phase.DIAGNOSING:
                missing = [n for n in referee.group if n not in referee.usable() and not referee.done(n)]
                assert not missing, f"it runs on without {missing}"
            case Phase.STOPPING:
                assert self.asked_to_stop, "it waits for nobody"
            case _:
                pass

    def gone(self, node: str) -> None:
        self.alive.pop(node, None)
        self.asked_to_stop.discard(node)
        self.probed.discard(node)

    # --- what can be chosen from ---------------------------------------------------------------------

    @property
    def connected(self) -> list[str]:
        return sorted(self.referee.connected)

    def running(self) -> list[tuple[str, int]]:
        """Ranks that are alive on nodes that are connected."""
        return sorted((node, rank) for node, ranks in self.alive.items() for rank in ranks)

    def ranks_of(self, node: str) -> list[int]:
        place = self.machine.active.index(node)
        return list(range(place * self.slots, (place + 1) * self.slots))

    def snapshots_of(self, node: str, how: int) -> tuple[RankSnapshot, ...]:
        state = "SSSRTDZ"[how % 7]
        return tuple(
            snapshot(rank, (how + rank) % 3, float(how % 5 + rank), state) for rank in self.ranks_of(node)
        )

    # --- moves ---------------------------------------------------------------------------------------

    def an_agent_comes(self, who: int, how: int) -> None:
        """Also where one is connected already, on a node of somebody else, or with other slots."""
        node = one_of([*self.policy.nodes, *self.policy.nodes, "x1"], who)
        self.gone(node)
        self.feed(steps.NodeJoined(node, one_of([self.slots] * 8 + [self.slots + 1, 0], how)))

    def a_missing_agent_comes(self, who: int, _how: int) -> None:
        missing = [node for node in self.policy.nodes if node not in self.connected]
        if missing:
            self.feed(steps.NodeJoined(one_of(missing, who), self.slots))

    def a_lost_node_stays_away(self, who: int, _how: int) -> None:
        """Whoever was to bring it back has given up, or answers late."""
        if self.recalled:
            self.feed(steps.NodeStaysAway(one_of(sorted(self.recalled), who), "Slurm has taken it out"))

    def an_agent_cannot_take_part(self, who: int, _how: int) -> None:
        node = one_of([*self.policy.nodes, "x1"], who)
        self.feed(steps.NodeUnusable(node, "--nproc-per-node=gpu, but there is no GPU"))

    def a_node_is_lost(self, who: int, _how: int) -> None:
        node = one_of([*self.policy.nodes, "x1"], who)
        self.gone(node)
        self.feed(steps.NodeLost(node, "its connection broke"))

    def an_agent_leaves(self, who: int, how: int) -> None:
        """It says so, stops its ranks, and goes when the world is settled at the latest."""
        if not self.connected:
            return
        node = one_of(self.connected, who)
        cycle = self.machine.cycle
        self.feed(steps.NodeLeaving(node, "the agent received SIGTERM", by_signal=how % 3 > 0))
        for rank in sorted(self.alive.pop(node, ())):
            self.feed(steps.RankExited(node, cycle, rank, one_of(EXIT_CODES, how + rank), True))

    def a_rank_exits(self, who: int, how: int) -> None:
        if running := self.running():
            node, rank = one_of(running, who)
            self.alive[node].discard(rank)
            after_stop = node in self.asked_to_stop
            self.feed(steps.RankExited(node, self.machine.cycle, rank, one_of(EXIT_CODES, how), after_stop))

    def ranks_finish(self, who: int, how: int) -> None:
        for node, rank in self.running()[who % 2 : how % 8]:
            if node not in self.asked_to_stop and rank in self.alive.get(node, ()):
                self.alive[node].discard(rank)
                self.feed(steps.RankExited(node, self.machine.cycle, rank, 0, False))

    def a_rank_is_late(self, who: int, how: int) -> None:
        if running := self.running():
            node, rank = one_of(running, who)
            late = steps.RankStalled(node, self.machine.cycle, rank, 6.0, self.snapshots_of(node, how))
            self.feed(late)

    def a_probe_is_answered(self, who: int, how: int) -> None:
        if self.probed:
            node = one_of(sorted(self.probed), who)
            self.probed.discard(node)
            self.feed(steps.SnapshotsTaken(node, self.machine.cycle, self.snapshots_of(node, how)))

    def a_node_has_stopped(self, who: int, how: int) -> None:
        if self.asked_to_stop:
            self.stop(one_of(sorted(self.asked_to_stop), who), how)

    def stop(self, node: str, how: int = 1) -> None:
        cycle = self.machine.cycle
        for rank in sorted(self.alive.pop(node, ())):
            self.feed(steps.RankExited(node, cycle, rank, -15, after_stop=True))
        self.asked_to_stop.discard(node)
        self.feed(steps.NodeStopped(node, cycle, stalled_s=0.5 if how % 5 == 0 else None))

    def a_node_is_ready(self, who: int, how: int) -> None:
        node = one_of(self.policy.nodes, who)
        if how % 2:
            self.feed(steps.NodeReady(node, self.machine.cycle))
        else:
            self.feed(steps.NodeStepping(node, self.machine.cycle, how if how % 4 else None))

    def training_tells_a_step(self, who: int, how: int) -> None:
        """A heartbeat, or a checkpoint that was saved or loaded, by a node that has ranks."""
        if self.machine.active:
            node, cycle, step = one_of(self.machine.active, who), self.machine.cycle, how // 3 * (1 + who % 3)
            saying = one_of([steps.StepReached, steps.CheckpointSaved, steps.CheckpointLoaded], how)
            self.feed(saying(node, cycle, step))

    def the_iteration_file_is_read(self, who: int, how: int) -> None:
        """In any order; some readings never end."""
        if self.to_read:
            cycle = self.to_read.pop(who % len(self.to_read))
            self.feed(steps.IterationRead(cycle, one_of([None, 0, how], who)))

    def a_rank_asks(self, who: int, how: int) -> None:
        """For its node's exclusion mostly; also when it has ended, or its cycle is being stopped."""
        if self.machine.active:
            node = one_of(self.machine.active, who)
            rank = one_of(self.ranks_of(node), how)
            action = WorkloadAction.ShutdownWorkload if how % 6 == 0 else WorkloadAction.ExcludeThisNode
            self.feed(steps.ControlRequested(node, self.machine.cycle, rank, action, "a GPU is slow"))

    def a_node_looks_at_itself(self, who: int, how: int) -> None:
        """And finds one of two things broken, or nothing; one of the two on many nodes."""
        node = one_of([*self.policy.nodes, "x1"], who)
        found = [
            None,
            None,
            Complaint("paths", "paths /scratch: no answer", node_lost=False),
            Complaint("gpu-lost", "gpu-lost gpu 3: fallen off the bus", node_lost=True),
        ]
        self.feed(steps.NodeHealth(node, one_of(found, how)))

    def time_passes(self, _who: int, how: int) -> None:
        self.now += one_of([1.0, 100.0, 1000.0, 4000.0], how)

    def ranks_cannot_start(self, who: int, _how: int) -> None:
        starting = [node for node in self.alive if node not in self.asked_to_stop]
        if starting:
            node = one_of(starting, who)
            self.alive[node].clear()
            self.feed(steps.StartFailed(node, self.machine.cycle, "no space left on device"))

    def a_timer_fires(self, who: int, _how: int) -> None:
        if self.timers:
            self.fire(one_of(sorted(self.timers, key=lambda timer: timer.value), who))

    def fire(self, timer: Timer) -> None:
        self.timers.discard(timer)
        self.feed(steps.TimerFired(timer))

    def slurm_answers(self, who: int, how: int) -> None:
        if self.consulting:
            self.consulting = False
            state = one_of([None, "RUNNING", "CANCELLED", "gone"], who)
            # What is answered too late is not listened to.
            in_time = self.machine.phase is Phase.CONSULTING or self.referee.shut_down
            preempted = in_time and state == "RUNNING" and how % 2 == 0
            self.feed(steps.SlurmAnswered(state, preempted=preempted))

    def the_store_dies(self, _who: int, _how: int) -> None:
        self.feed(steps.StoreLost("n1", "the store's process ended with -9"))

    def srun_ends(self, _who: int, _how: int) -> None:
        self.feed(steps.StepEnded("srun ended with 1"))

    def somebody_stops_the_job(self, who: int, _how: int) -> None:
        self.feed(steps.StopRequested(one_of([signal.SIGTERM, signal.SIGINT], who)))

    def the_time_is_nearly_over(self, _who: int, how: int) -> None:
        if how % 2:
            self.feed(steps.DrainRequested(signal.SIGUSR2))
        else:
            self.feed(steps.DrainRequested(why="the time limit, 120 s away"))

    def an_old_message_comes_again(self, who: int, _how: int) -> None:
        """Agents say everything once, but nothing may depend on that."""
        said = [event for event in self.past if isinstance(event, CYCLE_EVENTS)]
        if said:
            event = one_of(said[-12:], who)
            if event.cycle != self.machine.cycle or event.node in self.connected:
                self.feed(event)

    def a_stranger_speaks(self, who: int, how: int) -> None:
        """About another cycle, or about ranks that are not its own."""
        machine = self.machine
        node = one_of([*self.policy.nodes, "x1"], who)
        rank = one_of(range(-2, 12), how)
        cycle = machine.cycle + one_of([0, 0, -1, 1, -7], who + how)
        if cycle == machine.cycle and self.referee.owner(rank) == node:
            return
        untrue = (snapshot(rank, 0, 99.0, "T"),)
        said: list[steps.Event] = [
            steps.RankExited(node, cycle, rank, one_of(EXIT_CODES, how), False),
            steps.RankStalled(node, cycle, rank, 6.0, untrue),
            steps.SnapshotsTaken(node, cycle, untrue),
            steps.ControlRequested(node, cycle, rank, WorkloadAction(1 + how % 2), "by a stranger"),
        ]
        if cycle != machine.cycle or node not in self.referee.group:
            said += [
                steps.NodeStopped(node, cycle),
                steps.StartFailed(node, cycle, "no space"),
                steps.StepReached(node, cycle, 10**6),
                steps.CheckpointSaved(node, cycle, 10**6),
            ]
        self.feed(one_of(said, who))

    # --- the end -------------------------------------------------------------------------------------

    def play_to_the_end(self) -> None:
        """Once the world is calm, the job runs or has ended; and if it runs, it can finish."""
        self.settle()
        if self.machine.phase is Phase.RUNNING:
            for node, rank in self.running():
                self.alive[node].discard(rank)
                self.feed(steps.RankExited(node, self.machine.cycle, rank, 0, after_stop=False))
        self.settle()
        assert self.machine.phase is Phase.ENDED, "every rank has exited with 0, and the job goes on"
        assert self.referee.ended is not None

    def settle(self) -> None:
        """Whoever leaves is gone, everybody answers, every timer fires."""
        for _ in range(40):
            leaving = sorted(self.referee.leaving & set(self.connected))
            if self.machine.phase is Phase.ENDED or (self.machine.phase is Phase.RUNNING and not leaving):
                return
            for node in leaving:
                self.gone(node)
                self.feed(steps.NodeLost(node, "its connection broke"))
            for node in sorted(self.probed):
                self.probed.discard(node)
                self.feed(steps.SnapshotsTaken(node, self.machine.cycle, ()))
            for node in sorted(self.asked_to_stop):
                self.stop(node)
            if self.machine.phase is Phase.CONSULTING and self.setting.host is not None:
                # Alone, it waits for Slurm for as long as that takes.
                self.feed(steps.SlurmAnswered("RUNNING"))
            for timer in sorted(self.timers, key=lambda timer: timer.value):
                if timer in self.timers:
                    self.fire(timer)
        raise AssertionError(f"a dead end: {self.machine.phase}")


def one_of(choices: Sequence[T], number: int) -> T:
    return choices[number % len(choices)]


MOVES: dict[str, tuple[int, Callable[[World, int, int], None]]] = {
    move.__name__: (weight, move)
    for weight, move in (
        (3, World.an_agent_comes),
        (30, World.a_missing_agent_comes),
        (8, World.a_lost_node_stays_away),
        (2, World.an_agent_cannot_take_part),
        (8, World.a_node_is_lost),
        (6, World.an_agent_leaves),
        (20, World.a_rank_exits),
        (8, World.ranks_finish),
        (16, World.a_rank_is_late),
        (24, World.a_probe_is_answered),
        (60, World.a_node_has_stopped),
        (12, World.a_node_is_ready),
        (24, World.training_tells_a_step),
        (12, World.the_iteration_file_is_read),
        (3, World.a_rank_asks),
        (4, World.a_node_looks_at_itself),
        (8, World.time_passes),
        (4, World.ranks_cannot_start),
        (10, World.a_timer_fires),
        (8, World.slurm_answers),
        (4, World.the_store_dies),
        (1, World.srun_ends),
        (1, World.somebody_stops_the_job),
        (2, World.the_time_is_nearly_over),
        (14, World.an_old_message_comes_again),
        (14, World.a_stranger_speaks),
    )
}
"""How often each move is tried, and what it does."""
