"""Names of the parts of a checkpoint: one part is one rank's share of one iteration."""

from __future__ import annotations

import re
from typing import NamedTuple

from nvrx_slurm.checkpointing.local.errors import CheckpointingException

_ITERATION_DIGITS = 7
"""To at least so many digits an iteration is padded with zeros."""
_NAME = re.compile(r"iter_(\d+)_(\d+)_local\.pt")


class CkptID(NamedTuple):
    """Names one part; equal to the plain tuple of the same values."""

    iteration: int
    rank: int
    """The rank whose state it is, whoever keeps it."""
    session_id: str


class HeldPart(NamedTuple):
    """A part as some rank has it at hand."""

    id: CkptID
    world_size: int
    """Of the job that saved it: so many parts make the checkpoint whole."""
    save_id: str
    """The same for all parts of one save, and for no others unless their content is the same."""


def checked_iteration(iteration: int) -> int:
    """Return ``iteration``.

    Raises:
        CheckpointingException: it is negative, or no integer.
    """
    if not isinstance(iteration, int) or isinstance(iteration, bool) or iteration < 0:
        raise CheckpointingException(f"Invalid iteration {iteration!r}: an integer from 0 is accepted.")
    return iteration


def part_name(iteration: int | str, rank: int | str) -> str:
    """Return the file name of a part; either value may be text, ``*`` for instance.

    Example::

        part_name(10, 3) == "iter_0000010_3_local.pt"
    """
    number = iteration if isinstance(iteration, str) else f"{iteration:0{_ITERATION_DIGITS}d}"
    return f"iter_{number}_{rank}_local.pt"


def parse_part_name(name: str) -> tuple[int, int] | None:
    """Return iteration and owner of a finished part; None: the file is none."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
