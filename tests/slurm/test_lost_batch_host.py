"""The batch host is lost on a real Slurm cluster: the job goes on."""

from __future__ import annotations

import pytest

from nvrx_slurm.journal import (
    CheckpointLoaded,
    CoordinatorLost,
    Requeued,
)

from .batch_host import batch_host
from .jobs import SlurmJobs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_w21_a_job_whose_batch_host_dies_is_requeued_without_it_and_training_resumes(
    slurm: SlurmJobs,
) -> None:
    job = slurm.train(200, nodes=2, spares=0)
    job.wait_for_training(cycle=0, steps=15)
    host = batch_host(job)

    slurm.cluster.kill_node(host)

    lost = job.wait_for(CoordinatorLost, cycle=0).event
    assert lost.host == host
    assert lost.fence == f"{job.job_id}.0.1"
    requeued = job.wait_for(Requeued, cycle=0).event
    # Once Slurm has taken the host out of the job, which it does when it holds it for down, a cluster without
    # slurmdbd changes nothing of the job; then the host stays away for being down.
    assert requeued.excluded == [host] or "Slurm takes no changes" in " ".join(requeued.warnings)
    resumed = job.wait_for(CheckpointLoaded, cycle=1)
    assert resumed.attempt == 1
    assert host not in job.active_nodes()
    assert job.wait_for_end() == 0, job.log()
    assert job.slurm_fields()["JobState"] == "COMPLETED"
    assert sorted(job.curve()) == list(range(1, 201))
