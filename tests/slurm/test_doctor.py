"""nvrx-doctor asks a real Slurm; and reads ``#SBATCH`` lines as the real sbatch does."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.slurm.batch_script import DirectiveError, split_words

from .jobs import CLONE, SlurmJobs, wait_until

pytestmark = pytest.mark.slurm

DOCTOR = CLONE / "bin" / "nvrx-doctor"
_TRICKY = [
    '#SBATCH --comment={"a":1} -N1 # a remark',
    "#SBATCH --comment='{\"a\": 1}'",
    '#SBATCH --comment "{\\"a\\": 1}"',
    '#SBATCH -J "a b"c',
    "#SBATCH -J x#y",
    "#SBATCH-N1",
    "#SBATCH -J a\\ b",
    "#SBATCH\t-N\t1  --sig=B:USR2@100",
    "  #SBATCH -J late",
    "##SBATCH -J off",
]


def _doctor(slurm: SlurmJobs, *arguments: str) -> tuple[int, dict[str, object]]:
    done = subprocess.run(
        [DOCTOR, *arguments, "--json"],
        env={**os.environ, **slurm.cluster.environment()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def _findings(document: dict[str, object]) -> dict[str, dict[str, str]]:
    findings = document["findings"]
    assert isinstance(findings, list)
    return {finding["rule"]: finding for finding in findings}


def _submit(slurm: SlurmJobs, *options: str) -> str:
    arguments = ("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 60")
    return slurm.run(*arguments).strip()


def test_a_held_job_is_explained_and_its_fix_works(slurm: SlurmJobs) -> None:
    job_id = _submit(slurm, "-N1", "--hold")
    try:
        code, document = _doctor(slurm, "why", job_id)
        held = _findings(document)["W1"]
        assert (code, held["read"]) == (1, "JobHeldUser")
        command = held["fix"].removeprefix("the owner can: ").split()
        assert command == ["scontrol", "release", job_id]
        slurm.run(*command)
        wait_until("the job runs", lambda: "RUNNING" in slurm.run("squeue", "-h", "-o", "%T", "-j", job_id))
        code, document = _doctor(slurm, "why", job_id)
        assert (code, list(_findings(document))) == (0, ["W9"])
    finally:
        slurm.run("scancel", job_id)


def test_an_exclusion_that_is_too_wide_is_counted_and_its_fix_works(slurm: SlurmJobs) -> None:
    job_id = _submit(slurm, "-N2", "--hold")
    try:
        slurm.run("scontrol", "update", f"JobId={job_id}", "ExcNodeList=n[1-4]")
        slurm.run("scontrol", "release", job_id)
        wait_until(
            "Slurm gives the job up",
            lambda: "BadConstraints" in slurm.run("squeue", "-h", "-o", "%r", "-j", job_id),
        )
        code, document = _doctor(slurm, "why", job_id)
        found = _findings(document)
        assert code == 1
        assert found["W3"]["read"] == "5 usable of 5 in batch, 4 of them excluded: 1 left, 2 needed"
        assert found["W3"]["fix"].startswith("exclude 3 nodes at most: ")
        slurm.run(*found["W3"]["fix"].partition(": ")[2].split())
        wait_until("the job runs", lambda: "RUNNING" in slurm.run("squeue", "-h", "-o", "%T", "-j", job_id))
    finally:
        slurm.run("scancel", job_id)


def test_the_site_and_the_machine_are_checked(slurm: SlurmJobs) -> None:
    code, document = _doctor(slurm, "check", "--longest-step", "1m")
    found = _findings(document)
    assert code == 0, document
    assert (found["S1"]["status"], found["S9"]["read"]) == ("ok", "20s")
    assert found["T9"]["status"] == "warn"  # KillWait is 5 s here
    assert not [rule for rule, finding in found.items() if rule[0] in "ST" and finding["status"] == "unknown"]


@pytest.mark.parametrize("line", _TRICKY)
def test_a_directive_is_split_as_this_sbatch_splits_it(slurm: SlurmJobs, line: str, tmp_path: Path) -> None:
    script = tmp_path / "x.sbatch"
    script.write_text(f"#!/bin/bash\n{line}\nhostname\n")
    done = subprocess.run(
        ["sbatch", "-vvv", "--test-only", script],
        env={**os.environ, **slurm.cluster.environment()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    theirs = re.findall(r'Found in script, argument "(.*)"$', done.stderr, re.M)
    try:
        ours = [word.text for word in split_words(line[7:])] if line.startswith("#SBATCH") else []
    except DirectiveError:
        ours = []
    # sbatch reads the script twice; it stops at the first argument that is no option.
    assert theirs[: len(ours)] == ours, done.stderr
    assert bool(theirs) is bool(ours)
