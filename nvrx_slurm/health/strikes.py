"""Flap protection: a failure that may pass counts only when it is seen again and again.

A check says with ``strikes`` how often in a row; until then the finding is a warning that says how far it is.
Hooks of several jobs look in the same moment: what is seen again within :data:`APART_S` was seen once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec

from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.unavailable import UnavailableError

APART_S = 10.0
_NAME = "strikes"


class Seen(msgspec.Struct, frozen=True):
    """How often a failure has been seen in a row."""

    times: int
    at: float
    """When it was counted last, in seconds since boot."""


Counts = dict[str, Seen]
"""By ``check scope``."""


def count(
    results: Sequence[CheckResult], before: Mapping[str, Seen], needed: Mapping[str, int], now: float
) -> tuple[list[CheckResult], Counts]:
    """Return the results as they count, and the new counts.

    Args:
        results: of one run.
        before: the counts of the run before.
        needed: by check; a check that is not there fails at first sight.
        now: seconds since boot.
    """
    ran = {result.check for result in results if result.status is not Status.SKIP}
    counts = {key: seen for key, seen in before.items() if key.partition(" ")[0] not in ran}
    judged = []
    for result in results:
        strikes = needed.get(result.check, 1)
        if result.status is Status.FAIL and strikes > 1:
            key = f"{result.check} {result.scope}"
            counts[key] = _again(before.get(key), now)
            if counts[key].times < strikes:
                result = dataclasses.replace(
                    result,
                    status=Status.WARN,
                    node_lost=False,
                    evidence=f"{result.evidence} (seen {counts[key].times} of {strikes} times in a row)",
                )
        judged.append(result)
    return judged, counts


def _again(seen: Seen | None, now: float) -> Seen:
    if seen is None:
        return Seen(1, now)
    # Before it: the node has booted since.
    return seen if 0 <= now - seen.at < APART_S else Seen(seen.times + 1, now)


def apply(
    results: Sequence[CheckResult], state: StateDir, needed: Mapping[str, int], now: float
) -> list[CheckResult]:
    """Count with what ``state`` remembers; where nothing can be remembered such a failure stays a warning.

    What it remembers then is of some time ago, and is forgotten.
    """
    before = state.load(_NAME, Counts) or {}
    judged, counts = count(results, before, needed, now)
    if counts != before:
        try:
            state.save(_NAME, counts)
        except UnavailableError:
            state.forget(_NAME)
            judged, _ = count(results, {}, needed, now)
    return judged


def pending(state: StateDir) -> bool:
    """Tell whether a failure has been seen that does not count yet, or counts now."""
    return bool(state.load(_NAME, Counts))
