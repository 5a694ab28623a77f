"""Who waits for whom: counters compared within each group, and the graph of what blocks each rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from nvrx_slurm.attribution.flight_recorder.trace import GroupKey, Op, RankTrace, parse_ranks

_SKEW_SEQUENCES = 2
"""A lag of more operations than this is believed even if the dumps were not taken at one moment."""
_JUST_NOW_S = 0.2
"""Nobody need have launched what a peer launched so shortly before, or less than a usual operation before."""
_LIVELY_S = 0.3
"""Who launched an operation so shortly before its own dump is not stuck in Python, nor in that operation."""
_STUCK_S = 2.0
"""Who has waited so long by its own clock is waiting in vain, whatever the clocks of the others say."""


@dataclass(frozen=True)
class OpKey:
    """One operation of one group; the peer-to-peer ones also by their two ends."""

    group: GroupKey
    sequence: int
    peers: tuple[int, int] | None = None


@dataclass(frozen=True)
class Lag:
    """A rank is behind the members of a group: ``mine`` < ``theirs``, both collective numbers."""

    rank: int
    group: GroupKey
    mine: int
    theirs: int
    op: Op | None = None


@dataclass
class Stall:
    """The state of all ranks at the moment of the dumps.

    Args:
        traces: by rank; some may be missing.
        world_size: ranks of the job.
    """

    traces: Mapping[int, RankTrace]
    world_size: int
    members: dict[GroupKey, tuple[int, ...]] = field(init=False)
    """Global ranks in the order of the group, those without a dump included."""

    def __post_init__(self) -> None:
        self.members = self._find_members()

    def _find_members(self) -> dict[GroupKey, tuple[int, ...]]:
        present: dict[GroupKey, list[int]] = defaultdict(list)
        used: dict[GroupKey, list[int]] = defaultdict(list)
        for rank in sorted(self.traces):
            for key, state in self.traces[rank].groups.items():
                present[key].append(rank)
                if state.used or state.enqueued >= 0:
                    used[key].append(rank)
        found = {}
        for key, ranks in present.items():
            named = parse_ranks(key.ranks)
            if named:
                found[key] = named
            elif len(ranks) == len(self.traces):
                found[key] = tuple(range(self.world_size))  # gloo's default group names no members
            else:
                found[key] = tuple(used[key])
        return found

    @cached_property
    def mixed(self) -> frozenset[GroupKey]:
        """Groups with peer-to-peer operations: their counters cannot be compared."""
        return frozenset(
            key for trace in self.traces.values() for key, state in trace.groups.items() if state.has_p2p
        )

    @cached_property
    def _lowest(self) -> dict[GroupKey, int]:
        """Lowest known enqueued number of each group."""
        lowest: dict[GroupKey, int] = {}
        for trace in self.traces.values():
            for key, state in trace.groups.items():
                if state.enqueued >= 0:
                    lowest[key] = min(lowest.get(key, state.enqueued), state.enqueued)
        return lowest

    @cached_property
    def _highest(self) -> dict[GroupKey, tuple[int, int, int]]:
        """Highest enqueued and completed number of each group, and a rank that completed it."""
        highest: dict[GroupKey, tuple[int, int, int]] = {}
        for rank, trace in self.traces.items():
            for key, state in trace.groups.items():
                enqueued, completed, who = highest.get(key, (-1, -1, -1))
                if state.completed > completed:
                    completed, who = state.completed, rank
                highest[key] = (max(enqueued, state.enqueued), completed, who)
        return highest

    def host_lags(self) -> list[Lag]:
        """Return the ranks that never launched what a peer launched: stuck in Python or data, or astray."""
        return [
            Lag(rank, key, state.enqueued, self._highest[key][0])
            for rank, trace in sorted(self.traces.items())
            for key, state in trace.groups.items()
            if key not in self.mixed and 0 <= state.enqueued < self._highest[key][0]
        ]

    def is_fresh(self, lag: Lag) -> bool:
        """Tell whether the peers launched what the rank lacks only after its dump was taken, or just before.

        Dumps of several nodes are not taken at one moment, and a job that is merely slow goes on meanwhile.
        False where the dumps do not tell.
        """
        trace = self.traces[lag.rank]
        idle = trace.idle_s if lag.op is None else trace.age_s(lag.group, lag.mine)
        # A launch may be recorded while the dump is being written.
        if idle is not None and -_JUST_NOW_S <= idle < _LIVELY_S:
            return True
        ahead = {n: launch for n, launch in self._launches.get(lag.group, {}).items() if n > lag.mine}
        if trace.written_at is None or not ahead or min(ahead) - lag.mine > _SKEW_SEQUENCES:
            return False
        usual = min(max(_JUST_NOW_S, trace.typical_op_s or 0.0), _STUCK_S)
        return all(at > trace.written_at - usual and waited < _STUCK_S for at, waited in ahead.values())

    @cached_property
    def _launches(self) -> dict[GroupKey, dict[int, tuple[float, float]]]:
        """When each of the newest operations was first launched, and how long before its rank's dump."""
        found: dict[GroupKey, dict[int, tuple[float, float]]] = defaultdict(dict)
        for trace in self.traces.values():
            for key, number, launched in trace.launches if trace.written_at is not None else ():
                before = (trace.written_at or 0.0) - launched
                at, waited = found[key].get(number, (launched, before))
                found[key][number] = (min(at, launched), max(waited, before))
        return found

    def device_lags(self) -> list[Lag]:
        """Return the ranks that launched an operation which others completed, and did not complete it."""
        found = []
        for rank, trace in sorted(self.traces.items()):
            oldest: dict[GroupKey, Op] = {}
            for key, op in trace.pending:
                if not op.is_p2p and key not in self.mixed:
                    oldest.setdefault(key, op)
            for key, op in oldest.items():
                _, completed, who = self._highest[key]
                if op.collective_seq_id <= completed and not self._skewed(rank, who, op, completed):
                    found.append(Lag(rank, key, op.collective_seq_id, completed, op))
        return found

    def _skewed(self, rank: int, other: int, op: Op, completed: int) -> bool:
        """Tell whether the other rank's dump may merely be the younger one."""
        mine, theirs = self.traces[rank], self.traces[other]
        if mine.written_at is None or theirs.written_at is None:
            return False
        typical = max(mine.typical_op_s or 0.0, theirs.typical_op_s or 0.0, 1.0)
        younger = theirs.written_at - mine.written_at > typical
        return younger and completed - op.collective_seq_id < _SKEW_SEQUENCES

    def waits_on_somebody(self, rank: int) -> bool:
        """Tell whether the rank waits for a member that has not come to the operation, or left no dump."""
        pending = [
            (key, op) for key, op in self.traces[rank].pending if key not in self.mixed and not op.is_p2p
        ]
        if any(self._lowest.get(key, 0) < op.collective_seq_id for key, op in pending):
            return True
        # All members that left a dump have launched it: it would end if the others had.
        return any(not self.traces.keys() >= self._member_sets[key] for key, _ in pending[:1])

    @cached_property
    def _member_sets(self) -> dict[GroupKey, frozenset[int]]:
        return {key: frozenset(members) for key, members in self.members.items()}

    @cached_property
    def _slowest_first(self) -> dict[GroupKey, list[tuple[int, int]]]:
        """Enqueued number and rank of each group's members, sorted."""
        found: dict[GroupKey, list[tuple[int, int]]] = defaultdict(list)
        for rank, trace in self.traces.items():
            for key, state in trace.groups.items():
                if state.enqueued >= 0:
                    found[key].append((state.enqueued, rank))
        return {key: sorted(members) for key, members in found.items()}

    def waits_for(self, rank: int, limit: int) -> list[int]:
        """Return the ranks that ``rank`` waits for, at most ``limit``, those that are furthest behind."""
        found: set[int] = set()
        for key, op in self.traces[rank].pending:
            if key in self.mixed or op.is_p2p:
                continue
            for enqueued, member in self._slowest_first.get(key, ()):
                if enqueued >= op.collective_seq_id or len(found) >= limit:
                    break
                if member != rank:
                    found.add(member)
        return sorted(found)

    @cached_property
    def heads(self) -> dict[int, OpKey]:
        """The operation that blocks each stalled rank."""
        return {
            rank: self._op_key(rank, *trace.head)
            for rank, trace in self.traces.items()
            if trace.head is not None
        }

    def _op_key(self, rank: int, key: GroupKey, op: Op) -> OpKey:
        if not op.is_p2p:
            return OpKey(key, op.collective_seq_id)
        members = self.members[key]
        peer = op.peer(members.index(rank)) if rank in members else None
        if peer is None or peer >= len(members):
            return OpKey(key, op.p2p_seq_id, (rank, rank))
        low, high = sorted((rank, members[peer]))
        return OpKey(key, op.p2p_seq_id, (low, high))

    def blockers(self, op: OpKey) -> list[int]:
        """Return the ranks that an operation waits for: members that are not in it, or that have no dump."""
        members = self.members[op.group] if op.peers is None else op.peers
        return [member for member in members if self.heads.get(member) != op]

    def stalled_without(self, culprits: Iterable[int]) -> set[int]:
        """Return the stalled ranks whose chain of waiting ends at none of ``culprits``."""
        waiting: dict[OpKey, list[int]] = defaultdict(list)
        for rank, op in self.heads.items():
            waiting[op].append(rank)
        waits: dict[int, list[OpKey]] = defaultdict(list)
        for op in waiting:
            for member in self.blockers(op):
                waits[member].append(op)
        reached, todo = set(culprits), list(culprits)
        while todo:
            for op in waits.get(todo.pop(), ()):
                for rank in waiting[op]:
                    if rank not in reached:
                        reached.add(rank)
                        todo.append(rank)
        return set(self.heads) - reached

    def reachable_from(self, ranks: Iterable[int]) -> set[int]:
        """Return every rank that the given ones wait for, directly or through others."""
        reached: set[int] = set()
        done: set[OpKey] = set()
        todo = list(ranks)
        while todo:
            op = self.heads.get(todo.pop())
            if op is None or op in done:
                continue
            done.add(op)
            for member in self.blockers(op):
                if member not in reached:
                    reached.add(member)
                    todo.append(member)
        return reached

    def circle(self) -> list[int]:
        """Return ranks that wait for each other in a circle, or nothing."""
        colour: dict[int, int] = {}
        for start in sorted(self.heads):
            path: list[int] = []
            todo = [(start, False)]
            while todo:
                rank, leaving = todo.pop()
                if leaving:
                    colour[rank] = 2
                    path.pop()
                    continue
                if colour.get(rank) == 1:
                    return sorted(path[path.index(rank) :])
                if rank in colour or rank not in self.heads:
                    continue
                colour[rank] = 1
                path.append(rank)
                todo.append((rank, True))
                todo.extend((blocker, False) for blocker in self.blockers(self.heads[rank]))
        return []
