"""From results to one verdict."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from nvrx_slurm.health.result import CheckResult, Status


class ExitCode(enum.IntEnum):
    """As Nagios plug-ins give them (Monitoring Plugins Development Guidelines)."""

    OK = 0
    WARN = 1
    FAIL = 2
    UNKNOWN = 3


_CODES = {Status.OK: ExitCode.OK, Status.WARN: ExitCode.WARN, Status.FAIL: ExitCode.FAIL}
_ORDER = (Status.FAIL, Status.WARN, Status.OK)


def overall(results: Sequence[CheckResult]) -> Status:
    """Return the worst status; ``skip`` only if nothing at all could be checked."""
    seen = {result.status for result in results}
    return next((status for status in _ORDER if status in seen), Status.SKIP)


def exit_code(results: Sequence[CheckResult]) -> ExitCode:
    return _CODES.get(overall(results), ExitCode.UNKNOWN)


def failures(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return what a node may be drained for, the worst first: lost parts before the rest."""
    found = [result for result in results if result.status is Status.FAIL]
    return sorted(found, key=lambda result: not result.node_lost)
