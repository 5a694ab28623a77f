"""The list of checks: one function and one decorator each.

A check is a module in :mod:`nvrx_slurm.health.checks`::

    @check("gpu-mig", stages=NODE_STAGES, needs=(Need.NVML,), budget_s=2.0)
    def gpu_mig(node: Node, settings: MigSettings) -> list[CheckResult]:
        \"\"\"First line: what it is for. The rest: what it reads.\"\"\"

The command line, the configuration's keys, ``explain`` and the table in ``docs/health.md`` follow from that.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.result import CheckResult
from nvrx_slurm.health.stage import Stage


class Need(str, enum.Enum):
    """What a check reads; where that can't be had the check is skipped, or warns, and says so."""

    NVML = "NVML"
    SYSFS = "sysfs"
    PROCFS = "procfs"
    KERNEL_LOG = "kernel log"
    FILE_SYSTEMS = "file systems"
    COMMANDS = "programs"
    CONTROLLER = "Slurm controller"
    SOCKET = "Unix socket"
    BASELINE = "baseline"
    STATE = "state directory"
    GPU_MEMORY = "free GPU memory"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys that every check has; a check with thresholds of its own derives from it."""

    mode: Annotated[
        Literal["on", "off", "warn-only"],
        msgspec.Meta(description="off: not run; warn-only: a fail counts as warn"),
    ] = "on"
    timeout_s: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=600)] | None,
        msgspec.Meta(description="a check that takes longer is a warn; null: its own budget"),
    ] = None
    strikes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=100)] | None,
        msgspec.Meta(description="a fail counts when seen so often in a row; null: its own"),
    ] = None


CheckFunction = Callable[[Node, Any], Sequence[CheckResult]]


@dataclass(frozen=True)
class Check:
    """One check and what its decorator states."""

    name: str
    run: CheckFunction
    stages: tuple[Stage, ...]
    needs: tuple[Need, ...]
    settings: type[Settings]
    budget_s: float
    strikes: int
    lane: str
    """Checks of one lane run one after another in one process; lanes run side by side."""
    opt_in: bool

    def timeout_s(self, settings: Settings) -> float:
        """How long it may take."""
        return self.budget_s if settings.timeout_s is None else settings.timeout_s

    def strikes_needed(self, settings: Settings) -> int:
        """How often in a row a failure must be seen to count as one."""
        return self.strikes if settings.strikes is None else settings.strikes

    @property
    def summary(self) -> str:
        """What it is for, in one line."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0].rstrip(".")

    @property
    def reads(self) -> str:
        """What it reads and how it decides."""
        return (inspect.getdoc(self.run) or "").partition("\n")[2].strip()

    @property
    def defaults(self) -> Settings:
        return self.settings()


_CHECKS: dict[str, Check] = {}


def check(
    name: str,
    *,
    stages: Sequence[Stage],
    needs: Sequence[Need],
    settings: type[Settings] = Settings,
    budget_s: float = 2.0,
    strikes: int = 1,
    lane: str | None = None,
    opt_in: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check.

    Args:
        name: kebab-case; also its key in the configuration and the check in a node's reason.
        stages: when it runs.
        needs: what it reads.
        settings: its keys in the configuration, and their defaults.
        budget_s: how long it may take.
        strikes: how often in a row a failure must be seen to count as one; 1 drains at first sight.
        lane: its process; None: one for all that need NVML, and else one of its own.
        opt_in: it runs only where it is switched on or asked for by name.
    """

    def register(function: CheckFunction) -> CheckFunction:
        if name in _CHECKS:
            raise ValueError(f"two checks are called {name}")
        own = lane or ("gpu" if Need.NVML in needs else name)
        _CHECKS[name] = Check(
            name, function, tuple(stages), tuple(needs), settings, budget_s, strikes, own, opt_in
        )
        return function

    return register


def all_checks() -> dict[str, Check]:
    """Return every check by name, those of one kind together."""
    from nvrx_slurm.health import checks

    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    return dict(sorted(_CHECKS.items()))
