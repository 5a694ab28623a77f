"""Which node gets which place in the group: a pure choice, from what is known of the nodes.

One rule for all cases. The group is a row of *segments* of :attr:`Rules.segment` nodes, each within one
NVLink domain; without segments each node is a segment, and a domain, of its own.

* A segment that lacks no node stays as it is.
* One that lacks nodes is filled up within its domain; if its domain has too few, the whole segment moves.
* What is missing comes from the *line* of spares: the topologically nearest, of equals the first in line.

So a survivor moves only where its segment must, and as few segments as possible do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nvrx_slurm.wire.messages import NodeLocation

T = TypeVar("T")
Path = tuple[str, ...]
"""Switches or blocks from the root of the network down to a node's own."""

_NAMED = 8
"""So many domains or groups a message names."""


class PlacementError(Exception):
    """The nodes can't be arranged as asked; the message is one sentence."""


@dataclass(frozen=True)
class Rules:
    """What the user asks of every cycle."""

    active_nodes: int
    segment: int = 1
    """Nodes that must be of one NVLink domain; a divisor of ``active_nodes``. 1: any node will do."""
    group_size: int = 1
    """Nodes with one replacement group id that are only used when so many of them are there. 1: no groups."""

    @property
    def constrained(self) -> bool:
        """Tell whether the number of nodes alone doesn't say if they will do."""
        return self.segment > 1 or self.group_size > 1


@dataclass(frozen=True)
class Topology:
    """Where nodes are in the network, as Slurm's topology plugin says (topology.conf(5))."""

    paths: Mapping[str, Path] = field(default_factory=dict)
    trouble: str = ""
    """Why it can't be used, although some node has an address; empty if it can, or if there is none."""

    @classmethod
    def of(cls, locations: Mapping[str, NodeLocation]) -> Topology:
        """Read the addresses of all nodes; one that can't be read makes all of them useless."""
        paths: dict[str, Path] = {}
        unreadable = ""
        for node, where in locations.items():
            path = _path(node, where)
            if path is None:
                said = f"{where.topology_addr!r} as {where.topology_pattern!r}"
                unreadable = unreadable or f"{node} has the address {said}"
            else:
                paths[node] = path
        depths = {len(path) for path in paths.values()}
        if depths <= {0}:
            # No switches anywhere, or no address anywhere: Slurm knows no topology.
            return cls()
        if unreadable:
            return cls(trouble=unreadable)
        if len(depths) > 1:
            return cls(trouble="the nodes' addresses have different numbers of levels")
        return cls(paths)

    def path(self, node: str) -> Path:
        return self.paths.get(node, ())

    def order(self, nodes: Sequence[str]) -> list[str]:
        """Return ``nodes`` such that those below one switch are adjacent; switches and nodes as they come."""
        first: dict[Path, int] = {}
        for index, node in enumerate(nodes):
            path = self.path(node)
            for depth in range(1, len(path) + 1):
                first.setdefault(path[:depth], index)
        key = {
            node: (*(first[self.path(node)[:d]] for d in range(1, len(self.path(node)) + 1)), index)
            for index, node in enumerate(nodes)
        }
        return sorted(nodes, key=key.__getitem__)


def _path(node: str, where: NodeLocation) -> Path | None:
    """Return the switches of ``SLURM_TOPOLOGY_ADDR``; None if it and its pattern don't fit (srun(1))."""
    words = where.topology_pattern.split(".")
    # A node's name may hold dots, which the pattern does not count.
    parts = where.topology_addr.split(".", len(words) - 1)
    if words[-1] != "node" or "" in words or len(parts) != len(words) or parts[-1] != node:
        return None
    return tuple(parts[:-1])


@dataclass(frozen=True)
class Candidates:
    """The nodes that may get ranks, and what is known of them."""

    line: tuple[str, ...]
    """Usable nodes; who stands before another is promoted before it."""
    locations: Mapping[str, NodeLocation] = field(default_factory=dict)
    """Of every node that was ever there: a gap is where a node has been."""
    topology: Topology = field(default_factory=Topology)
    """Of the same nodes."""
    last: str | None = None
    """The node that is taken only if no other will do."""


def choose(before: Sequence[str], candidates: Candidates, rules: Rules) -> tuple[str, ...]:
    """Return the nodes of the next cycle; position is the group rank.

    Args:
        before: the nodes of the last cycle in the same order; empty before the first.

    Raises:
        PlacementError: there are too few nodes, or too few of one domain or replacement group.
    """
    return _Placing(before, candidates, rules).result()


@dataclass(frozen=True)
class _Offer(Generic[T]):
    what: T
    path: Path
    last: bool = False
    """Only if there is no other."""


def _nearest(gaps: Sequence[Path], offers: Sequence[_Offer[T]]) -> list[T | None]:
    """Return an offer for each gap: the nearest pairs first, equals in order; None when there are no more."""
    taken: list[T | None] = [None] * len(gaps)
    open_gaps = list(range(len(gaps)))
    for reluctant in (False, True):
        free = [offer for offer in offers if offer.last is reluctant]
        for depth in range(max(map(len, gaps), default=0), -1, -1):
            at: defaultdict[Path, list[_Offer[T]]] = defaultdict(list)
            for offer in reversed(free):
                at[offer.path[:depth]].append(offer)
            left = []
            for gap in open_gaps:
                if len(gaps[gap]) >= depth and (here := at.get(gaps[gap][:depth])):
                    taken[gap] = here.pop().what
                else:
                    left.append(gap)
            if len(left) < len(open_gaps):
                remaining = {id(offer) for offers_here in at.values() for offer in offers_here}
                free = [offer for offer in free if id(offer) in remaining]
            open_gaps = left
    return taken


class _Placing:
    """One choice."""

    def __init__(self, before: Sequence[str], candidates: Candidates, rules: Rules) -> None:
        self._before = before
        self._rules = rules
        self._locations = candidates.locations
        self._last = candidates.last
        self._topology = candidates.topology
        line = candidates.line if before else self._topology.order(candidates.line)
        # The last resort stays the last of its domain.
        self._line = sorted(self._complete_groups(line), key=lambda node: node == self._last)
        self._usable = set(self._line)
        size = rules.segment
        count = rules.active_nodes // size
        self._segments: list[list[str | None]] = [[None] * size for _ in range(count)]
        self._pool: dict[str, list[str]] = {}
        """Nodes of each domain that have no place yet, in line."""

    def result(self) -> tuple[str, ...]:
        moving = list(range(len(self._segments))) if not self._before else self._keep()
        if not self._before:
            self._fill_pool(())
        self._move(moving)
        return tuple(node for segment in self._segments for node in segment if node is not None)

    # --- who may, and with whom ----------------------------------------------------------------------

    def _complete_groups(self, line: Sequence[str]) -> list[str]:
        """Leave out the nodes of groups that lack members; who is in no group stands for itself."""
        size = self._rules.group_size
        if size <= 1:
            return list(line)
        members = Counter(self._group(node) for node in line)
        return [node for node in line if not self._group(node) or members[self._group(node)] >= size]

    def _group(self, node: str) -> str:
        where = self._locations.get(node)
        return "" if where is None else where.group

    def _domain(self, node: str) -> str:
        """Return the domain; without segments a node is its own, without a domain it has no room."""
        if self._rules.segment <= 1:
            return node
        where = self._locations.get(node)
        return "" if where is None else where.domain

    def _path(self, node: str) -> Path:
        return self._topology.path(node)

    def _fill_pool(self, placed: Iterable[str]) -> None:
        there = set(placed)
        for node in self._line:
            if node not in there and self._domain(node):
                self._pool.setdefault(self._domain(node), []).append(node)

    # --- segments that stay --------------------------------------------------------------------------

    def _former(self, segment: int) -> Sequence[str]:
        size = self._rules.segment
        return self._before[segment * size : (segment + 1) * size]

    def _home(self, segment: int) -> str:
        """Return the domain that most of the segment's nodes are in; of the lost ones, if none is left."""
        former = self._former(segment)
        survivors = [node for node in former if node in self._usable] or list(former)
        return Counter(map(self._domain, survivors)).most_common(1)[0][0]

    def _keep(self) -> list[int]:
        """Fill up what can stay where it is; return the segments that must move."""
        placed: list[str] = []
        broken: defaultdict[str, list[int]] = defaultdict(list)
        for number, segment in enumerate(self._segments):
            home = self._home(number)
            for index, node in enumerate(self._former(number)):
                if node in self._usable and self._domain(node) == home:
                    segment[index] = node
            if None in segment or not home:
                broken[home].append(number)
            else:
                placed += self._former(number)
        self._fill_pool(placed)
        moving: list[int] = []
        for home, numbers in broken.items():
            rooms = len(self._pool.get(home, ())) // self._rules.segment if home else 0
            by_gaps = sorted(numbers, key=lambda number: self._segments[number].count(None))
            for number in by_gaps[rooms:]:
                self._segments[number] = [None] * self._rules.segment
            self._fill(home, sorted(by_gaps[:rooms]))
            moving += by_gaps[rooms:]
        return sorted(moving)

    def _fill(self, home: str, numbers: Sequence[int]) -> None:
        """Fill the gaps of segments that stay in their domain."""
        if not numbers:
            return
        staying = {node for number in numbers for node in self._segments[number]}
        free = [node for node in self._pool[home] if node not in staying]
        gaps = [
            (number, index)
            for number in numbers
            for index, node in enumerate(self._segments[number])
            if node is None
        ]
        offers = [_Offer(node, self._path(node), node == self._last) for node in free]
        found = _nearest([self._path(self._former(number)[index]) for number, index in gaps], offers)
        for (number, index), node in zip(gaps, found, strict=True):
            self._segments[number][index] = node
        taken = set(found)
        self._pool[home] = [node for node in free if node not in taken]

    # --- segments that move --------------------------------------------------------------------------

    def _move(self, numbers: Sequence[int]) -> None:
        """Place whole segments, each in one domain."""
        size = self._rules.segment
        offers = [
            _Offer(nodes, self._path(nodes[0]), self._last in nodes)
            for pool in self._pool.values()
            for start in range(0, len(pool) - size + 1, size)
            for nodes in [pool[start : start + size]]
        ]
        if len(offers) < len(numbers):
            raise PlacementError(self._shortage())
        gaps = [self._path(self._former(number)[0]) if self._before else () for number in numbers]
        found = _nearest(gaps, offers)
        if not self._before:
            found = self._in_order(found)
        for number, nodes in zip(numbers, found, strict=True):
            assert nodes is not None
            self._segments[number] = list(self._topology.order(nodes))

    def _in_order(self, chosen: Sequence[list[str] | None]) -> list[list[str] | None]:
        """Return the first cycle's segments so that neighbours in the network are neighbours there."""
        firsts = {nodes[0]: nodes for nodes in chosen if nodes is not None}
        return [firsts[node] for node in self._topology.order(list(firsts))]

    def _shortage(self) -> str:
        """Say in one sentence what is missing."""
        rules = self._rules
        incomplete = ""
        if rules.group_size > 1:
            counts = Counter(self._group(node) for node in self._locations if self._group(node))
            complete = {self._group(node) for node in self._line}
            lacking = [f"{group} (of {counts[group]})" for group in counts if group not in complete]
            if lacking:
                incomplete = (
                    f"; replacement groups with fewer than {rules.group_size} nodes left: {_some(lacking)}"
                )
        if rules.segment <= 1:
            left = len(self._line)
            return (
                f"too few nodes: training needs {rules.active_nodes}, {left} {'is' if left == 1 else 'are'} "
                f"left{incomplete or ' and there is no spare'}"
            )
        counts = Counter(map(self._domain, self._line))
        named = [f"{domain or 'no domain'} has {count}" for domain, count in counts.items()]
        return (
            f"too few whole segments: training needs {len(self._segments)} of {rules.segment} nodes in one "
            f"NVLink domain each; {_some(named) or 'no node is left'}{incomplete}"
        )


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more
