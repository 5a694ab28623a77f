"""The batch host is frozen or cut off on a real Slurm cluster, and comes back: nothing acts twice."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from nvrx_slurm.coordinator.lease import LeaseFile
from nvrx_slurm.journal import CycleStarted, FirstStep, JobEnded, Requeued, Verdict

from .batch_host import SLOWLY, TAKEOVER_S, batch_host, wait_for_state
from .jobs import SlurmJobs, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def patient_slurm(slurm: SlurmJobs) -> Iterator[SlurmJobs]:
    """A slurmctld that waits as long as at sites: it ends the job when a batch host that was DOWN is back."""
    conf = slurm.cluster.slurm_conf
    usual = conf.read_text()
    assert "SlurmdTimeout=20\n" in usual

    def read_anew(text: str) -> None:
        conf.write_text(text)
        environment = os.environ | slurm.cluster.environment()
        subprocess.run(["scontrol", "reconfigure"], env=environment, check=True)

    read_anew(usual.replace("SlurmdTimeout=20\n", "SlurmdTimeout=300\n"))
    yield slurm
    read_anew(usual)


def test_w21_a_coordinator_that_thaws_after_a_successor_took_over_changes_nothing(slurm: SlurmJobs) -> None:
    job = slurm.train(300, "--standby-coordinator", nodes=3, spares=1, program=SLOWLY)
    job.wait_for_training(cycle=0, steps=15)
    host = batch_host(job)
    slurm.cluster.exec(host, ["pkill", "-STOP", "-f", "bin/nvrx-srun"], check=True)
    job.wait_for(FirstStep, cycle=1, timeout_s=TAKEOVER_S)
    began = len(job.records())

    slurm.cluster.exec(host, ["pkill", "-CONT", "-f", "bin/nvrx-srun"], check=True)

    wait_until("it has noticed", lambda: "another host has taken over" in job.log())
    assert job.wait_for_end() == 0, job.log()
    assert job.slurm_fields()["JobState"] == "COMPLETED"
    assert job.slurm_fields()["Restarts"] == "0", "no requeue: the old batch script has told the code"
    told = [type(record.event) for record in job.records()[began:]]
    assert set(told) & {CycleStarted, Verdict, Requeued} == set()
    assert sorted(job.curve()) == list(range(1, 301))
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_w21_a_batch_host_that_is_cut_off_and_comes_back_changes_nothing(patient_slurm: SlurmJobs) -> None:
    slurm = patient_slurm
    job = slurm.train(300, "--standby-coordinator", nodes=3, spares=1, program=SLOWLY)
    job.wait_for_training(cycle=0, steps=15)
    host = batch_host(job)
    slurm.cluster.partition_node(host)
    job.wait_for(FirstStep, cycle=1, timeout_s=TAKEOVER_S)
    lease = LeaseFile(job.run_dir).read()
    assert lease is not None
    assert lease.host != host

    slurm.cluster.restore_node(host)

    wait_until("the end", lambda: bool(job.events(JobEnded)))
    assert [e.event.code for e in job.events(JobEnded)] == [0], job.log()
    assert sorted(job.curve()) == list(range(1, 301))
    wait_for_state(job, "COMPLETED")
    assert job.slurm_fields()["ExitCode"] == "0:0"
