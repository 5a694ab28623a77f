"""The options that bound restarts, which every command that starts ranks has beside ``--max-restarts``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from nvrx_slurm.cli.parameters import Count
from nvrx_slurm.coordinator.limits import (
    NO_RESTART_CODE,
    VERDICT_PATIENCE_S,
    Limits,
    StopAction,
    StragglerAction,
)
from nvrx_slurm.fault_tolerance.config import FaultToleranceConfig

_F = TypeVar("_F", bound=Callable[..., Any])

_TAKEN_CODES = (1, 2, 75)
"""Those that say something else."""


def _no_restart_code(_context: click.Context, _option: click.Parameter, value: int) -> int:
    if value in _TAKEN_CODES:
        taken = ", ".join(map(str, _TAKEN_CODES))
        raise click.BadParameter(f"{value} says something else: 1 to 255 but {taken} is accepted")
    return value


_OPTIONS = [
    click.option(
        "--no-restart-exit-code",
        "--ft-no-restart-exit-code",
        type=click.IntRange(1, 255),
        default=NO_RESTART_CODE,
        show_default=True,
        callback=_no_restart_code,
        help="Exit code when a restart, here or elsewhere, is of no use: no progress, or a cause that comes "
        "again.",
    ),
    click.option(
        "--max-restarts-per-hour",
        type=Count(1),
        help="Restarts of all ranks within any hour of this allocation; one more, and the job fails."
        "  [default: no bound]",
    ),
    click.option(
        "--exclude-after",
        type=Count(0),
        default=3,
        show_default=True,
        help="Faults of its own after which a node leaves the job if there is a spare; 0: never.",
    ),
    click.option(
        "--straggler-action",
        type=click.Choice([action.value for action in StragglerAction]),
        default=StragglerAction.LOG.value,
        show_default=True,
        help="What is done about a rank that is slow in three reports in a row. exclude: a spare, if there "
        "is one, takes the place of its node, for which all ranks restart.",
    ),
]


def limit_options(command: _F) -> _F:
    """Add the options, below ``fault_tolerance_options``; ``command`` gets them as ``limits``."""

    @functools.wraps(command)
    def with_limits(
        *args: Any,
        fault_tolerance: FaultToleranceConfig,
        no_restart_exit_code: int,
        max_restarts_per_hour: int | None,
        exclude_after: int,
        straggler_action: str,
        **kwargs: Any,
    ) -> Any:
        action = StopAction(fault_tolerance.attribution_stop_action)
        waits = fault_tolerance.attribution and action is StopAction.NO_RESTART
        limits = Limits(
            max_no_progress_cycles=fault_tolerance.max_no_progress_cycles,
            min_progress_iterations=fault_tolerance.min_progress_iterations,
            no_restart_code=no_restart_exit_code,
            max_restarts_per_hour=max_restarts_per_hour,
            exclude_after=exclude_after,
            straggler_action=StragglerAction(straggler_action),
            attribution_stop_action=action,
            verdict_patience_s=VERDICT_PATIENCE_S if waits else 0.0,
        )
        return command(*args, fault_tolerance=fault_tolerance, limits=limits, **kwargs)

    decorated: Any = with_limits
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]
