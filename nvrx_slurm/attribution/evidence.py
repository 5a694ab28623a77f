"""What an attribution is made from: one ended cycle's logs, dumps, faults and what Slurm says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.attribution.flight_recorder import Place
from nvrx_slurm.attribution.logs.finding import Source


class SchedulerState(str, enum.Enum):
    """How Slurm says that the job ended; states that tell nothing of the cause are left out."""

    CANCELLED = "CANCELLED"
    """By a person, not by the launcher itself."""
    COMPLETED = "COMPLETED"
    DEADLINE = "DEADLINE"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PREEMPTED = "PREEMPTED"
    TIMEOUT = "TIMEOUT"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    BOOT_FAIL = "BOOT_FAIL"


@dataclass(frozen=True)
class ProcessFault:
    """The launcher saw a rank or node go: certain, unlike any text.

    ``signal`` is a name such as ``SIGSEGV``; ``oom`` says that the kernel's counter told it.
    """

    ts: float | None
    rank: int | None
    node: str | None
    exit: int | None = None
    signal: str | None = None
    oom: bool = False
    hung: bool = False
    stopped: bool = False
    """The kernel held the rank's process for stopped when it was found hung."""
    node_lost: bool = False
    """The whole node is gone."""
    detail: str = ""


@dataclass(frozen=True)
class CycleEvidence:
    """One ended cycle, as whoever ran it knows it. Everything but the logs may be missing."""

    job: str = ""
    attempt: int = 0
    """How often the job has been requeued."""
    cycle: int = 0
    logs: tuple[Source, ...] = ()
    dumps: Path | None = None
    """Directory of Flight Recorder dumps."""
    world_size: int | None = None
    places: Mapping[int, Place] = field(default_factory=dict)
    """Where each rank ran, from the launcher's table."""
    faults: tuple[ProcessFault, ...] = ()
    scheduler: SchedulerState | None = None
    lost_nodes: tuple[str, ...] = ()
    """Nodes that Slurm or the launcher lost."""
    last_step: int | None = None
    """From the journal; wins over what the logs say."""
    saved_step: int | None = None
    trained: bool | None = None
    """Whether a first step was seen; None when nobody was to tell."""
    seconds: float | None = None
    """How long the cycle ran."""
    max_restarts: int | None = None
    """How many restarts the job allows itself."""
