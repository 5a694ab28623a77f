#!/usr/bin/env python3
"""How the Coordinator bears many nodes: a real one, over the real protocol, with simulated agents.

A bare gRPC server with the same agents shows what of it is gRPC's and theirs.

.venv/bin/python benchmarks/scale.py --help    Needs no root; each simulated agent is one TCP connection here.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.journal import CycleStarted, FirstStep, JournalFollower, Record

_FLOOR = "floor"
_SERVERS = {document.OURS: "coordinator.py", _FLOOR: "floor.py"}
"""Who serves the agents: our Coordinator; and a bare grpc.aio server with the same streams and messages."""
_SPARES = 8
_SLOTS = 8
_SIZES = (64, 512, 2048, 8192)
_QUICK_SIZES = (64, 1024)
_BOUND_S = 120.0
_STEADY_S = 8.0


@dataclass(frozen=True)
class Span:
    """Seconds between two moments in the agents' process: by the clock, and processor time of both sides."""

    wall_s: float
    server_s: float
    agents_s: float


@dataclass(frozen=True)
class Trial:
    """What one job of one size showed."""

    form: Span
    """From the first agent's start to the last agent's assignment."""
    output: Span
    """From there until every agent has sent a line of output, the first on a stream that it opens for it."""
    reform: Span
    """From the cut of one agent to the last assignment of the next cycle."""
    steady_percent: float
    """Of one core, by the Coordinator while nothing happens."""
    rss_mib: float


class TrialError(click.ClickException):
    """A job of the benchmark did not do what it should; the message holds its last words."""


class _Job:
    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self._output = _output_of(directory)
        self._journal = JournalFollower(directory / "run" / "journal.jsonl")
        self._journal_path = directory / "run" / "journal.jsonl"
        self._records: list[Record] = []
        self._process = process
        self.coordinator = psutil.Process(self._process.pid)

    def wait_for(self, kind: type, cycle: int) -> None:
        def there() -> bool:
            if self._journal_path.exists():
                self._records += self._journal.read()
            return any(r.cycle == cycle and isinstance(r.event, kind) for r in self._records)

        self._wait(there, f"{kind.__name__} of cycle {cycle}")

    def span(self, begin: str, end: str, cycle: int) -> Span:
        """Return what passed between two things that the agents' process said."""
        one, other = self._said(begin, cycle), self._said(end, cycle)
        return Span(*(other[key] - one[key] for key in ("t", "server_cpu", "agents_cpu")))

    def _said(self, what: str, cycle: int) -> dict[str, float]:
        found: list[dict[str, float]] = []

        def there() -> bool:
            found.extend(said for said in self._all_said() if (said["what"], said["cycle"]) == (what, cycle))
            return bool(found)

        self._wait(there, what)
        return found[0]

    def _all_said(self) -> Iterator[dict[str, float]]:
        for line in self._output.read_text(errors="replace").splitlines():
            start = line.find('{"what"')
            if start >= 0:
                yield json.loads(line[start:])

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _BOUND_S
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise TrialError(f"no {what}: {self._output.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def agents(self) -> psutil.Process:
        return next(p for p in self.coordinator.children() if any("agents.py" in a for a in p.cmdline()))


@contextlib.contextmanager
def _job(directory: Path, nodes: int, who: str) -> Iterator[_Job]:
    program = Path(__file__).parent / "bench" / "scale" / _SERVERS[who]
    command = [sys.executable, program, directory / "run", str(nodes), str(_SPARES), str(_SLOTS)]
    with (
        _output_of(directory).open("wb") as output,
        ending.program(command, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        yield _Job(directory, process)


def _output_of(directory: Path) -> Path:
    return directory / "output"


def run_trial(nodes: int, who: str) -> Trial:
    """Form a cycle of ``nodes``, watch it, lose one, form it again."""
    with (
        tempfile.TemporaryDirectory(prefix="nvrx-scale-") as directory,
        _job(Path(directory), nodes, who) as job,
    ):
        job.wait_for(FirstStep, 0)
        formed = job.span("begin", "assigned", 0)
        output = job.span("assigned", "printed", 0)
        rss = job.coordinator.memory_info().rss / 2**20
        job.coordinator.cpu_percent()
        time.sleep(_STEADY_S)
        steady = job.coordinator.cpu_percent()
        job.agents().send_signal(signal.SIGUSR1)
        job.wait_for(CycleStarted, 1)
        job.wait_for(FirstStep, 1)
        return Trial(formed, output, job.span("cut", "assigned", 1), steady, rss)


def rows_of(nodes: int, who: str, trials: list[Trial]) -> list[Row]:
    """Return the rows of one size and server."""
    formed, reformed = [trial.form for trial in trials], [trial.reform for trial in trials]
    return [
        document.summarize(f"{nodes}_nodes", who, metric, unit, values)
        for metric, unit, values in (
            ("form", "s", [span.wall_s for span in formed]),
            ("form_server_cpu", "s", [span.server_s for span in formed]),
            ("form_agents_cpu", "s", [span.agents_s for span in formed]),
            ("form_cpu_per_node", "ms", [span.server_s / nodes * 1000 for span in formed]),
            ("output", "s", [trial.output.wall_s for trial in trials]),
            ("output_server_cpu", "s", [trial.output.server_s for trial in trials]),
            ("reform", "s", [span.wall_s for span in reformed]),
            ("reform_server_cpu", "s", [span.server_s for span in reformed]),
            ("reform_agents_cpu", "s", [span.agents_s for span in reformed]),
            ("reform_cpu_per_node", "ms", [span.server_s / nodes * 1000 for span in reformed]),
            ("steady_cpu", "% of a core", [trial.steady_percent for trial in trials]),
            ("server_rss", "MiB", [trial.rss_mib for trial in trials]),
        )
    ]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="64 and 1024 nodes, one run each; within 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the tables.")
@click.option("--runs", type=click.IntRange(1, 50), default=1, show_default=True, help="Runs of each size.")
@click.option("--nodes", type=click.IntRange(2, 100_000), multiple=True, help="Sizes.  [default: 64 … 8192]")
def main(quick: bool, as_json: bool, runs: int, nodes: tuple[int, ...]) -> None:
    """Measure forming, re-forming and idling of the Coordinator for growing jobs.

    Beside it, in turns, a bare grpc.aio server that does the least for the same agents. Both share this
    machine with all the agents: the seconds of processor time are what a Coordinator alone would take.
    """
    ending.as_ctrl_c()
    sizes = nodes or (_QUICK_SIZES if quick else _SIZES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * max(sizes) + 1000
    if hard < needed:
        raise click.UsageError(f"{max(sizes)} nodes need {needed} open files; ulimit -Hn allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    began, machine = document.now(), document.describe_machine()
    progress = Console(stderr=True)
    rows: list[Row] = []
    for size in sizes:
        trials: dict[str, list[Trial]] = {who: [] for who in _SERVERS}
        for _ in range(1 if quick else runs):
            for who, done in trials.items():  # by turns: noise hits both alike
                progress.print(f"{size} nodes, {who} …")
                done.append(run_trial(size, who))
        for who, done in trials.items():
            rows += rows_of(size, who, done)
    result = Document("scale", machine, began, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        titles = {f"{size}_nodes": f"{size} nodes x {_SLOTS} ranks" for size in sizes}
        Console().print(document.render(result, titles))


if __name__ == "__main__":
    main()
