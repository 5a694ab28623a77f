"""The ``srun`` line that starts one agent per node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.slurm.hostlist import compress_hostlist


@dataclass(frozen=True)
class AgentStep:
    """One step with one agent on each of ``nodes``.

    Every zero is needed: a site may default ``KillOnBadExit`` and ``WaitTime`` to something else, and on
    Slurm 22.05 ``--no-kill`` does not switch them off, whatever srun(1) says. ``--cpu-bind=none``: one
    task per node would otherwise be bound to one core with all its ranks.
    """

    nodes: Sequence[str]
    command: Sequence[str]
    extra: Sequence[str] = ()
    """The user's own srun arguments; they come last, so they win."""
    overlap: bool = False
    """Run beside the job's other steps, which hold its nodes."""

    def argv(self) -> list[str]:
        count = str(len(self.nodes))
        return [
            "srun",
            "--no-kill",
            "--wait=0",
            "--kill-on-bad-exit=0",
            "--mpi=none",
            "--ntasks-per-node=1",
            "--cpu-bind=none",
            "--export=ALL",
            "-N",
            count,
            "-n",
            count,
            "-w",
            compress_hostlist(self.nodes),
            *(["--overlap"] if self.overlap else []),
            *self.extra,
            *self.command,
        ]
