"""Which iterations are whole, given what every rank holds. Pure: no file and no other rank is asked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart

Holdings = Mapping[int, Collection[HeldPart]]
"""By rank, the parts that it has at hand."""


@dataclass(frozen=True, order=True)
class Save:
    """All parts of one save. The newest is the greatest."""

    iteration: int
    world_size: int
    save_id: str

    def part(self, owner: int, session_id: str) -> CkptID:
        return CkptID(self.iteration, owner, session_id)


@dataclass(frozen=True)
class IncompleteSave:
    """A save some of whose parts nobody has."""

    save: Save
    missing: tuple[int, ...]
    """Ranks whose part is missing."""

    def __str__(self) -> str:
        return f"iteration {self.save.iteration} lacks the parts of {ranks_text(self.missing)}"


def saves_by_completeness(holdings: Holdings) -> tuple[list[Save], list[IncompleteSave]]:
    """Return what is whole and what is not, each with the newest first.

    A save is whole if a part of each of *its* ranks is somewhere. Parts of different saves of one
    iteration are never taken together: they may come from different courses of the training.
    """
    owners: dict[Save, set[int]] = defaultdict(set)
    for parts in holdings.values():
        for part in parts:
            owners[Save(part.id.iteration, part.world_size, part.save_id)].add(part.id.rank)
    whole, partial = [], []
    for save in sorted(owners, reverse=True):
        missing = tuple(rank for rank in range(save.world_size) if rank not in owners[save])
        if missing:
            partial.append(IncompleteSave(save, missing))
        else:
            whole.append(save)
    return whole, partial


def find_latest(holdings: Holdings, world_size: int | None) -> Save | None:
    """Return the newest whole save of a job of ``world_size`` ranks (None: any), or None."""
    whole, _ = saves_by_completeness(holdings)
    return next((save for save in whole if world_size in (None, save.world_size)), None)


def ids_of(save: Save, holdings: Holdings) -> dict[int, set[CkptID]]:
    """Return by rank the parts of ``save`` that it holds."""
    return {
        rank: {
            part.id
            for part in parts
            if (part.id.iteration, part.world_size, part.save_id)
            == (save.iteration, save.world_size, save.save_id)
        }
        for rank, parts in holdings.items()
    }


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"
