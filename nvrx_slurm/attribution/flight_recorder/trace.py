"""What is kept of a dump: counters per group and the operations that have not ended. Everything else goes."""

from __future__ import annotations

import ast
import functools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nvrx_slurm.attribution.flight_recorder.load import DumpError

MAX_PENDING = 64
"""Operations kept per rank, the oldest: what blocks a rank is among them."""
_MAX_DURATIONS = 32
_LAUNCHES = 16
"""Of the newest operations, ended or not, it is kept when they were launched."""
MAX_RANKS = 2**17
"""More than any job has: a dump of a higher rank would make all below it missing."""
_MAX_NUMBER = 2**53
_MAX_NS = 2**63
_GLOO = "gloo:"


@dataclass(frozen=True)
class GroupKey:
    """A process group as all its members know it. Local ids differ between ranks, names do not.

    ``ranks`` is part of the key: two halves of a job may use one name for different groups.
    """

    name: str
    description: str
    ranks: str
    """As in the dump, such as ``[0, 1]``; empty where the backend does not tell (gloo)."""


class Frame(msgspec.Struct, frozen=True):
    """One Python frame of the operation's stack, innermost first."""

    name: str = ""
    filename: str = ""
    line: int = 0


class Op(msgspec.Struct, frozen=True):
    """One entry of the ring; unknown keys are ignored, numeric strings are numbers (JSON dumps)."""

    pg_id: int = -1
    process_group: tuple[str, str] = ("", "")
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    profiling_name: str = ""
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_sizes: list[list[int]] = []
    output_dtypes: list[str] = []
    state: str = ""
    retired: bool = False
    is_p2p: bool = False
    frames: list[Frame] | None = None

    @property
    def kind(self) -> str:
        """Such as ``all_reduce``; a peer-to-peer operation's peers are left out."""
        return self.profiling_name.partition(":")[2].partition(" ")[0] or self.profiling_name

    def peer(self, me: int) -> int | None:
        """Return the group-local index of the other side of a send or recv, or None."""
        _, _, ends = self.profiling_name.partition(" ")
        for arrow in ("->", "<-"):
            left, found, right = ends.partition(arrow)
            if found and left.isdecimal() and right.isdecimal():
                return int(right) if int(left) == me else int(left)
        return None


class _Status(msgspec.Struct, frozen=True):
    last_enqueued_collective: int = -1
    last_started_collective: int = -1
    last_completed_collective: int = -1


class _Config(msgspec.Struct, frozen=True):
    name: str = ""
    desc: str = ""
    ranks: str = ""


@dataclass
class GroupState:
    """One group as one rank sees it; -1: not known."""

    enqueued: int = -1
    completed: int = -1
    has_p2p: bool = False
    used: bool = False
    """The ring holds an operation of it."""


@dataclass
class RankTrace:
    """What one rank's dump says."""

    rank: int
    version: str = ""
    groups: dict[GroupKey, GroupState] = field(default_factory=dict)
    pending: list[tuple[GroupKey, Op]] = field(default_factory=list)
    """Operations that have not ended, in the order of the ring, at most MAX_PENDING."""
    launches: list[tuple[GroupKey, int, float]] = field(default_factory=list)
    """Group, number and Unix seconds of the newest collectives, whether they have ended or not."""
    last_launch: float | None = None
    """Unix seconds of the newest operation of all."""
    typical_op_s: float | None = None
    """Median time from launch to end of the last operations."""
    node: str | None = None
    """As the manifest beside the dump says."""
    written_at: float | None = None
    """Unix seconds, as the manifest says."""
    caveats: list[str] = field(default_factory=list)

    @property
    def idle_s(self) -> float | None:
        """How long before the dump the rank launched its newest operation, by its own clock."""
        if self.written_at is None or self.last_launch is None:
            return None
        return self.written_at - self.last_launch

    def age_s(self, group: GroupKey, number: int) -> float | None:
        """How long before the dump the rank launched an operation, if it is one of the newest."""
        if self.written_at is None:
            return None
        found = (at for key, mine, at in self.launches if (key, mine) == (group, number))
        return next((self.written_at - at for at in found), None)

    @property
    def head(self) -> tuple[GroupKey, Op] | None:
        """The oldest operation that has not ended: it blocks the rank's stream."""
        return self.pending[0] if self.pending else None


def reduce_dump(rank: int, dump: dict[str, Any]) -> RankTrace:
    """Return what culprits are found by.

    Raises:
        DumpError: a field is of another type than torch writes.
    """
    try:
        return _Reducer(rank, dump).trace()
    except (msgspec.ValidationError, AttributeError, TypeError, ValueError) as error:
        raise DumpError(f"not as torch writes it: {str(error)[:120]}") from error


@functools.lru_cache(maxsize=4096)
def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the members that ``[0, 1, 5]`` names, in the group's order; nothing if it is no such list."""
    if len(text) > 16 * MAX_RANKS:
        return ()
    try:
        ranks = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(ranks, list | tuple):
        return ()
    return tuple(rank for rank in ranks if isinstance(rank, int) and 0 <= rank < MAX_RANKS)


_NOT_KNOWN: tuple[GroupKey, GroupState | None] = (GroupKey("", "", ""), None)


class _Reducer:
    """One pass over a dump."""

    def __init__(self, rank: int, dump: dict[str, Any]) -> None:
        self._dump = dump
        self._trace = RankTrace(rank, str(dump.get("version", "")))
        self._config: dict[str, _Config] = msgspec.convert(
            dump.get("pg_config") or {}, dict[str, _Config], strict=False
        )
        self._keys: dict[tuple[str, str], GroupKey] = {}
        self._local: dict[int, GroupKey] = {}
        self._known: dict[int, tuple[GroupKey, GroupState | None]] = {}
        """Of the entry before, most often the same: saves a hash for each of thousands of entries."""
        self._durations: list[int] = []

    def trace(self) -> RankTrace:
        for name, config in self._config.items():
            self._state(self._key(config.name or name, config.desc))
        entries = self._dump.get("entries") or []
        self._take_all(entries)
        self._take_times(entries[-_LAUNCHES:])
        self._take_status()
        if any(state.enqueued > _MAX_NUMBER for state in self._trace.groups.values()):
            raise ValueError("an operation's number is out of range")
        if self._durations:
            self._trace.typical_op_s = statistics.median(self._durations) / 1e9
        return self._trace

    def _key(self, name: str, description: str) -> GroupKey:
        known = self._keys.get((name, description))
        if known is None:
            config = self._config.get(name)
            ranks = config.ranks if config and parse_ranks(config.ranks) else ""
            known = self._keys[(name, description)] = GroupKey(name, description, ranks)
        return known

    def _state(self, key: GroupKey) -> GroupState:
        return self._trace.groups.setdefault(key, GroupState())

    def _take_all(self, entries: list[dict[str, Any]]) -> None:
        """Take the ring. Nearly all of it has ended, and of that only the sequence numbers count."""
        alike: dict[Any, tuple[Any, GroupState]] = {}
        for entry in entries:
            local, group = entry.get("pg_id"), entry.get("process_group")
            if entry.get("state") == "completed" and not entry.get("is_p2p"):
                like, state = alike.get(local, (None, None))
                sequence = entry.get("collective_seq_id")
                if state is not None and like == group and type(sequence) is int:
                    if sequence > state.enqueued:
                        state.enqueued = sequence
                    if sequence > state.completed:
                        state.completed = sequence
                    continue
            state = self._take(entry)
            if len(self._durations) >= _MAX_DURATIONS:
                alike[local] = (group, state)

    def _take(self, entry: dict[str, Any]) -> GroupState:
        """Take one entry; return its group's state."""
        group = entry.get("process_group") or ("", "")
        local = int(entry.get("pg_id", -1))
        key, state = self._known.get(local, _NOT_KNOWN)
        if state is None or key.name != group[0] or key.description != group[1]:
            key = self._key(str(group[0]), str(group[1]))
            state = self._state(key)
            state.used = True
            self._local.setdefault(local, key)
            self._known[local] = (key, state)
        p2p = bool(entry.get("is_p2p"))
        state.has_p2p = state.has_p2p or p2p
        # Other than NCCL, gloo leaves the state at "scheduled" for ever, and retires what has ended.
        done = entry.get("state") == "completed" or (
            bool(entry.get("retired")) and str(entry.get("profiling_name", "")).startswith(_GLOO)
        )
        if not p2p:
            sequence = int(entry.get("collective_seq_id", -1))
            state.enqueued = max(state.enqueued, sequence)
            if done:
                state.completed = max(state.completed, sequence)
        if not done and len(self._trace.pending) < MAX_PENDING:
            self._trace.pending.append((key, msgspec.convert(entry, Op, strict=False)))
        elif done and len(self._durations) < _MAX_DURATIONS:
            ended, began = entry.get("time_discovered_completed_ns"), entry.get("time_created_ns")
            if isinstance(ended, int) and isinstance(began, int) and ended > began > 0:
                self._durations.append(ended - began)
        return state

    def _take_times(self, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            ns, group = entry.get("time_created_ns"), entry.get("process_group") or ("", "")
            # Other writers than torch leave what is no number.
            if not isinstance(ns, int) or not 0 < ns < _MAX_NS:
                continue
            self._trace.last_launch = max(ns / 1e9, self._trace.last_launch or 0.0)
            if not entry.get("is_p2p"):
                key = self._key(str(group[0]), str(group[1]))
                self._trace.launches.append((key, int(entry.get("collective_seq_id", -1)), ns / 1e9))

    def _take_status(self) -> None:
        statuses = msgspec.convert(self._dump.get("pg_status") or {}, dict[int, _Status], strict=False)
        for local, key in self._local_ids(statuses).items():
            status = statuses.get(local)
            if status is not None:
                state = self._state(key)
                state.enqueued = max(state.enqueued, status.last_enqueued_collective)
                state.completed = max(state.completed, status.last_completed_collective)
                self._drop_ended(key, status.last_completed_collective)

    def _drop_ended(self, key: GroupKey, completed: int) -> None:
        """Take out what the rank's own counter says has ended: an entry's state follows it a moment later."""
        self._trace.pending = [
            (group, op)
            for group, op in self._trace.pending
            if group != key or op.is_p2p or op.collective_seq_id > completed
        ]

    def _local_ids(self, statuses: Iterable[int]) -> dict[int, GroupKey]:
        """Return which group each local id means: as the entries say, by order where that agrees.

        Ids that stay unknown are left out: a wrong guess would blame a rank.
        """
        ids, names = sorted(statuses), list(self._config)
        if len(ids) != len(names) or not all(name.isdecimal() for name in names):
            return self._local
        names.sort(key=int)
        by_order = {
            local: self._key(self._config[name].name or name, self._config[name].desc)
            for local, name in zip(ids, names, strict=True)
        }
        if any(by_order.get(local, key) != key for local, key in self._local.items()):
            self._trace.caveats.append(
                f"rank {self._trace.rank}: the order of its group ids contradicts its entries"
            )
            return self._local
        return by_order
