"""What a node does whose Coordinator has fallen silent: a pure machine over what it sees of the lease.

It never acts while the lease moves (then it is this node that is cut off), nor while it sees nothing. Time is
this host's own; clocks of two hosts are never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nvrx_slurm.coordinator.lease import LAPSE_S, Fence, Lease

STAGGER_S = 10.0
"""How much later than the one before it a node steps in.

More than the 7 s by which nodes differ in when they look first: an interval of the keep-alive
(``wire/rpc.py``) and one of looks (:mod:`.successor`).
"""
BLIND_S = 60.0
"""How long a run directory that does not tell is looked at again."""
_LIVELY_RENEWALS = 2
"""One change alone may be what the host wrote last, seen late."""


@dataclass(frozen=True)
class Seen:
    """One look into the run directory."""

    lease: Lease
    claimed: int
    """Highest attempt that anybody has claimed."""


@dataclass(frozen=True)
class Wait:
    """Look again."""


@dataclass(frozen=True)
class Leave:
    """Exit, and touch nothing."""

    why: str


@dataclass(frozen=True)
class Claim:
    """Try to take this fence."""

    fence: Fence
    lost: str
    """The host that has fallen silent."""
    silent_s: float


@dataclass(frozen=True)
class Join:
    """A new Coordinator is there."""

    lease: Lease


Decision = Wait | Leave | Claim | Join


class LeaseWatch:
    """Feed it every look, with this host's clock; do what it says.

    Args:
        fence: of the Coordinator that fell silent.
        place: how many nodes step in before this one when a host, whose name it is given, is lost.
    """

    def __init__(self, fence: Fence, place: Callable[[str], int]) -> None:
        self._fence = fence
        self._place = place
        self._first: Lease | None = None
        self._last: Seen | None = None
        self._since = 0.0
        self._blind_since: float | None = None

    def look(self, now: float, seen: Seen | None) -> Decision:
        """Take one look, None if nothing could be seen; return what to do."""
        if seen is None:
            return self._blind(now)
        found = Fence.parse(seen.lease.fence)
        if found[:2] != self._fence[:2]:
            return Leave(f"{found} is in charge now")
        if found < self._fence:
            # A Coordinator that was replaced has written once more; its successor will do so too.
            return self._blind(now)
        self._blind_since = None
        if seen.lease.ended is not None:
            return Leave(f"the job has ended with {seen.lease.ended}")
        if found > self._fence and seen.lease.address:
            return Join(seen.lease)
        if self._first is None or found > Fence.parse(self._first.fence):
            self._first = seen.lease
        if seen != self._last:
            self._last = seen
            self._since = now
        if found == self._fence and seen.lease.counter - self._first.counter >= _LIVELY_RENEWALS:
            return Leave(f"the Coordinator on {seen.lease.host} is well: this node was cut off from it")
        silent = now - self._since
        if silent < LAPSE_S + self._place(seen.lease.host) * STAGGER_S:
            return Wait()
        return Claim(self._fence.next_attempt(max(seen.claimed, found.attempt)), seen.lease.host, silent)

    def _blind(self, now: float) -> Decision:
        # What was counted before may have changed and changed back.
        self._last = None
        if self._blind_since is None:
            self._blind_since = now
        if now - self._blind_since < BLIND_S:
            return Wait()
        return Leave("the run directory does not tell who is in charge")
