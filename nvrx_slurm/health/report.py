"""One run of a node's checks, and what it found."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from nvrx_slurm.health import strikes
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Check
from nvrx_slurm.health.result import CheckResult, Status
from nvrx_slurm.health.runner import run_checks
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.verdict import ExitCode, exit_code, overall

SCHEMA = "nvrx.health.v1"


class UnknownCheckError(ValueError):
    """Nothing of that name; the message lists what there is."""


@dataclass(frozen=True)
class HealthReport:
    """What the checks of one stage said."""

    host: str
    stage: Stage
    boot_id: str
    ts: float
    """Unix seconds when it began."""
    seconds: float
    results: tuple[CheckResult, ...]
    """In the order of the checks' names."""
    durations: Mapping[str, float]
    """Seconds by check."""

    @property
    def status(self) -> Status:
        return overall(self.results)

    @property
    def exit_code(self) -> ExitCode:
        return exit_code(self.results)

    def to_json(self) -> bytes:
        """Return one JSON document, with its schema and the overall status beside the fields."""
        document = {"schema": SCHEMA, "status": self.status.value, **msgspec.to_builtins(self)}
        return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"

    @staticmethod
    def from_json(data: bytes) -> HealthReport:
        """Raises:
        ValueError: not such a document.
        """
        return msgspec.json.decode(data, type=HealthReport)


def select(
    checks: Mapping[str, Check], stage: Stage, config: HealthConfig, only: Sequence[str] = ()
) -> list[Check]:
    """Return what is to be run: the stage's checks that are on, or those that are named.

    A check that is asked for by name is run at any stage, opt-in or not; one that the configuration has
    switched off stays off.

    Raises:
        UnknownCheckError: a name that no check has.
    """
    for name in only:
        if name not in checks:
            raise UnknownCheckError(f"there is no check {name!r}; there are {', '.join(checks)}")
    if only:
        return [checks[name] for name in dict.fromkeys(only) if config.of(checks[name]).mode != "off"]
    return [check for check in checks.values() if stage in check.stages and config.is_on(check)]


def examine(
    checks: Sequence[Check], node: Node, config: HealthConfig, budget_s: float | None = None
) -> HealthReport:
    """Run ``checks`` on ``node``, within ``budget_s`` or the configured budget."""
    began, now = time.monotonic(), node.clock.now()
    finished = run_checks(checks, node, config, budget_s or config.budget_s)
    needed = {check.name: check.strikes_needed(config.of(check)) for check in checks}
    results = [result for one in finished for result in one.results]
    return HealthReport(
        host=node.host,
        stage=node.stage,
        boot_id=node.boot_id,
        ts=now,
        seconds=time.monotonic() - began,
        results=tuple(strikes.apply(results, node.state, needed, node.clock.since_boot())),
        durations={one.check: round(one.seconds, 6) for one in finished},
    )
