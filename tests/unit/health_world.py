"""Running one check on a node that is not there."""

from __future__ import annotations

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import all_checks
from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.runner import run_one

CHECKS = all_checks()


def run(name: str, node: Node, **settings: object) -> tuple[CheckResult, ...]:
    """Return what the check says, as the runner would hand it on."""
    check = CHECKS[name]
    return run_one(check, node, check.settings(**settings)).results


def told(name: str, node: Node, **settings: object) -> list[tuple[str, str, str]]:
    """The same, as status, scope and evidence."""
    return [(r.status.value, r.scope, r.evidence) for r in run(name, node, **settings)]


def status(name: str, node: Node, **settings: object) -> str:
    """The status that all results of the check have."""
    found = {result.status for result in run(name, node, **settings)}
    assert len(found) == 1, found
    return found.pop().value


def failed(results: tuple[CheckResult, ...]) -> list[CheckResult]:
    return [result for result in results if result.status is Status.FAIL]
