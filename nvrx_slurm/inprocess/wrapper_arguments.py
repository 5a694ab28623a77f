"""What the wrapper accepts, in one table: types, and which duration must be shorter than which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvrx_slurm.inprocess.abort import Abort
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.finalize import Finalize
from nvrx_slurm.inprocess.health_check import HealthCheck
from nvrx_slurm.inprocess.initialize import Initialize
from nvrx_slurm.inprocess.param_utils import (
    check_absolute_path,
    check_count,
    check_duration,
    check_less,
    check_type,
)
from nvrx_slurm.inprocess.rank_assignment import RankAssignment
from nvrx_slurm.inprocess.terminate import Terminate

_PLUGINS = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
}
_DURATIONS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
)
_MAY_BE_ZERO = ("last_call_wait", "termination_grace_time")
_SHORTER_THAN = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""The left one ends before the right one, or the right one would always be first."""
_PATHS = ("monitor_process_logfile", "monitor_process_pidfile")
_FLAGS = ("enabled", "empty_cuda_cache", "rejoin")
_COUNTS = {"active_world_size": 1, "max_rank_faults": 0}
"""Least value."""
GRANULARITIES = ("rank", "node")


def check_wrapper_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what ``Wrapper`` can't work with; arguments that ``given`` lacks are not looked at.

    Raises:
        TypeError: of another type than is accepted.
        ValueError: out of range, or two durations in the wrong order.
    """
    for name, value in given.items():
        if name in _PLUGINS:
            check_type(name, value, _PLUGINS[name], optional=True)
        elif name == "rank_assignment":
            check_type(name, value, RankAssignment)
        elif name in _DURATIONS:
            check_duration(name, value)
        elif name in _MAY_BE_ZERO:
            check_duration(name, value, may_be_zero=True)
        elif name in _PATHS:
            check_absolute_path(name, value)
        elif name in _FLAGS:
            check_type(name, value, bool)
        elif name in _COUNTS:
            check_count(name, value, _COUNTS[name])
        elif name == "granularity" and value not in GRANULARITIES:
            raise ValueError(f"granularity is {value!r}: 'rank' or 'node' is accepted")
    for shorter, longer in _SHORTER_THAN:
        if shorter in given and longer in given:
            check_less((shorter, given[shorter]), (longer, given[longer]))
