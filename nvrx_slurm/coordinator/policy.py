"""What the user decided for one job, and the codes that it can end with."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.past import Past

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_RESTART_ELSEWHERE = 75


@dataclass(frozen=True)
class Policy:
    """What the user decided."""

    nodes: tuple[str, ...]
    """The allocation in Slurm's order."""
    active_nodes: int
    max_restarts: int
    first_cycle: int = 0
    max_unknown_nodes: int = 0
    """How many nodes may join that are not known beforehand."""
    limits: Limits = field(default_factory=Limits)
    past: Past = field(default_factory=Past)
    has_iteration_file: bool = False
    """The training writes its newest checkpoint's step to a file."""
    join_timeout_s: float = 300.0
    """Too few nodes, some never heard of: how long to wait for those."""
    form_grace_s: float = 2.0
    """Enough nodes at the start: how long to wait at least for the rest, so that a spare stays one."""
    stop_timeout_s: float = 30.0
    """A node that has not stopped its workers by then leaves the job."""
    term_timeout_s: float | None = None
    """Grace for the ranks when the job is asked to end: they get that signal then, and SIGKILL after this.
    None: they are stopped as for a restart."""
    probe_timeout_s: float = 1.0
    """How long the search for the hung rank may delay the restart."""
    consult_timeout_s: float = 10.0
    """How long Slurm may take to say whether it is ending the job."""
    last_choice: str | None = None
    """The node that gets ranks only when no other will do: the batch host, which has the Coordinator."""
    segment: int = 1
    """Nodes of the group that must be of one NVLink domain; 1: any."""
    group_size: int = 1
    """Nodes of one replacement group; 1: there are none."""
    rejoin_timeout_s: float = 0.0
    """Too few nodes, some lost: how long to wait for an agent to come back. 0: lost nodes stay away."""
    max_agent_losses: int = 3
    """A node that has lost its agent so often stays away."""
    host: str | None = None
    """Where the Coordinator runs, if another host may take over: alone, it decides nothing without Slurm."""

    @property
    def max_nodes(self) -> int:
        """Active nodes and spares."""
        return len(self.nodes) + self.max_unknown_nodes
