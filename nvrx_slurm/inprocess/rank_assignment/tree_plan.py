"""The arithmetic of :class:`~nvrx_slurm.inprocess.rank_assignment.Tree`: no store, no state of a rank."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nvrx_slurm.inprocess.param_utils import check_count, check_type
from nvrx_slurm.inprocess.rank_assignment.groups import KeyOrFn, check_key
from nvrx_slurm.inprocess.state import Mode


class LayerFlag(enum.Flag):
    """How the ranks below a node of the layer replace each other."""

    RESERVE = enum.auto()
    """A spare below the node takes the place of a terminated rank below it."""
    BACKFILL = enum.auto()
    """Where no spare is left, the rank with the highest number below the node takes the place."""


@dataclass(frozen=True)
class Layer:
    """One level of the machine: everything, a rack, a node …

    Args:
        min_ranks: a node of the layer with fewer ranks left is given up as a whole.
        max_ranks: ranks below a node of the layer that run the function at the most; None: no limit.
        key_or_fn: which node a rank belongs to: a text, or a function of its state that returns one.
        flag: how ranks replace each other; None: not at all.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: KeyOrFn = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_count("min_ranks", self.min_ranks, 0)
        check_count("max_ranks", self.max_ranks, 1)
        check_key(self.key_or_fn)
        check_type("flag", self.flag, LayerFlag, optional=True)

    def has(self, flag: LayerFlag) -> bool:
        return self.flag is not None and flag in self.flag


@dataclass(eq=False, slots=True)
class Leaf:
    """One rank."""

    initial_rank: int
    parent: Node
    mode: Mode = Mode.INITIALIZED
    active_rank: int | None = None


@dataclass(eq=False, slots=True)
class Node:
    """A node of the tree."""

    layer: Layer
    parent: Node | None
    children: list[Node | Leaf] = field(default_factory=list)
    active: int = 0
    """Ranks below it that run the function."""
    spares: list[Leaf] = field(default_factory=list)
    """The newest last. A leaf that is no spare any more may still be in it."""

    def lineage(self) -> Iterator[Node]:
        """Yield the node, its parent, and so on up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def leaves(self) -> Iterator[Leaf]:
        """Yield the leaves below, depth first."""
        for child in self.children:
            if isinstance(child, Leaf):
                yield child
            else:
                yield from child.leaves()

    def newest_spare(self) -> Leaf | None:
        while self.spares and self.spares[-1].mode is not Mode.INACTIVE:
            self.spares.pop()
        return self.spares.pop() if self.spares else None


class Plan:
    """All ranks of a job, who of them runs the function, and what happens when some are terminated.

    Args:
        layers: from the root down.
        keys: of every initial rank, one for each layer.

    Raises:
        RuntimeError: the ranks do not agree on the root's key.
    """

    def __init__(self, layers: Sequence[Layer], keys: dict[int, tuple[str, ...]]) -> None:
        roots = {path[0] for path in keys.values()}
        if len(roots) != 1:
            raise RuntimeError(
                f"the first layer must have one key on all ranks, and it has {sorted(roots)[:8]}"
            )
        self.root = Node(layers[0], None)
        nodes: dict[tuple[str, ...], Node] = {}
        for rank, path in sorted(keys.items()):
            parent = self.root
            for depth in range(1, len(layers)):
                prefix = path[1 : depth + 1]
                node = nodes.get(prefix)
                if node is None:
                    node = nodes[prefix] = Node(layers[depth], parent)
                    parent.children.append(node)
                parent = node
            parent.children.append(Leaf(rank, parent))
        self.leaves = list(self.root.leaves())
        """Those that are left, in the order of their ranks."""
        self.active_world_size = 0
        """Ranks that run the function."""
        self.given_up: set[int] = set()
        """Initial ranks that no longer take part though they could, for those around them are gone."""

    def activate(self) -> None:
        """Have ranks run the function, in the order of the tree, as far as the layers allow."""
        for leaf in self.leaves:
            if leaf.mode is Mode.ACTIVE:
                continue
            above = list(leaf.parent.lineage())
            if all(node.layer.max_ranks is None or node.active < node.layer.max_ranks for node in above):
                self._start(leaf, self.active_world_size)
                self.active_world_size += 1
            else:
                self._make_spare(leaf)

    def resume(self, active_ranks: dict[int, int]) -> None:
        """Have the initial ranks in ``active_ranks`` go on with those numbers, others as in ``activate``."""
        self.active_world_size = len(active_ranks)
        for leaf in self.leaves:
            if leaf.initial_rank in active_ranks:
                self._start(leaf, active_ranks[leaf.initial_rank])
        self.activate()

    def terminate(self, ranks: Iterable[int], world_size_filter: Callable[[int], int] | None = None) -> None:
        """Take out ranks, by their index among :attr:`leaves`, and have others take their places.

        Raises:
            ValueError: ``world_size_filter`` asks for more ranks than it was given.
        """
        terminated = set(ranks)
        gone = {id(leaf) for index, leaf in enumerate(self.leaves) if index in terminated}
        _give_up_small_nodes(self.root, gone)
        vacant = []
        self.given_up = set()
        for index, leaf in enumerate(self.leaves):
            if id(leaf) not in gone:
                continue
            if index not in terminated:
                self.given_up.add(leaf.initial_rank)
            if leaf.mode is Mode.ACTIVE:
                vacant.append(leaf)
                for node in leaf.parent.lineage():
                    node.active -= 1
            leaf.mode = Mode.TERMINATED
        self.leaves = [leaf for leaf in self.leaves if leaf.mode is not Mode.TERMINATED]
        vacant.sort(key=_active_rank)
        vacant = [leaf for leaf in vacant if not self._fill_by_spare(leaf)]
        self._close(self._backfill(vacant))
        if world_size_filter is not None:
            self._shrink(world_size_filter(self.active_world_size))

    def _start(self, leaf: Leaf, active_rank: int | None) -> None:
        leaf.mode, leaf.active_rank = Mode.ACTIVE, active_rank
        for node in leaf.parent.lineage():
            node.active += 1

    def _make_spare(self, leaf: Leaf) -> None:
        leaf.mode, leaf.active_rank = Mode.INACTIVE, None
        for node in leaf.parent.lineage():
            node.spares.append(leaf)

    def _fill_by_spare(self, vacant: Leaf) -> bool:
        for node in vacant.parent.lineage():
            if not node.layer.has(LayerFlag.RESERVE):
                return False
            spare = node.newest_spare()
            if spare is not None:
                self._start(spare, vacant.active_rank)
                return True
        return False

    def _backfill(self, vacant: list[Leaf]) -> list[int]:
        """Have the last active ranks of a domain move into its vacant places; return the gaps left."""
        gaps: list[int] = []
        by_domain: dict[int, tuple[Node, list[Leaf]]] = {}
        for leaf in vacant:
            domain = _backfill_domain(leaf)
            if domain is None:
                gaps.append(_active_rank(leaf))
            else:
                by_domain.setdefault(id(domain), (domain, []))[1].append(leaf)
        for domain, places in by_domain.values():
            active = [leaf for leaf in domain.leaves() if leaf.mode is Mode.ACTIVE]
            movers = sorted(active, key=_active_rank)[-len(places) :]
            gaps += [_active_rank(leaf) for leaf in movers]
            for mover, place in zip(movers, places, strict=False):
                mover.active_rank = place.active_rank
            gaps += [_active_rank(place) for place in places[len(movers) :]]
        return gaps

    def _close(self, gaps: list[int]) -> None:
        """Move all active ranks down over the gaps below them."""
        missing = set(gaps)
        below, count = [], 0
        for number in range(self.active_world_size):
            below.append(count)
            count += number in missing
        for leaf in self.leaves:
            if leaf.active_rank is not None:
                leaf.active_rank -= below[leaf.active_rank]
        self.active_world_size -= len(missing)

    def _shrink(self, size: int) -> None:
        if not 0 <= size <= self.active_world_size:
            raise ValueError(
                f"world_size_filter returned {size} for {self.active_world_size}: no more is accepted"
            )
        for leaf in self.leaves:
            if leaf.active_rank is not None and leaf.active_rank >= size:
                for node in leaf.parent.lineage():
                    node.active -= 1
                self._make_spare(leaf)
        self.active_world_size = size


def _active_rank(leaf: Leaf) -> int:
    if leaf.active_rank is None:
        raise ValueError(f"initial rank {leaf.initial_rank} is not active")
    return leaf.active_rank


def _backfill_domain(leaf: Leaf) -> Node | None:
    """Return the topmost node of the unbroken chain of layers above that backfill."""
    domain = None
    for node in leaf.parent.lineage():
        if not node.layer.has(LayerFlag.BACKFILL):
            break
        domain = node
    return domain


def _give_up_small_nodes(node: Node, gone: set[int]) -> int:
    """Add to ``gone`` what is below nodes with too few ranks, from the bottom up; return how many stay."""
    left = 0
    for child in node.children:
        if isinstance(child, Leaf):
            left += child.mode is not Mode.TERMINATED and id(child) not in gone
        else:
            left += _give_up_small_nodes(child, gone)
    if left < node.layer.min_ranks:
        gone.update(id(leaf) for leaf in node.leaves())
        return 0
    return left
