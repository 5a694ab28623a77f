"""When checks are run."""

from __future__ import annotations

import enum


class Stage(str, enum.Enum):
    """One place in the life of a node and its jobs."""

    PROLOG = "prolog"
    """Before a job's first process on the node; nothing of a job should be there."""
    EPILOG = "epilog"
    """After a job's last process."""
    RESTART = "restart"
    """Inside a job, without privileges, beside its training."""
    PERIODIC = "periodic"
    """At any time, as Slurm's HealthCheckProgram."""
    MANUAL = "manual"
    """Somebody asks."""


EVERY_STAGE = tuple(Stage)
NODE_STAGES = (Stage.PROLOG, Stage.EPILOG, Stage.PERIODIC, Stage.MANUAL)
"""What needs root, or is no job's business."""
