"""Which nodes have faults of their own again and again, and whether it is them.

A script that is at fault itself fails in the same place on whatever node has it. So a spare that takes a
suspect's place is also a trial: such a fault there acquits the suspect, and the place is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nvrx_slurm.coordinator.blame import may_be_the_nodes
from nvrx_slurm.journal import FaultDetected


@dataclass
class _Trial:
    """A spare has the place of ``node``."""

    node: str
    place: int
    began: float
    faulty_for_s: float
    """How long it had taken to become a suspect."""
    progressed: bool = False


class Suspects:
    """Counts over the whole job the faults that may be the node's, by the node that was blamed.

    Args:
        exclude_after: at so many faults a node is a suspect; 0: never.
        faults: of earlier attempts.
        now: of the caller's clock.
    """

    def __init__(self, exclude_after: int, faults: Mapping[str, int], now: float = 0.0) -> None:
        self._exclude_after = exclude_after
        self._faults = Counter(faults)
        self._since = dict.fromkeys(faults, now)
        """When what led to a node's first fault began."""
        self._trials: dict[int, _Trial] = {}
        self._acquitted: dict[int, str] = {}
        """Places where the fault has outlived a node, and the node."""
        self._told: set[str] = set()
        self._accused: set[str] = set()
        """Nodes that other evidence than faults names."""

    def faults_of(self, node: str) -> int:
        return self._faults[node]

    def blame(self, fault: FaultDetected, place: int, cycle_began: float) -> None:
        """Note the fault that ended a cycle; ``place`` is the group rank of its node."""
        if not may_be_the_nodes(fault):
            return
        self._faults[fault.node] += 1
        self._since.setdefault(fault.node, cycle_began)
        trial = self._trials.pop(place, None)
        if trial is not None:
            self._acquitted[place] = trial.node

    def reassign(self, wrong: str, right: str) -> None:
        """The last fault that was counted for one node was another's."""
        if self._faults[wrong] > 0:
            self._faults[wrong] -= 1
        self._faults[right] += 1
        if wrong in self._since:
            self._since.setdefault(right, self._since[wrong])

    def accuse(self, node: str, now: float) -> None:
        """Note that other evidence than faults names the node: it is a suspect at once."""
        self._accused.add(node)
        self._since.setdefault(node, now)

    @property
    def accused(self) -> tuple[str, ...]:
        return tuple(sorted(self._accused))

    def is_suspect(self, fault: FaultDetected) -> bool:
        """Tell whether the node of ``fault`` has had so many that it should leave."""
        enough = 0 < self._exclude_after <= self._faults[fault.node]
        return enough and may_be_the_nodes(fault)

    def acquitted_at(self, place: int) -> str | None:
        """Return the node that left ``place`` while its fault stayed there; None: there is none."""
        return self._acquitted.get(place)

    def tell_once(self, node: str) -> bool:
        """Tell whether this is the first call for ``node``."""
        first = node not in self._told
        self._told.add(node)
        return first

    def try_without(self, node: str, place: int, now: float) -> None:
        """Note that another node takes the place of ``node``."""
        self._trials[place] = _Trial(node, place, now, now - self._since.get(node, now))

    def note_progress(self) -> None:
        """Training got further with the nodes that it has now."""
        for trial in self._trials.values():
            trial.progressed = True

    def proven(self, now: float) -> tuple[str, ...]:
        """Return the nodes without which training got further, and for as long as their faults had taken, and
        those that are accused, unless a fault has outlived one in its place.
        """
        tried = {
            trial.node
            for trial in self._trials.values()
            if trial.progressed and now - trial.began >= trial.faulty_for_s
        }
        return tuple(sorted(tried | (self._accused - set(self._acquitted.values()))))
