"""The quickstart does what its last line says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from .jobs import CLONE

pytestmark = pytest.mark.slurm


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("slurmctld") is None, reason="needs root and Slurm")
def test_the_quickstart_trains_through_a_killed_rank_and_a_lost_node() -> None:
    name = f"quick{os.getpid()}"
    # given a machine with the project set up, as this test has it
    before = set((CLONE / "nvrx").glob("*"))

    # when the quickstart runs
    done = subprocess.run(
        [CLONE / "bin" / "nvrx-quickstart", "--name", name, "--steps", "160"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    # then it tells what it does, and ends with one line that is true
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert re.search(r"Now rank 3 dies: kill -9 \d+ on n\d", said)
    assert re.search(r"Now node n\d loses power", said)
    last = said.strip().splitlines()[-1]
    match = re.fullmatch(r"✔ Job (\d+) finished: 2 faults, median \S+ s lost each", last)
    assert match, last
    (run_dir,) = set((CLONE / "nvrx").glob("*")) - before
    assert (run_dir / "journal.jsonl").exists()

    # and its cluster is gone
    assert name not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    shutil.rmtree(run_dir)
