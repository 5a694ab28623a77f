"""Whether another try makes sense: a pure table over a verdict's facts. Its numbers are configuration."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from nvrx_slurm.attribution.evidence import SchedulerState
from nvrx_slurm.attribution.history import Counts
from nvrx_slurm.attribution.logs.rules import Family, Restart, Scope
from nvrx_slurm.attribution.site_file import SiteFileError, read_yaml


class Action(str, enum.Enum):
    """What is to happen next."""

    RESTART = "restart"
    RESTART_EXCLUDE = "restart_exclude"
    """Restart without the nodes that the decision names."""
    HOLD = "hold"
    """Requeue and hold until the probe that the reason names succeeds."""
    WAIT = "wait"
    """Slurm has the job in hand."""
    STOP = "stop"


_Count = Annotated[int, msgspec.Meta(ge=0, le=10**6)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=10**9)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of the table; durations in seconds."""

    bounded_retries: _Count = 1
    """Repeats of one cause without progress that bounded families are allowed."""
    general_retries: _Count = 2
    """Likewise for all others."""
    flake_retries: _Count = 1
    """For families that never heal, where training had made steps before."""
    no_checkpoint_attempts: _Count = 3
    startup_failures: _Count = 3
    startup_s: _Seconds = 120.0
    """An attempt that ends sooner, without any progress, has not come to train."""
    max_restarts: _Count | None = None
    """Over all requeues; None: as many as the job itself allows, else 10."""
    max_restarts_per_hour: _Count = 4
    infra_restarts: _Count = 10
    """Restarts with exclusion: they do not use up the budget above."""
    backoff_s: _Seconds = 30.0
    backoff_max_s: _Seconds = 900.0
    jitter: _Share = 0.2
    on_time_limit: Literal["continue", "stop"] = "continue"
    """``continue`` where a checkpoint advanced in the attempt, or ``stop``."""
    implications: _Count = 2
    """Of a node, before a family that excludes on repeat does."""


_NO_HISTORY = Counts()
_MAX_RESTARTS = 10


class PolicyError(ValueError):
    """The policy file is wrong; the message says where, what, and what is accepted."""


@dataclass(frozen=True)
class Case:
    """What is decided upon."""

    family: Family
    counts: Counts = _NO_HISTORY
    scheduler: SchedulerState | None = None
    trained: bool | None = None
    """A step was completed in this attempt; None when nobody was to tell."""
    checkpoint_advanced: bool = False
    exclude: tuple[str, ...] = ()
    """Nodes that trusted evidence implicates strongly enough."""
    max_restarts: int | None = None
    """What the job itself allows, if that is known."""
    certain: bool = True
    """The cause is more than an unverified text."""


@dataclass(frozen=True)
class Decision:
    """What happens next, by which rule, why, and what was not done."""

    action: Action
    rule: str
    why: str
    exclude: tuple[str, ...] = ()
    delay_s: float = 0.0
    rejected: str = ""
    counted: bool = True
    """It uses up the user's budget."""


def load_policy(path: Path) -> PolicyConfig:
    """Read a YAML file of :class:`PolicyConfig`'s fields.

    Raises:
        PolicyError
    """
    try:
        return msgspec.convert(read_yaml(path) or {}, PolicyConfig)
    except SiteFileError as error:
        raise PolicyError(f"policy file {path}: {error}") from error
    except msgspec.ValidationError as error:
        accepted = ", ".join(PolicyConfig.__struct_fields__)
        raise PolicyError(f"policy file {path}: {error}; accepted: {accepted}") from error


def decide(case: Case, config: PolicyConfig = PolicyConfig()) -> Decision:  # noqa: B008  # it is frozen
    """Return the first row of the table that applies; the last one always does."""
    for row in _TABLE:
        decision = row(case, config)
        if decision is not None:
            return decision
    return _restart(case, config)


def _stop(rule: str, why: str, rejected: str = "restart", counted: bool = True) -> Decision:
    return Decision(Action.STOP, rule, why, rejected=rejected, counted=counted)


def _over(case: Case, config: PolicyConfig) -> Decision | None:
    match case.scheduler:
        case SchedulerState.COMPLETED:
            return _stop("1-over", "the job is complete", counted=False)
        case SchedulerState.CANCELLED | SchedulerState.DEADLINE:
            return _stop("1-over", f"Slurm says {case.scheduler.value}: that was wanted", counted=False)
        case _ if case.family.id == "slurm.cancelled" and case.certain:
            return _stop("1-over", "the job was cancelled: that was wanted", counted=False)
        case _:
            return None


def _slurm_owns(case: Case, config: PolicyConfig) -> Decision | None:
    if case.scheduler is SchedulerState.PREEMPTED or case.family.id in ("slurm.preempted", "slurm.requeued"):
        return Decision(Action.WAIT, "2-requeued", "Slurm starts the job again by itself", counted=False)
    return None


def _time_limit(case: Case, config: PolicyConfig) -> Decision | None:
    if case.scheduler is not SchedulerState.TIMEOUT and case.family.id != "slurm.time_limit":
        return None
    if case.checkpoint_advanced and config.on_time_limit == "continue":
        return Decision(
            Action.RESTART, "3-time-limit", "a checkpoint was saved since the start", counted=False
        )
    reason = "on_time_limit is stop" if case.checkpoint_advanced else "no newer checkpoint was saved"
    return _stop("3-time-limit", f"the time limit was reached and {reason}", counted=False)


def _deterministic(case: Case, config: PolicyConfig) -> Decision | None:
    held = case.family.restart is Restart.NO and case.family.scope is not Scope.STORAGE
    if not held or not case.certain:
        return None
    if not case.trained:
        return _stop("4-deterministic", f"{case.family.says}: the next try would end the same")
    if case.counts.same_root_no_advance >= config.flake_retries:
        return _stop("4-deterministic", f"{case.family.says}, again and without progress")
    return None


def _hold(case: Case, config: PolicyConfig) -> Decision | None:
    if case.family.id not in ("storage.no_space", "storage.quota"):
        return None
    why = f"{case.family.says}: held until there is room"
    return Decision(Action.HOLD, "5-hold", why, rejected="restart: it would fill up again")


def _exclude(case: Case, config: PolicyConfig) -> Decision | None:
    if not case.exclude:
        return None
    nodes = ", ".join(case.exclude)
    if case.counts.infra >= config.infra_restarts:
        return _stop("6-exclude", f"{nodes}: {case.family.says}, after {case.counts.infra} such restarts")
    why = f"{nodes}: {case.family.says}"
    return Decision(Action.RESTART_EXCLUDE, "6-exclude", why, case.exclude, counted=False)


def _repeated(case: Case, config: PolicyConfig) -> Decision | None:
    bounded = case.family.restart is Restart.BOUNDED
    allowed = config.bounded_retries if bounded else config.general_retries
    seen = case.counts.same_root_no_advance
    if seen < allowed or case.family.restart is Restart.DEFER:
        return None
    return _stop("7-repeated", f"the same cause {seen + 1} times without progress: {case.family.says}")


def _no_checkpoint(case: Case, config: PolicyConfig) -> Decision | None:
    if case.counts.no_checkpoint < config.no_checkpoint_attempts:
        return None
    return _stop(
        "8-no-checkpoint", f"{case.counts.no_checkpoint} attempts in a row saved no newer checkpoint"
    )


def _budget(case: Case, config: PolicyConfig) -> Decision | None:
    bounds = [most for most in (config.max_restarts, case.max_restarts) if most is not None]
    if case.counts.counted >= min(bounds, default=_MAX_RESTARTS):
        return _stop("9-budget", f"{case.counts.counted} restarts are used up")
    if case.counts.last_hour >= config.max_restarts_per_hour:
        why = f"{case.counts.last_hour} restarts within the last hour: the next one waits"
        return Decision(Action.RESTART, "9-back-off", why, delay_s=config.backoff_max_s)
    return None


def _startup(case: Case, config: PolicyConfig) -> Decision | None:
    if case.counts.startup_failures < config.startup_failures:
        return None
    return _stop(
        "10-startup",
        f"{case.counts.startup_failures} attempts ended before the first step: {case.family.says}",
    )


def _restart(case: Case, config: PolicyConfig) -> Decision:
    waits = case.family.scope in (Scope.EXTERNAL, Scope.STORAGE)
    delay = min(config.backoff_max_s, config.backoff_s * 2 ** min(case.counts.counted, 10)) if waits else 0.0
    return Decision(
        Action.RESTART, "11-restart", case.family.says, delay_s=delay, rejected=_why_not_stop(case)
    )


def _why_not_stop(case: Case) -> str:
    if not case.certain:
        return "exclude: any program can print this text"
    if case.trained is None and case.counts.same_root_no_advance == 0:
        return "stop: whether there was progress is not known"
    return "stop: no cause has repeated without progress often enough"


def with_jitter(decision: Decision, config: PolicyConfig, rng: random.Random) -> float:
    """Return the delay to wait, so that jobs that fell together do not come back together."""
    return decision.delay_s * (1 + rng.uniform(-config.jitter, config.jitter))


_Row = Callable[[Case, PolicyConfig], "Decision | None"]
_TABLE: Sequence[_Row] = (
    _over,
    _slurm_owns,
    _time_limit,
    _deterministic,
    _hold,
    _exclude,
    _repeated,
    _no_checkpoint,
    _budget,
    _startup,
)


def describe(config: PolicyConfig) -> dict[str, Any]:
    """Return the configuration as plain values."""
    return msgspec.to_builtins(config)  # type: ignore[no-any-return]
