"""Runs checks side by side under one budget. Nothing that a check does gets further than its own results."""

from __future__ import annotations

import dataclasses
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.isolation import Child, Emit
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NvmlError
from nvrx_slurm.health.registry import Check, Settings
from nvrx_slurm.health.result import CheckResult, Status, ok, skip, warn
from nvrx_slurm.health.unavailable import UnavailableError

_LINGER_S = 1.0


@dataclass(frozen=True)
class Finished:
    """All that one check said."""

    check: str
    seconds: float
    results: tuple[CheckResult, ...]


def run_one(check: Check, node: Node, settings: Settings) -> Finished:
    """Run a check in this process; whatever it raises becomes a result."""
    began = time.monotonic()
    try:
        results = tuple(check.run(node, settings)) or (ok("nothing to complain about"),)
    except UnavailableError as error:
        where = error.signal or check.needs[0].value
        results = ((warn if error.expected else skip)(f"{where}: {error.why}", where),)
    except NvmlError as error:
        results = (warn(str(error), "NVML"),)
    except Exception as error:
        results = (
            warn(
                f"the check itself failed: {type(error).__name__}: {error}"[:300],
                check.name,
                remedy="report this to the maintainers of nvrx-slurm; the node is not to blame",
            ),
        )
    if settings.mode == "warn-only":
        results = tuple(map(_demoted, results))
    named = tuple(dataclasses.replace(result, check=check.name) for result in results)
    return Finished(check.name, time.monotonic() - began, named)


def _demoted(result: CheckResult) -> CheckResult:
    if result.status is not Status.FAIL:
        return result
    evidence = f"{result.evidence} (would fail, but this check is warn-only here)"
    return dataclasses.replace(result, status=Status.WARN, evidence=evidence, node_lost=False)


def run_checks(checks: Sequence[Check], node: Node, config: HealthConfig, budget_s: float) -> list[Finished]:
    """Run all ``checks``, each lane in a process of its own; return within ``budget_s``, in their order."""
    deadline = time.monotonic() + budget_s
    lanes: dict[str, list[Check]] = {}
    for check in checks:
        lanes.setdefault(check.lane, []).append(check)
    running = [_Lane(members, node, config, budget_s) for members in lanes.values()]
    with selectors.DefaultSelector() as selector:
        for lane in running:
            if lane.child is not None:
                selector.register(lane.child.descriptor, selectors.EVENT_READ, lane)
        while waiting := [lane for lane in running if lane.child is not None]:
            now = time.monotonic()
            due = min(min(lane.due for lane in waiting), deadline)
            if now >= due:
                for lane in [lane for lane in waiting if now >= min(lane.due, deadline)]:
                    selector.unregister(lane.descriptor)
                    lane.give_up(out_of_budget=now >= deadline)
                continue
            for key, _ in selector.select(due - now):
                key.data.receive(lambda lane: selector.unregister(lane.descriptor))
    found = {finished.check: finished for lane in running for finished in lane.finished}
    return [found[check.name] for check in checks]


class _Lane:
    """Checks that run one after another in one child process, and what the parent knows of them."""

    def __init__(self, checks: list[Check], node: Node, config: HealthConfig, budget_s: float) -> None:
        self._left = list(checks)
        self._config = config
        self._budget_s = budget_s
        self.finished: list[Finished] = []
        self.child: Child | None = None
        self._began = time.monotonic()

        def work(emit: Emit) -> None:
            for check in checks:
                emit(run_one(check, node, config.of(check)))

        try:
            self.child = Child(work, budget_s + _LINGER_S)
        except OSError as error:
            self._explain(f"could not be started: no process for it: {error.strerror}")

    @property
    def descriptor(self) -> int:
        assert self.child is not None
        return self.child.descriptor

    @property
    def _timeout_s(self) -> float:
        return self._left[0].timeout_s(self._config.of(self._left[0]))

    @property
    def due(self) -> float:
        """When the check that runs now is late."""
        return self._began + (self._timeout_s if self._left else _LINGER_S)

    def receive(self, unregister: Callable[[_Lane], None]) -> None:
        assert self.child is not None
        for message in self.child.receive():
            self.finished.append(msgspec.json.decode(message, type=Finished))
            self._left.pop(0)
            self._began = time.monotonic()
        if self.child.ended or not self._left:
            unregister(self)
            how = self.child.close()
            self.child = None
            self._explain(f"its process {how}")

    def give_up(self, *, out_of_budget: bool) -> None:
        assert self.child is not None
        self.child.close()
        self.child = None
        if out_of_budget:
            self._explain(f"timed out: the budget of {self._budget_s:g} s for all checks is used up")
        elif self._left:
            self._explain(f"timed out after {self._timeout_s:g} s")

    def _explain(self, why: str) -> None:
        """Say of the check that ran what became of it, and of those behind it that they never did."""
        seconds = time.monotonic() - self._began
        for position, check in enumerate(self._left):
            evidence = why if position == 0 else f"not run: {self._left[0].name} before it {why}"
            result = dataclasses.replace(warn(evidence, check.needs[0].value), check=check.name)
            self.finished.append(Finished(check.name, seconds if position == 0 else 0.0, (result,)))
        self._left.clear()
