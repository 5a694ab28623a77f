"""What is known of the ranks of one cycle: who has ended, who is late, what went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nvrx_slurm.coordinator.blame import find_hung_rank
from nvrx_slurm.coordinator.progress import Signs, highest
from nvrx_slurm.coordinator.steps import CheckpointLoaded, CheckpointSaved, StepReached
from nvrx_slurm.journal import FaultDetected, FaultKind
from nvrx_slurm.wire.messages import RankSnapshot


@dataclass
class RunningCycle:
    """One attempt of the whole worker group."""

    nodes: tuple[str, ...] = ()
    """Position is the group rank."""
    slots: int = 0
    began: float = 0.0
    signs: Signs = field(default_factory=Signs)
    exited: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    """Those that exited with 0 and had not been asked to stop."""
    faults: list[FaultDetected] = field(default_factory=list)
    untold: list[FaultDetected] = field(default_factory=list)
    """Those that are none if it turns out that the job is being ended."""
    to_probe: set[str] = field(default_factory=set)
    """Nodes whose snapshots are missing in the search for the hung rank."""
    stopping: set[str] = field(default_factory=set)
    """Nodes that have not stopped their workers yet."""
    stop_began: float | None = None
    stalled_s: float | None = None
    """How long no rank had sent a heartbeat when the stop began, as far as its nodes have told."""
    _ready: set[str] = field(default_factory=set)
    _stepping: set[str] = field(default_factory=set)
    _stalled: dict[int, str] = field(default_factory=dict)
    """Ranks that missed a deadline, and which; the first comes first."""
    _snapshots: dict[int, RankSnapshot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._group_ranks = {node: group_rank for group_rank, node in enumerate(self.nodes)}

    def __contains__(self, node: str) -> bool:
        return node in self._group_ranks

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.slots

    def ranks_of(self, node: str) -> range:
        """Return the ranks on ``node``, which must be one of :attr:`nodes`."""
        first = self._group_ranks[node] * self.slots
        return range(first, first + self.slots)

    def place_of(self, node: str) -> int | None:
        """Return the group rank of ``node``; None: it has none."""
        return self._group_ranks.get(node)

    def is_alive(self, node: str, rank: int) -> bool:
        """Tell whether ``rank`` belongs to ``node`` and has not been seen to exit."""
        return rank in self.ranks_of(node) and rank not in self.exited

    def needs(self, node: str) -> bool:
        """Tell whether a rank on ``node`` has not finished."""
        return node in self and not self.finished.issuperset(self.ranks_of(node))

    def all_ready_with(self, node: str) -> bool:
        """Note that the ranks on ``node`` are ready; tell whether it is the last of all nodes."""
        return self._last_of_all(node, self._ready)

    def all_stepping_with(self, node: str) -> bool:
        """Note that the ranks on ``node`` have come to a step; tell whether it is the last of all nodes."""
        return self._last_of_all(node, self._stepping)

    def _last_of_all(self, node: str, noted: set[str]) -> bool:
        if node in noted:
            return False
        noted.add(node)
        return len(noted) == len(self.nodes)

    def note_step(self, event: StepReached | CheckpointSaved | CheckpointLoaded) -> None:
        """Take how far a rank says that it is, or that its checkpoint is."""
        match event:
            case StepReached(step=step):
                self.signs.step = highest(self.signs.step, step)
            case CheckpointSaved(step=step):
                self.signs.saved = highest(self.signs.saved, step)
            case CheckpointLoaded(step=step):
                self.signs.loaded = highest(self.signs.loaded, step)

    def note_stalled(self, stalled_s: float | None) -> None:
        """Take one node's word; training stood still as long as the last heartbeat of any node is old."""
        self.signs.heartbeat |= stalled_s is not None
        known = [seconds for seconds in (self.stalled_s, stalled_s) if seconds is not None]
        self.stalled_s = min(known, default=None)

    def note_fault(self, fault: FaultDetected) -> bool:
        """Add ``fault``; False if it is a known one seen again."""
        if any(_same_failure(fault, known) for known in self.faults):
            return False
        self.faults.append(fault)
        return True

    # --- hangs ---------------------------------------------------------------------------------------

    def note_stall(self, rank: int, why: str) -> None:
        self._stalled.setdefault(rank, why)

    def begin_probe(self, nodes: Sequence[str]) -> None:
        """Forget old snapshots; wait for those of ``nodes``."""
        self._snapshots.clear()
        self.to_probe = set(nodes)

    def take_snapshots(self, node: str, snapshots: Sequence[RankSnapshot]) -> None:
        """Note what ``node`` says about its own ranks."""
        own = self.ranks_of(node)
        self._snapshots.update((taken.rank, taken) for taken in snapshots if taken.rank in own)
        self.to_probe.discard(node)

    def hang(self) -> FaultDetected | None:
        """Return who hangs; None if every late rank has ended meanwhile."""
        late = [rank for rank in self._stalled if rank not in self.exited]
        if not late:
            return None
        snapshots = [taken for taken in self._snapshots.values() if taken.rank not in self.exited]
        rank, why = find_hung_rank(snapshots, late[0])
        return FaultDetected(
            kind=FaultKind.HANG,
            node=self.nodes[rank // self.slots],
            rank=rank,
            detector="heartbeat",
            detail=f"{self._stalled[late[0]]}; {why}",
        )


def _same_failure(one: FaultDetected, other: FaultDetected) -> bool:
    """Tell whether two faults are the same thing seen twice."""
    alike = one.kind is other.kind and one.detector == other.detector
    return alike and (one.node, one.rank) == (other.node, other.rank)
