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
    nested_restarter,
    rank_assignment,
    state,
    terminate,
)
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.state import FrozenState, Mode, State

__all__ = [
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "abort",
    "attribution",
    "completion",
    "compose",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "state",
    "terminate",
]
