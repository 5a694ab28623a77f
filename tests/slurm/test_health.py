"""A node whose own checks fail, on a real Slurm: a spare takes its place, or the job goes elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.journal import CycleStarted, HealthChecked, NodeExcluded, Requeued

from .jobs import CLONE, SlurmJob, SlurmJobs, wait_until

pytestmark = pytest.mark.slurm


class Site:
    """One site script for all nodes; it fails on those that are broken."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        scripts = directory / "checks.d"
        scripts.mkdir(mode=0o755)
        script = scripts / "fan"
        script.write_text(
            f'#!/bin/sh\ncat "{directory}/broken.$SLURMD_NODENAME" 2>/dev/null && exit 2\nexit 0\n'
        )
        script.chmod(0o755)
        self.config = directory / "health.yaml"
        self.config.write_text(
            "job_interval_s: 1\nbudget_s: 60\n"
            f"checks: {{site-scripts: {{directory: {scripts}, timeout_s: 50, answer_s: 45}}}}\n"
        )
        self.config.chmod(0o600)

    def break_node(self, node: str) -> None:
        new = self._directory / "new"
        new.write_text("the fan is off\n")
        new.rename(self._directory / f"broken.{node}")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def _train(slurm: SlurmJobs, site: Site, steps: int, *, nodes: int, spares: int) -> SlurmJob:
    # So slowly that checks find what has broken while it trains.
    slowly = ("--step-delay=0.2",)
    return slurm.train(steps, f"--health-config={site.config}", nodes=nodes, spares=spares, program=slowly)


def _says(job: SlurmJob, node: str) -> list[str]:
    return [r.event.status for r in job.events(HealthChecked) if r.event.node == node]


def test_a_spare_takes_the_place_of_a_node_that_breaks_during_training(slurm: SlurmJobs, site: Site) -> None:
    job = _train(slurm, site, 120, nodes=3, spares=1)
    job.wait_for_training(cycle=0)
    spare = job.events(CycleStarted)[0].event.spares[0]
    broken = job.place_of(2)[0]
    site.break_node(broken)
    wait_until(f"{broken} says so: {job.log()}", lambda: "fail" in _says(job, broken))
    job.signal_rank(0, signal.SIGKILL)
    assert job.wait_for_end() == 0, job.log()
    assert set(job.active_nodes()) == {job.events(CycleStarted)[0].event.nodes[0], spare}
    (excluded,) = [record.event for record in job.events(NodeExcluded)]
    assert (excluded.node, excluded.reason) == (broken, "site-scripts script fan: the fan is off")
    assert sorted(job.curve()) == list(range(1, 121))
    report = json.loads(
        subprocess.run(
            [CLONE / "bin" / "nvrx-report", "--json", job.run_dir],
            capture_output=True,
            check=True,
            timeout=240,
        ).stdout
    )
    assert [(out["node"], out["why"]) for out in report["nodes_excluded"]] == [(broken, excluded.reason)]
    assert "is unhealthy: site-scripts script fan: the fan is off" in json.dumps(report)
    slurm.wait_until_nothing_is_left(list(slurm.cluster.node_names))


def test_without_a_spare_slurm_starts_the_job_again_elsewhere(slurm: SlurmJobs, site: Site) -> None:
    """Found before the first rank starts, so the job has lost nothing but its place."""
    broken = slurm.cluster.node_names[0]
    site.break_node(broken)
    job = _train(slurm, site, 40, nodes=2, spares=0)
    requeued = job.wait_for(Requeued, cycle=0).event
    assert requeued.excluded == [broken]
    wait_until(f"it starts again: {job.log()}", lambda: len(job.events(CycleStarted)) > 0)
    assert job.wait_for_end() == 0, job.log()
    assert broken not in job.active_nodes()
    assert sorted(job.curve()) == list(range(1, 41))
