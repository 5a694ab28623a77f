"""Everything that is decided before a job starts, as its Coordinator takes it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm.coordinator.handover import Handover, shared_output
from nvrx_slurm.coordinator.lease import Fence
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.slurm import SlurmClient
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.timeouts import Monitoring


@dataclass(frozen=True)
class Listening:
    """Where the Coordinator listens, if not on a free port of its own address with a token of its own."""

    address: str
    port: int
    token: str
    started: Callable[[int], None]
    """Told the port once agents can come."""


@dataclass(frozen=True)
class Succession:
    """What a Coordinator goes on from that takes over from another host."""

    fence: Fence
    token: str
    """The agents' own: they have it from the one before."""
    lost: str
    """That host."""
    silent_s: float
    restarts: int
    """Those that it had made."""
    excluded: Mapping[str, str]
    """Nodes that it had excluded, and why."""
    gone: frozenset[str]
    """Nodes that it had lost."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that is decided before the job starts."""

    job_id: str
    restart_count: int
    submitted: int
    """When Slurm took the job, Unix seconds: a job id alone may be used again."""
    host: str
    address: str
    """Where agents and ranks reach this host."""
    policy: Policy
    welcome: msg.Welcome
    monitoring: Monitoring
    """What the ranks of the first cycle are held to."""
    keep_timeouts: bool
    """Write calculated time-outs to the run directory."""
    run_dir: RunDir
    slurm: SlurmClient | None = None
    """None: there is nobody who could start the job again."""
    step_argv: Sequence[str] = ()
    """Starts the agents; empty: they come by themselves."""
    step_environ: Mapping[str, str] = field(default_factory=dict)
    """Without what tells the agents where and who the Coordinator is: that is added here."""
    command: str = "nvrx-srun"
    """As the user knows it."""
    listening: Listening | None = None
    shows_rank_0: bool = True
    """Copy its output to standard output."""
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    cycle_info_dir: Path | None = None
    """Where a file tells of each cycle; see :mod:`nvrx_slurm.coordinator.cycle_info`."""
    applog_prefix: Path | None = None
    """See :class:`AppLog`."""
    iteration_file: Path | None = None
    """Where the training keeps its newest checkpoint's step; ``policy`` says whether it does."""
    attribution: bool = True
    """Ended cycles are attributed in the background."""
    attribution_endpoint: str = ""
    """See :mod:`nvrx_slurm.coordinator.attribution_service`; empty: there is no such service."""
    ends: int | None = None
    """When the job's time is over, Unix seconds; None: there is no limit."""
    time_limit_margin_s: float = 0.0
    """How long before that the ranks are asked to save; 0: not at all."""
    rejoin_argv: Callable[[str], Sequence[str]] | None = None
    """The srun line of a new agent on one node; None only if :attr:`Policy.rejoin_timeout_s` is 0."""
    launches: int = 0
    max_batch_requeue: int | None = None
    """See :class:`~nvrx_slurm.journal.JobStarted`."""
    standby: bool = False
    """If this host is lost, another goes on in the same allocation; otherwise it requeues the job."""
    succession: Succession | None = None

    @property
    def lease(self) -> Fence | None:
        """What this Coordinator holds; None where nobody could take over."""
        if self.succession is not None:
            return self.succession.fence
        return Fence(self.job_id, self.restart_count, 0) if self.step_argv and self.slurm else None

    @property
    def fence(self) -> str:
        """What an agent must have been started for; who comes by itself can know the job only."""
        return str(self.lease or self.job_id)

    def handover(self) -> Handover:
        """Return what another host needs to go on."""
        return Handover(
            job_id=self.job_id,
            restart_count=self.restart_count,
            submitted=self.submitted,
            policy=self.policy,
            welcome=self.welcome,
            monitoring=self.monitoring,
            keep_timeouts=self.keep_timeouts,
            standby=self.standby,
            iteration_file=None if self.iteration_file is None else str(self.iteration_file),
            ends=self.ends,
            time_limit_margin_s=self.time_limit_margin_s,
            cycle_info_dir=None if self.cycle_info_dir is None else str(self.cycle_info_dir),
            applog_prefix=None if self.applog_prefix is None else str(self.applog_prefix),
            attribution=self.attribution,
            attribution_endpoint=self.attribution_endpoint,
            output=shared_output(),
        )
