"""Who sends which part to whom. Pure: every rank makes the same plan of the same holdings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvrx_slurm.checkpointing.local.completeness import ranks_text
from nvrx_slurm.checkpointing.local.errors import NoReplicasAvailableError
from nvrx_slurm.checkpointing.local.ids import CkptID


@dataclass(frozen=True)
class ExchangePlanEntry:
    """One part on its way; global ranks. A rank may send to itself: it has the part already."""

    sender: int
    receiver: int
    id_: CkptID


class RanksOfGroup(Protocol):
    """What a plan needs to know of a process group."""

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of the members."""

    @property
    def my_global_rank(self) -> int: ...


class ExchangePlan:
    """The transfers within a process group, in the order in which all members go through them."""

    def __init__(self, group: RanksOfGroup) -> None:
        self._group = group
        self._entries: dict[tuple[int, CkptID], ExchangePlanEntry] = {}

    def plan(self, *, sender: int, receiver: int, id_: CkptID) -> None:
        """Add a transfer.

        Raises:
            ValueError: a rank is no member, or the receiver gets this part from somebody already.
        """
        for rank in (sender, receiver):
            if rank not in self._group.ranks:
                raise ValueError(f"rank {rank} is not in the group of {ranks_text(self._group.ranks)}")
        if (receiver, id_) in self._entries:
            raise ValueError(f"rank {receiver} gets {id_} from two ranks")
        self._entries[receiver, id_] = ExchangePlanEntry(sender, receiver, id_)

    @property
    def entries(self) -> tuple[ExchangePlanEntry, ...]:
        return tuple(self._entries.values())

    def required_ids(self, rank: int | None = None) -> list[CkptID]:
        """Return what ``rank`` has to send, to itself included; None: this rank. Each once."""
        sender = self._group.my_global_rank if rank is None else rank
        return list(dict.fromkeys(entry.id_ for entry in self.entries if entry.sender == sender))


def plan_fetches(
    holdings: Mapping[int, Collection[CkptID]], wanted: Mapping[int, Iterable[CkptID]]
) -> list[ExchangePlanEntry]:
    """Choose for every wanted part a rank that holds it: oneself, else whoever has least to send so far.

    Args:
        holdings: by rank, the parts that it can give.
        wanted: by rank, the parts that it needs.

    Raises:
        NoReplicasAvailableError: nobody holds some of them; names all of these.
    """
    holders: dict[CkptID, list[int]] = {}
    for rank in sorted(holdings):
        for id_ in holdings[rank]:
            holders.setdefault(id_, []).append(rank)
    entries, missing, sends = [], [], Counter[int]()
    for receiver in sorted(wanted):
        for id_ in sorted(wanted[receiver]):
            candidates = holders.get(id_, [])
            if not candidates:
                missing.append(id_)
                continue
            if receiver in candidates:
                sender = receiver
            else:
                sender = min(candidates, key=lambda rank: (sends[rank], rank))
                sends[sender] += 1
            entries.append(ExchangePlanEntry(sender, receiver, id_))
    if missing:
        raise NoReplicasAvailableError(missing_text(missing))
    return entries


def missing_text(missing: Collection[CkptID]) -> str:
    """Return which parts have no good copy."""
    iterations = sorted({id_.iteration for id_ in missing})
    owners = {each: ranks_text(id_.rank for id_ in missing if id_.iteration == each) for each in iterations}
    parts = "; ".join(f"iteration {iteration}, part of {owners[iteration]}" for iteration in iterations)
    ids = ", ".join(str(tuple(id_)) for id_ in sorted(set(missing)))
    return f"No replicated copies for id={ids} found! No rank has a good copy of: {parts}."
