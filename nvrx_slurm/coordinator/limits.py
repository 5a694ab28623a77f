"""How far a job may go on as it is: what the user decided."""

from __future__ import annotations

import enum
from dataclasses import dataclass

NO_RESTART_CODE = 93
VERDICT_PATIENCE_S = 10.0
"""How long a third try waits to learn whether it is of use."""


class StopAction(str, enum.Enum):
    """What follows when attribution finds that another try is of no use."""

    LOG = "log"
    """It is told."""
    NO_RESTART = "no-restart"
    """The job ends as soon as that costs no training."""


class StragglerAction(str, enum.Enum):
    """What follows when a rank is slow for good."""

    LOG = "log"
    """It is told."""
    EXCLUDE = "exclude"
    """A spare takes the place of its node, if there is one."""


@dataclass(frozen=True)
class Limits:
    """The bounds beside ``max_restarts``; each is checked when a cycle has ended by a fault."""

    max_no_progress_cycles: int = 3
    """Cycles in a row that do not take training further; 0: no bound."""
    min_progress_iterations: int = 1
    """How much the highest step must grow in a cycle to be progress."""
    no_restart_code: int = NO_RESTART_CODE
    """Exit code of a job for which a restart, here or elsewhere, is of no use."""
    max_restarts_per_hour: int | None = None
    """Within any 3600 s; None: no bound."""
    exclude_after: int = 3
    """Faults of its own after which a node leaves the job if a spare can take its place; 0: never."""
    attribution_stop_action: StopAction = StopAction.LOG
    straggler_action: StragglerAction = StragglerAction.LOG
    verdict_patience_s: float = 0.0
    """How long, after two cycles in a row that have not trained, the next waits for the verdict on the first;
    0: it does not, or nobody attributes."""
