"""``nvrx-quickstart``: the main job on a real Slurm cluster here, through a killed rank and a lost node."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console

from nvrx_slurm.coordinator.console import line_for
from nvrx_slurm.devcluster import DevCluster, DevClusterError
from nvrx_slurm.journal import (
    CycleStarted,
    FirstStep,
    JobEnded,
    JournalFollower,
    Progress,
    Record,
    WorkersStarted,
)
from nvrx_slurm.report.build import build_report
from nvrx_slurm.report.headline import closing
from nvrx_slurm.report.render import render

_CLONE = Path(__file__).resolve().parent.parent.parent
_TEMPLATE = Path("sbatch_templates") / "train_gpt.sbatch"
_NODES = 5
_READ_INTERVAL_S = 0.1
_RANK = 3
_STEPS_BETWEEN_FAULTS = 25


@dataclass
class _Course:
    """What the journal has told so far."""

    records: list[Record] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    """Active nodes of the running cycle."""
    pids: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Node and process id there, by rank."""
    training_since: int | None = None
    """The step at which the running cycle began to train; None while it starts."""
    step: int = 0
    end: JobEnded | None = None

    def take(self, record: Record) -> None:
        self.records.append(record)
        match record.event:
            case CycleStarted() as event:
                self.nodes, self.training_since = event.nodes, None
            case WorkersStarted() as event:
                self.pids |= {
                    rank: (event.node, pid) for rank, pid in zip(event.ranks, event.pids, strict=True)
                }
            case FirstStep() as event:
                self.training_since = self.step = event.step or 0
            case Progress() as event:
                self.step = event.step
            case JobEnded() as event:
                self.end = event
            case _:
                pass

    @property
    def ripe(self) -> bool:
        """The cycle has trained long enough for the next fault to be worth watching."""
        return self.training_since is not None and self.step >= self.training_since + _STEPS_BETWEEN_FAULTS


class QuickstartError(click.ClickException):
    """The demonstration could not go on; the message says why and where to look."""

    exit_code = 1


class _Quickstart:
    def __init__(self, cluster: DevCluster, steps: int, timeout_s: float) -> None:
        self._cluster = cluster
        self._steps = steps
        self._deadline = time.monotonic() + timeout_s
        self._console = Console(highlight=False, soft_wrap=True)
        # Of its own each time: a new cluster counts its jobs from 1 again.
        self._run_dir = _CLONE / "nvrx" / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._output = self._run_dir / "slurm.out"
        self._environ = {**os.environ, **cluster.environment(), "NVRX_RUN_DIR": str(self._run_dir)}

    def say(self, text: str) -> None:
        self._console.print(f"[bold cyan]▶[/] {text}", style="bold")

    def run(self) -> int:
        self._run_dir.mkdir(mode=0o700, parents=True)
        job_id = self._submit()
        try:
            return self._watch(job_id)
        finally:
            subprocess.run(["scancel", job_id], env=self._environ, check=False, capture_output=True)

    def _submit(self) -> str:
        command = ["sbatch", "--parsable", f"--output={self._output}"]
        command += [str(_TEMPLATE), "--steps", str(self._steps)]
        self.say(f"Submitting the job: {shlex.join(command)}")
        done = subprocess.run(
            command, cwd=_CLONE, env=self._environ, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise QuickstartError(f"sbatch refused the job: {done.stderr.strip()}")
        job_id = done.stdout.strip().partition(";")[0]
        self.say(f"It is job {job_id}; its output and its journal go to {self._run_dir.relative_to(_CLONE)}/")
        return job_id

    def _watch(self, job_id: str) -> int:
        course = _Course()
        faults: Iterator[Callable[[_Course], None]] = iter((self._kill_rank, self._kill_node))
        for record in self._records(self._run_dir / "journal.jsonl", job_id):
            course.take(record)
            line = line_for(record)
            if line is not None:
                self._console.print(f"    {line}", markup=False)
            if course.end is not None:
                break
            if course.ripe:
                course.training_since = None
                fault = next(faults, None)
                if fault is not None:
                    fault(course)
        return self._conclude(course, job_id)

    def _records(self, journal: Path, job_id: str) -> Iterator[Record]:
        """Yield the journal's records as they come, until the last."""
        follower = JournalFollower(journal)
        while True:
            if journal.exists():
                yield from follower.read()
            if time.monotonic() > self._deadline:
                raise QuickstartError(f"job {job_id} did not end in time: see {self._output}")
            time.sleep(_READ_INTERVAL_S)

    def _kill_rank(self, course: _Course) -> None:
        node, pid = course.pids[_RANK]
        self.say(f"Now rank {_RANK} dies: kill -9 {pid} on {node}")
        done = self._cluster.exec(node, ["kill", "-9", str(pid)], capture_output=True, text=True)
        if done.returncode != 0:
            raise QuickstartError(f"rank {_RANK} could not be killed on {node}: {done.stderr.strip()}")

    def _kill_node(self, course: _Course) -> None:
        node = course.nodes[2]
        self.say(f"Now node {node} loses power, and its ranks with it: bin/nvrx-devcluster kill-node {node}")
        self._cluster.kill_node(node)

    def _conclude(self, course: _Course, job_id: str) -> int:
        report = build_report(course.records, now=time.time(), in_slurm=None)
        self.say(f"The report, as bin/nvrx-report {self._run_dir.relative_to(_CLONE)} prints it:")
        self._console.print(render(report))
        if course.end is None or course.end.code != 0:
            self.say(f"The job did NOT finish: see {self._output}")
            return 1
        where = self._run_dir.relative_to(_CLONE)
        self.say(f"Everything about the job stays in {where}/; the cluster goes down unless --keep is given")
        self._console.print(f"[bold green]✔[/] Job {job_id} {closing(report)}", style="bold")
        return 0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(min=100), default=300, show_default=True, help="Training steps.")
@click.option("--keep", is_flag=True, help="Leave the cluster up at the end, to try things on it.")
@click.option("--name", default="quickstart", show_default=True, help="Name of the dev cluster.")
@click.option("--timeout-s", type=float, default=600.0, hidden=True)
def main(steps: int, keep: bool, name: str, timeout_s: float) -> None:
    """Start a five-node Slurm cluster on this machine, train through two faults, and show the report."""
    cluster = DevCluster(name)
    code = 1
    started = time.monotonic()
    try:
        cluster.up(nodes=_NODES, gpus_per_node=2, share=[_CLONE])
    except DevClusterError as error:
        raise click.ClickException(str(error)) from error
    try:
        quickstart = _Quickstart(cluster, steps, timeout_s)
        quickstart.say(f"A Slurm cluster of {_NODES} nodes is up ({time.monotonic() - started:.1f} s)")
        code = quickstart.run()
    except DevClusterError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        code = 130
    finally:
        if keep:
            click.echo(f"The cluster stays up; take it down with: bin/nvrx-devcluster down --name {name}")
        else:
            cluster.down()
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="nvrx-quickstart")
