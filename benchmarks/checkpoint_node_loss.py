#!/usr/bin/env python3
"""Lose nodes of a dev cluster with their disks while a job saves there: it goes on from the newest save.

.venv/bin/python benchmarks/checkpoint_node_loss.py --help    Needs root and Slurm's packages.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
from pathlib import Path

import click

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import CheckpointLoaded, CheckpointSaved, NodeLost

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from slurm.jobs import CLONE, SlurmJob, SlurmJobs, wait_until

_PROGRAM = ("--ckpt=local", "--local-dir=/local/parts")
_OPTIONS = ("--rejoin-timeout=120s", "--max-no-progress-cycles=0", "--max-restarts=1000")
_EVERY = 10
"""Steps between saves, as ``SlurmJobs.train`` asks for."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--losses", type=click.IntRange(1), default=15, show_default=True, help="How many.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws nodes and moments.")
def main(losses: int, seed: int) -> None:
    """Lose nodes, restore them wiped; exits 1 if a committed step was lost or came out differently."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="nvrx-nodes-") as folder:
        cluster = DevCluster(f"nodes{os.getpid()}")
        cluster.up(nodes=4, gpus_per_node=2, share=[CLONE, folder])
        try:
            jobs = SlurmJobs(cluster, Path(folder))
            try:
                job = jobs.train(1_000_000, *_OPTIONS, nodes=4, spares=0, program=_PROGRAM)
                wrong = sum(not _lose(cluster, job, number, draw) for number in range(losses))
                job.wait_for_training(cycle=losses, steps=2 * _EVERY)
                steps = len(job.curve())  # fails if a step that was done again came out differently
            finally:
                jobs.clean_up()
        finally:
            cluster.down()
    click.echo(f"{losses} nodes lost, {wrong} with a committed step; {steps} steps, repeated ones the same")
    sys.exit(1 if wrong else 0)


def _lose(cluster: DevCluster, job: SlurmJob, number: int, draw: random.Random) -> bool:
    job.wait_for_training(cycle=number, steps=_EVERY + 2)
    threading.Event().wait(draw.uniform(0, 1.5))  # the random moment
    batch_host = job.slurm_fields()["BatchHost"]
    lost = draw.choice([node for node in job.active_nodes() if node != batch_host])
    cluster.kill_node(lost)
    job.wait_for(NodeLost, cycle=number)
    saved = max(record.event.step for record in job.events(CheckpointSaved))
    cluster.restore_node(lost, wipe_local=True, unnoticed=True)
    wait_until(f"cycle {number + 1} loads", lambda: len(job.events(CheckpointLoaded)) > number)
    loaded = job.events(CheckpointLoaded)[number].event.step
    click.echo(f"{lost} lost: step {saved} was committed, {loaded} was loaded")
    return bool(saved <= loaded <= saved + _EVERY)


if __name__ == "__main__":
    main()
