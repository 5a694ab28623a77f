"""Flap protection: a failure that may pass counts only when it is seen again and again.

A check says with ``strikes`` how often in a row; until then the finding is a warning that says how far it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.unavailable import UnavailableError

_NAME = "strikes"
Counts = dict[str, int]
"""Consecutive sightings by ``check scope``."""


def count(
    results: Sequence[CheckResult], before: Mapping[str, int], needed: Mapping[str, int]
) -> tuple[list[CheckResult], Counts]:
    """Return the results as they count, and the new counts.

    Args:
        results: of one run.
        before: the counts of the run before.
        needed: by check; a check that is not there fails at first sight.
    """
    ran = {result.check for result in results if result.status is not Status.SKIP}
    counts = {key: n for key, n in before.items() if key.partition(" ")[0] not in ran}
    judged = []
    for result in results:
        strikes = needed.get(result.check, 1)
        if result.status is Status.FAIL and strikes > 1:
            key = f"{result.check} {result.scope}"
            counts[key] = before.get(key, 0) + 1
            if counts[key] < strikes:
                result = dataclasses.replace(
                    result,
                    status=Status.WARN,
                    node_lost=False,
                    evidence=f"{result.evidence} (seen {counts[key]} of {strikes} times in a row)",
                )
        judged.append(result)
    return judged, counts


def apply(results: Sequence[CheckResult], state: StateDir, needed: Mapping[str, int]) -> list[CheckResult]:
    """Count with what ``state`` remembers; where nothing can be remembered such a failure stays a warning."""
    before = state.load(_NAME, Counts) or {}
    judged, counts = count(results, before, needed)
    if counts != before:
        with contextlib.suppress(UnavailableError):
            state.save(_NAME, counts)
    return judged


def pending(state: StateDir) -> bool:
    """Tell whether a failure has been seen that does not count yet, or counts now."""
    return bool(state.load(_NAME, Counts))
