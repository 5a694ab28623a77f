"""Who may carry ranks: the job's nodes, and what is known of the agent on each."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.coordinator.placement import Candidates, PlacementError, Rules, Topology, choose
from nvrx_slurm.wire.messages import UNKNOWN_LOCATION, NodeLocation


class Membership:
    """Nodes of one job; each is expected, connected, leaving, gone or excluded.

    ``nodes`` are known beforehand; up to ``max_unknown`` others may join, where nobody knows who will come.
    The usable ones stand in a line: in the job's order, then those that were lost and came back, in the order
    in which they did, and at its end ``last``.
    """

    def __init__(
        self, nodes: Sequence[str], rules: Rules, last: str | None = None, max_unknown: int = 0
    ) -> None:
        self._index = {node: index for index, node in enumerate(nodes)}
        self._rules = rules
        self._last = last
        self._expected = set(nodes)
        self._max_unknown = max_unknown
        self._unknown_expected = max_unknown
        self._places: dict[str, int] = {}
        self._connected: set[str] = set()
        self._leaving: set[str] = set()
        self._awaited: set[str] = set()
        self._excluded: dict[str, str] = {}
        self._losses: dict[str, int] = {}
        self._returns: dict[str, int] = {}
        """Nodes that have come back, and how many returns there had been by then."""
        self._locations: dict[str, NodeLocation] = {}
        self._topology: Topology | None = None
        """Of :attr:`_locations`; None: they have changed."""
        self.slots = 0
        """Ranks per node, set by the first node that joins; 0 before."""

    def __contains__(self, node: str) -> bool:
        return node in self._index

    def __len__(self) -> int:
        return len(self._index)

    def _position(self, node: str) -> tuple[bool, int, int]:
        return node == self._last, self._returns.get(node, 0), self._index[node]

    def _in_line(self, nodes: set[str]) -> tuple[str, ...]:
        return tuple(sorted(nodes, key=self._position))

    @property
    def expected(self) -> tuple[str, ...]:
        """Nodes that nobody has heard of, and whose agents may still come."""
        return self._in_line(self._expected)

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
        return len(self._expected) == len(self._index)

    @property
    def usable_count(self) -> int:
        """Return the length of :attr:`usable`, whatever the size of the job."""
        return len(self._connected) - len(self._leaving)

    def has_others_than(self, host: str) -> bool:
        """Tell whether any other node than ``host`` is connected."""
        return len(self._connected) > (host in self._connected)

    @property
    def usable(self) -> tuple[str, ...]:
        """Nodes that a new cycle may run on, connected and not leaving, in line."""
        return self._in_line(self._connected - self._leaving)

    @property
    def leaving(self) -> tuple[str, ...]:
        """Nodes whose agents have said that they go, and have not gone yet."""
        return self._in_line(self._leaving)

    def is_connected(self, node: str) -> bool:
        return node in self._connected

    def reason_of(self, node: str) -> str | None:
        """Return why ``node`` is excluded; None if it is not."""
        return self._excluded.get(node)

    def losses_of(self, node: str) -> int:
        """Return how often ``node`` has lost its agent."""
        return self._losses.get(node, 0)

    # --- changes -------------------------------------------------------------------------------------

    def admit(self, node: str, place: int | None = None) -> bool:
        """Tell whether ``node`` is one of the job's, or becomes one: a node that is gone leaves room.

        Among such nodes those with a ``place`` come first, the lowest first; the others as they join.
        """
        if node in self:
            return True
        if len(self._connected) >= self._max_unknown:
            return False
        self._unknown_expected = max(0, self._unknown_expected - 1)
        if place is not None:
            self._places[node] = place
        last = float("inf")
        order = sorted((*self._index, node), key=lambda name: self._places.get(name, last))
        self._index = {name: index for index, name in enumerate(order)}
        return True

    def misfit(self, slots: int) -> str | None:
        """Return why a node with ``slots`` can't take part; None if it can."""
        if slots < 1:
            return f"offers {slots} worker slots"
        if self.slots and slots != self.slots:
            return f"offers {slots} worker slots where the other nodes offer {self.slots}"
        return None

    def connect(self, node: str, slots: int, location: NodeLocation = UNKNOWN_LOCATION) -> bool:
        """Take ``node`` in; return whether it had been lost before."""
        returned = node not in self._connected and node in self._losses
        if returned:
            self._returns[node] = max(self._returns.values(), default=0) + 1
        self._expected.discard(node)
        self._leaving.discard(node)
        self._awaited.discard(node)
        self._connected.add(node)
        if self._locations.get(node) != location:
            self._locations[node] = location
            self._topology = None
        self.slots = slots
        return returned

    def leave(self, node: str) -> None:
        if node in self._connected:
            self._leaving.add(node)

    def lose(self, node: str) -> None:
        """Note that the agent of ``node`` is gone."""
        self._disconnect(node)
        self._losses[node] = self.losses_of(node) + 1

    def _disconnect(self, node: str) -> None:
        self._connected.discard(node)
        self._leaving.discard(node)

    def exclude(self, node: str, reason: str) -> None:
        """Keep ``node`` out for good."""
        self._disconnect(node)
        self._expected.discard(node)
        self._awaited.discard(node)
        self._excluded[node] = reason

    def expect_no_more(self) -> None:
        self._expected.clear()
        self._unknown_expected = 0

    def await_return(self, node: str) -> None:
        """Count on ``node``, which is lost, to come back."""
        self._awaited.add(node)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Lost nodes that may come back."""
        return self._in_line(self._awaited)

    def is_awaited(self, node: str) -> bool:
        return node in self._awaited

    def give_up(self, node: str) -> None:
        """Do not count on it any more; it may come all the same."""
        self._awaited.discard(node)

    def await_nobody(self) -> None:
        self._awaited.clear()

    # --- choice --------------------------------------------------------------------------------------

    @property
    def lacks_domains(self) -> bool:
        """Tell whether segments are asked for, and no node has told its NVLink domain."""
        return self._rules.segment > 1 and not any(where.domain for where in self._locations.values())

    @property
    def topology(self) -> Topology:
        """Where the nodes are that have ever been there."""
        if self._topology is None:
            self._topology = Topology.of(self._locations)
        return self._topology

    def shortage(self, before: Sequence[str]) -> str | None:
        """Return why there can be no cycle after ``before``; None if there can, or may be when more come."""
        to_come = self._expected_count + len(self._awaited)
        enough = self.usable_count + to_come >= self._rules.active_nodes
        if enough and (to_come or not self._rules.constrained):
            return None
        try:
            self._choose(before)
        except PlacementError as error:
            return str(error)
        return None

    def choose(self, before: Sequence[str]) -> tuple[str, ...] | None:
        """Return the nodes of the cycle after ``before`` by group rank; None if more have to come."""
        if self.usable_count < self._rules.active_nodes:
            return None
        try:
            return self._choose(before)
        except PlacementError:
            return None

    def _choose(self, before: Sequence[str]) -> tuple[str, ...]:
        return choose(
            before, Candidates(self.usable, self._locations, self.topology, self._last), self._rules
        )
