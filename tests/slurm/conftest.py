"""One real Slurm cluster for all tests of the main job."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.devcluster import DevCluster

from .jobs import CLONE, SlurmJobs


@pytest.fixture(scope="session")
def five_node_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    if os.geteuid() != 0:
        pytest.skip("a dev cluster needs root")
    if shutil.which("slurmctld") is None:
        pytest.skip("Slurm is not installed: run bin/nvrx-test")
    cluster = DevCluster(f"job{os.getpid()}")
    cluster.up(nodes=5, gpus_per_node=2, share=[CLONE, tmp_path_factory.getbasetemp()])
    yield cluster
    cluster.down()


@pytest.fixture
def slurm(five_node_cluster: DevCluster, tmp_path: Path) -> Iterator[SlurmJobs]:
    """Jobs of one test; afterwards all of them are gone and every node is back."""
    jobs = SlurmJobs(five_node_cluster, tmp_path)
    yield jobs
    jobs.clean_up()
