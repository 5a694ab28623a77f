"""A job around the state machine, without processes: its events in short, its commands and journal."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.past import Past
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.wire.messages import RankSnapshot
from nvrx_slurm.wire.rank_channel import WorkloadAction

T = TypeVar("T")


def node_names(count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(1, count + 1))


class Job:
    """Feeds a machine and keeps what it said. Nodes are n1, n2, …; the spares are the last of them."""

    def __init__(
        self,
        active: int = 2,
        spares: int = 0,
        max_restarts: int = 3,
        slots: int = 2,
        *,
        past: Past | None = None,
        iteration_file: bool = False,
        placing: Mapping[str, Any] | None = None,
        **limits: int | None,
    ) -> None:
        """``placing``: what :class:`Policy` says of topology, segments and nodes that come back."""
        self.policy = Policy(
            nodes=node_names(active + spares),
            active_nodes=active,
            max_restarts=max_restarts,
            limits=Limits(**limits),  # type: ignore[arg-type]
            past=past or Past(),
            has_iteration_file=iteration_file,
            **(placing or {}),
        )
        self.slots = slots
        self.machine = CycleMachine(self.policy)
        self.now = 100.0
        self.timers: dict[steps.Timer, float] = {}
        self.commands: list[steps.Command] = []
        """Everything since the beginning."""
        self.last: list[steps.Command] = []
        """What the last event brought."""
        self._take(self.machine.start(self.now))

    def _take(self, commands: list[steps.Command]) -> list[steps.Command]:
        self.last = commands
        self.commands += commands
        for command in commands:
            match command:
                case steps.Arm():
                    self.timers[command.timer] = command.seconds
                case steps.Disarm():
                    self.timers.pop(command.timer, None)
                case _:
                    pass
        return commands

    # --- events --------------------------------------------------------------------------------------

    def feed(self, event: steps.Event) -> list[steps.Command]:
        return self._take(self.machine.handle(event, self.now))

    def join(self, *nodes: str, slots: int | None = None) -> Job:
        for node in nodes:
            self.feed(steps.NodeJoined(node, self.slots if slots is None else slots))
        return self

    def lose(self, *nodes: str, by_signal: bool = False) -> Job:
        for node in nodes:
            self.feed(steps.NodeLost(node, "its connection broke", by_signal))
        return self

    def exit(self, rank: int, code: int, *, after_stop: bool = False, cycle: int | None = None) -> Job:
        cycle = self.machine.cycle if cycle is None else cycle
        self.feed(steps.RankExited(self.node_of(rank), cycle, rank, code, after_stop))
        return self

    def exit_all(self, code: int = 0, *, but: Sequence[int] = ()) -> Job:
        for rank in range(self.machine.world_size):
            if rank not in but:
                self.exit(rank, code)
        return self

    def stall(self, rank: int, *snapshots: RankSnapshot) -> Job:
        self.feed(steps.RankStalled(self.node_of(rank), self.machine.cycle, rank, 6.0, snapshots))
        return self

    def answer_probe(self, node: str, *snapshots: RankSnapshot) -> Job:
        self.feed(steps.SnapshotsTaken(node, self.machine.cycle, snapshots))
        return self

    def stopped(self, *nodes: str) -> Job:
        cycle = self.machine.cycle
        for node in nodes:
            self.feed(steps.NodeStopped(node, cycle))
        return self

    def fails(self, rank: int = 0, code: int = 1) -> Job:
        """A rank exits, and every node stops its ranks."""
        return self.exit(rank, code).stopped(*self.machine.active)

    def trains(self, step: int, rank: int = 0) -> Job:
        self.feed(steps.StepReached(self.node_of(rank), self.machine.cycle, step))
        return self

    def saves(self, step: int, rank: int = 0) -> Job:
        self.feed(steps.CheckpointSaved(self.node_of(rank), self.machine.cycle, step))
        return self

    def loads(self, step: int, rank: int = 0) -> Job:
        self.feed(steps.CheckpointLoaded(self.node_of(rank), self.machine.cycle, step))
        return self

    def file_says(self, step: int | None) -> Job:
        """The last reading of the checkpoint-iteration file that was asked for comes back."""
        self.feed(steps.IterationRead(self.all(steps.ReadIteration)[-1].cycle, step))
        return self

    def asks(self, rank: int, action: WorkloadAction, why: str = "a GPU is slow") -> Job:
        node, cycle = self.node_of(rank), self.machine.cycle
        self.feed(steps.ControlRequested(node, cycle, rank, action, why))
        return self

    def later(self, seconds: float) -> Job:
        self.now += seconds
        return self

    def fire(self, timer: steps.Timer) -> Job:
        seconds = self.timers.pop(timer)
        self.now += seconds
        self.feed(steps.TimerFired(timer))
        return self

    def signal(self, sig: signal.Signals = signal.SIGTERM) -> Job:
        """Slurm, if it is asked, has cancelled the job."""
        asked = self.feed(steps.StopRequested(sig))
        if self.new(steps.ConsultSlurm):
            self.slurm_answers("CANCELLED")
            self.last = asked + self.last
        return self

    def slurm_answers(self, state: str | None, *, preempted: bool = False) -> Job:
        self.feed(steps.SlurmAnswered(state, preempted))
        return self

    def drain(self) -> Job:
        self.feed(steps.DrainRequested(signal.SIGUSR2))
        return self

    @classmethod
    def running(cls, active: int = 2, spares: int = 0, **options: Any) -> Job:
        """A job whose agents have all come and whose first cycle runs."""
        job = cls(active=active, spares=spares, **options)
        return job.join(*job.policy.nodes)

    # --- what came of it -----------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.machine.phase

    def node_of(self, rank: int) -> str:
        return self.machine.active[rank // self.slots]

    def all(self, kind: type[T]) -> list[T]:
        """Every command of one kind so far."""
        return [command for command in self.commands if isinstance(command, kind)]

    def new(self, kind: type[T]) -> list[T]:
        """Commands of one kind that the last event brought."""
        return [command for command in self.last if isinstance(command, kind)]

    @property
    def journal(self) -> list[AnyEvent]:
        return [write.event for write in self.all(steps.Write)]

    def written(self, kind: type[T]) -> list[T]:
        return [event for event in self.journal if isinstance(event, kind)]

    @property
    def faults(self) -> list[journal.FaultDetected]:
        return self.written(journal.FaultDetected)

    @property
    def verdict(self) -> journal.Verdict:
        return self.written(journal.Verdict)[-1]

    @property
    def started(self) -> list[tuple[str, ...]]:
        """The nodes of every cycle so far, in the order of their group ranks."""
        return [start.nodes for start in self.all(steps.StartCycle)]

    @property
    def end(self) -> steps.End:
        (end,) = self.all(steps.End)
        assert isinstance(end, steps.End)
        return end


def snapshot(
    rank: int, heartbeats: int = 10, age_s: float = 6.0, state: str = "S", *, monitored: bool = True
) -> RankSnapshot:
    return RankSnapshot(
        rank=rank, heartbeats=heartbeats, age_s=age_s, process_state=state, monitored=monitored
    )
