"""The batch host is lost on a real Slurm cluster, and a standby on another goes on in the same allocation."""

from __future__ import annotations

import signal
import time

import pytest

from nvrx_slurm.journal import (
    CoordinatorLost,
    CycleStarted,
    ExitDeferred,
    ExitReported,
    FirstStep,
    JobEnded,
    NodeExcluded,
    Verdict,
)

from .batch_host import SLOWLY, TAKEOVER_S, batch_host, wait_for_state
from .jobs import SlurmJobs, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_w21_a_standby_goes_on_in_the_same_allocation_and_slurm_learns_the_exit_code(
    slurm: SlurmJobs,
) -> None:
    steps = 200
    undisturbed = slurm.train(steps, nodes=2, spares=0, name="undisturbed")
    assert undisturbed.wait_for_end() == 0, undisturbed.log()

    job = slurm.train(steps, "--standby-coordinator", nodes=3, spares=1, name="disturbed", program=SLOWLY)
    job.wait_for_training(cycle=0, steps=15)
    host = batch_host(job)
    killed = time.time()
    slurm.cluster.kill_node(host)

    resumed = job.wait_for(FirstStep, cycle=1, timeout_s=TAKEOVER_S)
    print(f"training again {resumed.ts - killed:.1f} s after the power loss")
    assert resumed.attempt == 0, "the same start of the job"
    assert host not in job.active_nodes()
    assert [e.event.host for e in job.events(CoordinatorLost)] == [host]
    assert host in [e.event.node for e in job.events(NodeExcluded)]
    assert [e.event.node for e in job.events(Verdict)] == [host]
    assert "takes over" in job.log(), "the job's output file goes on"

    wait_until("the end", lambda: bool(job.events(JobEnded)))
    assert job.events(JobEnded)[-1].event.code == 0
    assert job.curve() == undisturbed.curve()
    # Slurm gives the job all its nodes again, and there are no more than these.
    slurm.cluster.restore_node(host)
    wait_for_state(job, "COMPLETED")
    assert job.slurm_fields()["ExitCode"] == "0:0"
    assert [e.event.code for e in job.events(ExitDeferred)] == [0]
    assert [e.event.code for e in job.events(ExitReported)] == [0]
    assert len(job.events(CycleStarted)) == 2, "the requeue trained nothing"


def test_w21_a_job_that_fails_under_a_standby_is_a_failed_job(slurm: SlurmJobs) -> None:
    job = slurm.train(4000, "--standby-coordinator", "--max-restarts=1", nodes=3, spares=1, program=SLOWLY)
    job.wait_for_training(cycle=0)
    host = batch_host(job)
    slurm.cluster.kill_node(host)
    job.wait_for_training(cycle=1, timeout_s=TAKEOVER_S)
    job.signal_rank(0, signal.SIGKILL)
    wait_until("the end", lambda: bool(job.events(JobEnded)))
    assert job.events(JobEnded)[-1].event.code == 1
    slurm.cluster.restore_node(host)
    wait_for_state(job, "FAILED")
    assert job.slurm_fields()["ExitCode"] == "1:0"
