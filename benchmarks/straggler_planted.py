#!/usr/bin/env python3
"""Plant slow ranks in a job, and look whether the right ones are named, in time, and nobody else.

.venv/bin/python benchmarks/straggler_planted.py --help

Needs root and Slurm: it starts a dev cluster of its own. With --quick it needs neither.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
from bench import document, ending
from bench.document import OURS, Document, Row
from bench.straggler.judge import Found, judge, reports_of
from bench.straggler.plan import REPORTS, Kind, Window, draw
from rich.console import Console

from nvrx_slurm.devcluster import DevCluster, DevClusterError
from nvrx_slurm.journal import read_journal

_HERE = Path(__file__).resolve().parent
_WORKER = _HERE / "straggler_planted_worker.py"
_NODES = 4
_START_S = 120.0
_REPORT_S = 6.0
"""More than a report can take on a machine that others use."""
_FOREIGN = ("SLURM_", "SBATCH_", "SALLOC_", "PET_", "TORCHELASTIC_", "NVRX_", "PYTHONPATH")
_TITLES = {
    Kind.HEALTHY: "healthy: nobody may be named",
    Kind.NODE: "a node whose ranks may run 6 % of the time",
    Kind.WORK: "a rank that computes twice as much",
    Kind.LOADER: "a rank whose data come late",
    Kind.ALL: "everybody's data come late: told of all, of nobody in particular",
    Kind.FAST: "a rank with next to nothing to do: nobody may be named",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="One window of each kind, 4 ranks, without Slurm.")
@click.option("--runs", type=click.IntRange(1, 1000), default=20, show_default=True, help="Of each kind.")
@click.option("--seed", type=int, help="Repeats a run.  [default: a new one]")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
def main(quick: bool, runs: int, seed: int | None, as_json: bool) -> None:
    """Name planted stragglers; exits with 1 when one was missed, or anybody was named without a cause."""
    ending.as_ctrl_c()
    seed = random.randrange(10**6) if seed is None else seed
    runs, ranks_per_node = (1, 1) if quick else (runs, 2)
    windows = draw(seed, runs, _NODES, ranks_per_node)
    date, machine = document.now(), document.describe_machine()
    program = [str(_WORKER), *map(str, (seed, runs, _NODES, ranks_per_node))]
    patience_s = _START_S + len(windows) * REPORTS * _REPORT_S
    try:
        with _work_dir() as work:
            if quick:
                _run_here(work, program, ranks_per_node, patience_s)
            else:
                _run_on_cluster(work, program, ranks_per_node, patience_s)
            found = _judged(work, windows)
    except DevClusterError as error:
        raise click.ClickException(str(error)) from error
    rows = [
        Row(kind.value, OURS, "as planted", "runs", each.detected, each.detected, each.windows)
        for kind, each in found.items()
    ]
    result = Document("straggler_planted", machine, date, tuple(rows))
    complaints = [complaint for each in found.values() for complaint in each.complaints]
    if as_json:
        click.echo(result.to_json())
    else:
        titles = {kind.value: title for kind, title in _TITLES.items()}
        notes = [f"seed {seed}, load {os.getloadavg()[0]:.1f} at the end", *complaints]
        Console().print(document.render(result, titles, notes))
    for complaint in complaints:
        click.echo(complaint, err=True)
    sys.exit(1 if complaints else 0)


def _judged(work: Path, windows: list[Window]) -> dict[Kind, Found]:
    reports = reports_of(read_journal(work / "run" / "journal.jsonl"))
    if len(reports) != len(windows) * REPORTS:
        raise click.ClickException(
            f"{len(reports)} reports of {len(windows) * REPORTS}: what belongs to which window is unknown"
        )
    return judge(windows, reports)


def _run_here(work: Path, program: list[str], ranks_per_node: int, patience_s: float) -> None:
    script = work / "worker.py"
    script.write_text(
        f"import runpy, sys\nsys.argv = {program!r}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (work / "run").mkdir()
    command = [sys.executable, str(_HERE / "bench" / "local_job.py"), str(work / "run")]
    command += [str(_NODES), str(ranks_per_node), str(script)]
    _finish(command, work, _environment({}), patience_s)


def _run_on_cluster(work: Path, program: list[str], ranks_per_node: int, patience_s: float) -> None:
    cluster = DevCluster(f"slow-{os.getpid()}")
    try:
        cluster.up(nodes=_NODES, gpus_per_node=0, share=[work])
        click.echo(f"cluster {cluster.name!r} is up", err=True)
        command = [
            *("salloc", "--quiet", "--no-kill", "--exclusive", "-N", str(_NODES)),
            *(str(Path(sys.prefix) / "bin" / "nvrx-srun"), "--run-dir", str(work / "run")),
            *("--nproc-per-node", str(ranks_per_node), *program),
        ]
        _finish(command, work, _environment(cluster.environment()), patience_s)
    finally:
        cluster.down()


def _environment(more: dict[str, str]) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    return {**own, **more, "OMP_NUM_THREADS": "1"}


def _finish(command: list[str], work: Path, environ: dict[str, str], patience_s: float) -> None:
    with (
        (work / "log").open("wb") as log,
        ending.program(
            command, env=environ, cwd=work, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        ) as job,
    ):
        try:
            code = job.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise click.ClickException(f"the job does not end within {patience_s:g} s") from None
    if code != 0:
        tail = (work / "log").read_text(errors="replace").splitlines()[-20:]
        raise click.ClickException("\n".join([f"the job ended with {code}:", *tail]))


@contextlib.contextmanager
def _work_dir() -> Iterator[Path]:
    """A directory that every node sees; /tmp is each node's own."""
    work = Path(tempfile.mkdtemp(prefix="nvrx-slow-", dir="/var/tmp"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
