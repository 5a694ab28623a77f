"""Jobs whose batch host is lost, and what Slurm says of them."""

from __future__ import annotations

from .jobs import SlurmJob, wait_until

TAKEOVER_S = 280.0
"""8.5 s until the agents are sure, 30 s of lease, a new Coordinator, ranks that import torch; patience."""

SLOWLY = ("--step-delay=0.15",)
"""So that training lasts longer than the 8.5 s for which ranks train on without a Coordinator."""


def batch_host(job: SlurmJob) -> str:
    return job.slurm_fields()["BatchHost"]


def wait_for_state(job: SlurmJob, state: str) -> None:
    wait_until(
        f"{state}: {job.slurm_fields()}\n{job.log()}",
        lambda: job.slurm_fields()["JobState"] == state,
    )
