"""What was found in logs: kinds of messages with where, when, how often, and by which ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.attribution.logs.prefix import Claim
from nvrx_slurm.attribution.logs.rules import Family

MAX_EXCERPT = 400
MAX_RANKS = 64


class SourceKind(str, enum.Enum):
    """Who can have written a file, which says what in it is believed."""

    OUTPUT = "output"
    """Output of a job: whatever a program printed, srun's and slurmstepd's lines among it."""
    RANK = "rank"
    """Output of one rank that the launcher collected: rank and node are certain, the text is the user's."""
    MERGED = "merged"
    """nvrx-srun's merged log: time, node and rank of each line are certain, the text is the user's."""
    KERNEL = "kernel"
    """Kernel log of a node, collected by root."""
    SCHEDULER = "scheduler"
    """What Slurm itself says: slurmctld's log, scontrol, sacct, an srun whose stderr no program shares."""


@dataclass(frozen=True)
class Source:
    """One file."""

    path: Path
    kind: SourceKind = SourceKind.OUTPUT
    rank: int | None = None
    node: str | None = None
    is_run_dirs: bool = False
    """It is in a run directory, whose owner may have put a link there to what only the reader may read."""
    job: str = ""
    """The job whose lines count in what Slurm wrote of many; empty: all of them."""


@dataclass
class Finding:
    """All messages of one shape in one source.

    ``line``, ``ts`` and ``rank`` are of the first one after the last progress: an old one that came again is
    judged by its new occurrence.
    """

    family: Family
    source: Source
    shape: str
    excerpt: str
    line: int
    ts: float | None
    rank: int | None
    node: str | None
    claim: Claim
    epoch: int
    """Advances of training before it."""
    count: int = 1
    last_line: int = 0
    last_ts: float | None = None
    ranks: set[int] = field(default_factory=set)
    exception: str = ""
    frame: str = ""
    timeout_s: float | None = None
    """The time-out that a collective's report names."""
    of_job: bool = True
    """False: the source is of many jobs, and the line names none: it can only confirm."""

    @property
    def trusted(self) -> bool:
        """No program of the job can have made it up."""
        return self.source.kind in (SourceKind.KERNEL, SourceKind.SCHEDULER)

    @property
    def node_is_certain(self) -> bool:
        """The node is where it happened, not merely what a text says."""
        return self.trusted or (
            self.source.kind in (SourceKind.RANK, SourceKind.MERGED) and self.claim is Claim.PROCESS
        )

    @property
    def where(self) -> str:
        return f"{self.source.path}:{self.line}"
