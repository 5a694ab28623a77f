"""Who may carry ranks: the job's nodes, and what is known of the agent on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Membership:
    """Nodes of one job in order of preference; each is expected, connected, leaving, gone or excluded.

    ``nodes`` are known beforehand; up to ``max_unknown`` others may join, where nobody knows who will come.
    """

    def __init__(self, nodes: Sequence[str], max_unknown: int = 0) -> None:
        self._order = tuple(nodes)
        self._known = set(nodes)
        self._expected = set(nodes)
        self._max_unknown = max_unknown
        self._unknown_expected = max_unknown
        self._places: dict[str, int] = {}
        self._connected: set[str] = set()
        self._leaving: set[str] = set()
        self._excluded: dict[str, str] = {}
        self.slots = 0
        """Ranks per node, set by the first node that joins; 0 before."""

    def __contains__(self, node: str) -> bool:
        return node in self._known

    def __len__(self) -> int:
        return len(self._order)

    def _in_order(self, nodes: set[str]) -> tuple[str, ...]:
        return tuple(node for node in self._order if node in nodes)

    @property
    def expected(self) -> tuple[str, ...]:
        """Nodes that nobody has heard of, and whose agents may still come."""
        return self._in_order(self._expected)

    @property
    def expects_more(self) -> bool:
        """Tell whether :attr:`expected` holds any, or more of the unknown may come."""
        return self._expected_count > 0

    @property
    def _expected_count(self) -> int:
        return len(self._expected) + self._unknown_expected

    @property
    def nobody_came(self) -> bool:
        """Tell whether every node is still only expected."""
        return len(self._expected) == len(self._order)

    @property
    def usable_count(self) -> int:
        """Return the length of :attr:`usable`, whatever the size of the job."""
        return len(self._connected) - len(self._leaving)

    @property
    def usable(self) -> tuple[str, ...]:
        """Nodes that a new cycle may run on: connected and not leaving."""
        return self._in_order(self._connected - self._leaving)

    def is_connected(self, node: str) -> bool:
        return node in self._connected

    def reason_of(self, node: str) -> str | None:
        """Return why ``node`` is excluded; None if it is not."""
        return self._excluded.get(node)

    # --- changes -------------------------------------------------------------------------------------

    def admit(self, node: str, place: int | None = None) -> bool:
        """Tell whether ``node`` is one of the job's, or becomes one: a node that is gone leaves room.

        Among such nodes those with a ``place`` come first, the lowest first; the others as they join.
        """
        if node in self._known:
            return True
        if len(self._connected) >= self._max_unknown:
            return False
        self._known.add(node)
        self._unknown_expected = max(0, self._unknown_expected - 1)
        if place is not None:
            self._places[node] = place
        last = float("inf")
        self._order = tuple(sorted((*self._order, node), key=lambda name: self._places.get(name, last)))
        return True

    def misfit(self, slots: int) -> str | None:
        """Return why a node with ``slots`` can't take part; None if it can."""
        if slots < 1:
            return f"offers {slots} worker slots"
        if self.slots and slots != self.slots:
            return f"offers {slots} worker slots where the other nodes offer {self.slots}"
        return None

    def connect(self, node: str, slots: int) -> None:
        self._expected.discard(node)
        self._leaving.discard(node)
        self._connected.add(node)
        self.slots = slots

    def leave(self, node: str) -> None:
        if node in self._connected:
            self._leaving.add(node)

    def disconnect(self, node: str) -> None:
        self._connected.discard(node)
        self._leaving.discard(node)

    def exclude(self, node: str, reason: str) -> None:
        """Keep ``node`` out for good."""
        self.disconnect(node)
        self._expected.discard(node)
        self._excluded[node] = reason

    def expect_no_more(self) -> None:
        self._expected.clear()
        self._unknown_expected = 0

    # --- choice --------------------------------------------------------------------------------------

    def can_fill(self, places: int) -> bool:
        """Tell whether there are, or may still be, nodes for ``places``."""
        return self.usable_count + self._expected_count >= places

    def choose(self, before: Sequence[str], places: int) -> tuple[str, ...]:
        """Return nodes for ``places`` places: who was there keeps its own, the first others fill the gaps.

        There must be enough usable nodes.
        """
        usable = self.usable
        there = set(usable)
        kept = [node if node in there else None for node in before] or [None] * places
        taken = set(kept)
        free: Iterator[str] = iter([node for node in usable if node not in taken])
        return tuple(node if node is not None else next(free) for node in kept)
