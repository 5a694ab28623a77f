"""Which checkpoints are newer than which, and which of them a directory can do without; pure.

Times of files lie after a copy. So names tell the order where they have numbers: checkpoints whose names
differ in numbers alone are a *series*, and are ordered by the number behind ``step`` or ``iter``, or else by
all numbers from the left. Saves of local checkpoints are ordered by iteration. What has no number is ordered
by the time of its commit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nvrx_slurm.checkpointing.inspection import Checkpoint, State

_NUMBER = re.compile(r"(rank\W?_?\d+)|\d+", re.IGNORECASE)
_STEP = re.compile(r"(?:step|iter|iteration)[^0-9a-z]*(\d+)", re.IGNORECASE)
_LOCAL = "\0local"
_GRAIN = 1.0
"""Object stores tell times in whole seconds, rounded down."""


@dataclass(frozen=True, order=True)
class Age:
    """Sorts checkpoints by series, and oldest first within one."""

    series: str
    """The name without its numbers; empty where it has none."""
    numbers: tuple[int, ...]
    committed: float


def age(checkpoint: Checkpoint) -> Age:
    """Return the place of a checkpoint among others."""
    if checkpoint.local is not None:
        return Age(_LOCAL, (checkpoint.local.iteration,), checkpoint.modified)
    name = checkpoint.name
    steps = _STEP.findall(name)
    numbers = steps[-1:] or [found[0] for found in _NUMBER.finditer(name) if found[1] is None]
    series = _NUMBER.sub(lambda found: found[1] or "#", name) if numbers else ""
    return Age(series, tuple(map(int, numbers)), checkpoint.modified)


def superfluous(
    found: Iterable[Checkpoint], keep: int, is_whole: Callable[[Checkpoint], bool]
) -> list[Checkpoint]:
    """Return what can go: of each series all but the newest good ones, and what is torn and older than those.

    Args:
        keep: how many good ones of each series stay.
        is_whole: whether one that says it is committed is; asked only of those that would stay.
    """
    series: dict[str, list[Checkpoint]] = defaultdict(list)
    for each in sorted(found, key=age):
        series[age(each).series].append(each)
    kept: list[Checkpoint] = []
    old: list[Checkpoint] = []
    bad: list[tuple[Checkpoint, Age | None]] = []
    for members in series.values():
        good: list[Checkpoint] = []
        for each in reversed(members):
            if each.state is not State.COMMITTED:
                bad.append((each, age(good[0]) if good else None))
            elif len(good) == keep:
                old.append(each)
            elif is_whole(each):
                good.append(each)
            else:
                bad.append((each, age(good[0]) if good else None))
        kept += good
    newest = max((each.modified for each in kept), default=float("-inf"))
    # What is torn or damaged may be written just now: only what is older in every respect is certainly left.
    for each, newer in bad:
        is_left = each.modified + _GRAIN <= newest and (newer is not None or not age(each).numbers)
        if is_left and each.state is not State.UNREADABLE:
            old.append(each)
    return sorted(old, key=age)
