"""In-process restart: after a fault every rank that is left calls the training function again, in place.

Names and arguments follow ``nvidia_resiliency_ext.inprocess``, so that code moves by changing the import.
"""

from nvrx_slurm.inprocess import (
    abort,
    attribution,
    completion,
    compose,
    exception,
    finalize,
    health_check,
    initialize,
    monitor_thread,
    nested_restarter,
    progress_watchdog,
    rank_assignment,
    state,
    store,
    terminate,
    wrap,
)
from nvrx_slurm.inprocess.call_wrapper import CallWrapper
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.timings import RestartTimings
from nvrx_slurm.inprocess.wrap import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "RestartTimings",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_thread",
    "nested_restarter",
    "progress_watchdog",
    "rank_assignment",
    "state",
    "store",
    "terminate",
    "wrap",
]
