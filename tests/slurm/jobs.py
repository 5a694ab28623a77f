"""Submit a job to the dev cluster, watch its journal, hurt it, and see what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx_slurm.devcluster import DevCluster
from nvrx_slurm.journal import (
    CycleStarted,
    FirstStep,
    JobEnded,
    Record,
    WorkersStarted,
    read_journal,
)
from nvrx_slurm.slurm.client import parse_fields

CLONE = Path(__file__).resolve().parent.parent.parent
NVRX_SRUN = CLONE / "bin" / "nvrx-srun"
TRAIN_GPT = CLONE / "examples" / "train_gpt.py"
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


PATIENCE_S = 240.0
"""Bounds a hang. On a busy machine ten ranks need more than a minute to import torch."""


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Return once ``condition`` holds; fail with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)


@dataclass
class SlurmJob:
    """One submitted batch job."""

    jobs: SlurmJobs
    job_id: str
    run_dir: Path
    output: Path

    def records(self) -> list[Record]:
        path = self.run_dir / "journal.jsonl"
        return read_journal(path) if path.exists() else []

    def events(self, kind: type) -> list[Record]:
        return [record for record in self.records() if isinstance(record.event, kind)]

    def attribution(self, cycle: int) -> dict[str, Any]:
        """What nvrx-attribute says of a cycle."""
        command = [CLONE / "bin" / "nvrx-attribute", "job", self.run_dir, f"--cycle={cycle}", "--json"]
        said: dict[str, Any] = json.loads(
            subprocess.run(command, capture_output=True, check=True, timeout=240).stdout
        )
        return said

    def wait_for(self, kind: type, cycle: int, timeout_s: float = PATIENCE_S) -> Record:
        """Wait for an event of ``kind`` in ``cycle``; fail early if the job fails without it."""

        def there() -> bool:
            found = [r for r in self.events(kind) if r.cycle == cycle]
            failed = [r for r in self.events(JobEnded) if r.event.code not in (0, 75)]
            assert found or not failed, f"ended without {kind.__name__}:\n{self.log()}"
            return bool(found)

        wait_until(f"{kind.__name__} of cycle {cycle}\n{self.log()}", there, timeout_s)
        return next(r for r in self.events(kind) if r.cycle == cycle)

    def wait_for_training(self, cycle: int, steps: int = 5, timeout_s: float = PATIENCE_S) -> None:
        """Wait until rank 0 has logged ``steps`` more losses since ``cycle`` began to train."""
        self.wait_for(FirstStep, cycle, timeout_s)
        before = len(self.losses())
        wait_until(f"{steps} steps in cycle {cycle}", lambda: len(self.losses()) >= before + steps, timeout_s)

    def losses(self) -> list[tuple[int, float]]:
        """Every logged step in order, those done again included."""
        path = self.run_dir / "train" / "loss.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]

    def curve(self) -> dict[int, float]:
        """Loss by step; fails if a step that was done again came out differently."""
        curve: dict[int, float] = {}
        for step, loss in self.losses():
            assert curve.setdefault(step, loss) == loss, f"step {step}: {curve[step]} and {loss}"
        return curve

    def active_nodes(self) -> list[str]:
        return self.events(CycleStarted)[-1].event.nodes

    def place_of(self, rank: int) -> tuple[str, int]:
        """Node of ``rank`` in the newest cycle, and its process id there."""
        for record in reversed(self.events(WorkersStarted)):
            if rank in record.event.ranks:
                return record.event.node, record.event.pids[record.event.ranks.index(rank)]
        raise AssertionError(f"rank {rank} never started")

    def signal_rank(self, rank: int, sig: signal.Signals) -> str:
        """Send ``sig`` to the rank's process; return its node."""
        node, pid = self.place_of(rank)
        self.jobs.cluster.exec(node, ["kill", f"-{sig.value}", str(pid)], check=True)
        return node

    def slurm_fields(self) -> dict[str, str]:
        return parse_fields(self.jobs.run("scontrol", "-o", "show", "job", self.job_id))

    def wait_for_end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until Slurm calls the job over; return the batch script's exit code."""
        wait_until(
            f"end of job {self.job_id}\n{self.log()}",
            lambda: self.slurm_fields()["JobState"] in _OVER,
            timeout_s,
        )
        return int(self.slurm_fields()["ExitCode"].split(":")[0])

    def log(self) -> str:
        return self.output.read_text(errors="replace")[-4000:] if self.output.exists() else ""


class SlurmJobs:
    """The jobs of one test on one cluster."""

    def __init__(self, cluster: DevCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self._environ = {**os.environ, **cluster.environment()}
        self._job_ids: list[str] = []
        self._baseline = {node: self._commands(node) for node in cluster.node_names}
        self._files_before = {node: self._files(node) for node in cluster.node_names}

    def run(self, *argv: str) -> str:
        done = subprocess.run(
            argv,
            env=self._environ,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def submit(
        self, *nvrx_srun: str, nodes: int, sbatch: tuple[str, ...] = (), name: str = "job"
    ) -> SlurmJob:
        """Submit a batch script that becomes ``nvrx-srun`` with these arguments."""
        arguments = " ".join(f"'{argument}'" for argument in nvrx_srun)
        return self.submit_script(f"exec {NVRX_SRUN} {arguments}", nodes=nodes, sbatch=sbatch, name=name)

    def submit_script(
        self, text: str, nodes: int, sbatch: tuple[str, ...] = (), name: str = "job"
    ) -> SlurmJob:
        """Submit a batch script for bash."""
        script = self.directory / f"{name}.sh"
        script.write_text(f"#!/bin/bash\n{text}\n")
        output = self.directory / f"{name}.out"
        options = [f"--nodes={nodes}", "--no-kill", "--requeue", "--open-mode=append", f"--output={output}"]
        job_id = self.run("sbatch", "--parsable", *options, *sbatch, str(script)).strip()
        self._job_ids.append(job_id)
        return SlurmJob(self, job_id, self.directory / "nvrx" / job_id, output)

    def train(
        self,
        steps: int,
        *options: str,
        nodes: int,
        spares: int,
        name: str = "job",
        sbatch: tuple[str, ...] = (),
        program: tuple[str, ...] = (),
    ) -> SlurmJob:
        """Submit the example with a small model and two ranks per node, unless ``options`` say otherwise."""
        return self.submit(
            "--nproc-per-node=2",
            f"--spares={spares}",
            *options,
            str(TRAIN_GPT),
            f"--steps={steps}",
            # Waiting between steps, it leaves the processors to what is under test, and lasts long enough
            # on a fast machine, too.
            *("--layers", "2", "--width", "64", "--ckpt-every", "10", "--step-delay", "0.05"),
            *program,
            nodes=nodes,
            name=name,
            sbatch=sbatch,
        )

    def left_on(self, node: str) -> set[str]:
        """Command lines that run on ``node`` now and did not before the test."""
        return self._commands(node) - self._baseline[node]

    def wait_until_nothing_is_left(self, nodes: list[str], timeout_s: float = PATIENCE_S) -> None:
        wait_until(
            f"no process of the job on {nodes}: {[self.left_on(node) for node in nodes]}",
            lambda: not any(self.left_on(node) for node in nodes),
            timeout_s,
        )
        for node in nodes:
            wait_until(
                f"{node} still has files", lambda node=node: self._files(node) <= self._files_before[node]
            )

    def _files(self, node: str) -> set[str]:
        listed = self.cluster.exec(
            node,
            ["sh", "-c", "ls -d /dev/shm/nvrx-* /tmp/nvrx-* 2>/dev/null"],
            capture_output=True,
            text=True,
        )
        return set(listed.stdout.split())

    def _commands(self, node: str) -> set[str]:
        listed = self.cluster.exec(
            node, ["ps", "-e", "-o", "args="], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return {line for line in listed if not line.startswith("ps -e")}

    def clean_up(self) -> None:
        for job_id in self._job_ids:
            subprocess.run(["scancel", job_id], env=self._environ, check=False, capture_output=True)
        wait_until("all jobs gone", lambda: not self.run("squeue", "-h").strip())
        status = self.cluster.status()
        assert status is not None
        for node in self.cluster.node_names:
            state = self.run("sinfo", "-h", "-n", node, "-o", "%T").strip()
            if state != "idle":
                self.cluster.restore_node(node)
        wait_until(
            "all nodes idle",
            lambda: set(self.run("sinfo", "-h", "-o", "%T").split()) == {"idle"},
        )
