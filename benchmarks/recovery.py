#!/usr/bin/env python3
"""Seconds from a fault to the first step on every rank: ours, torchrun and NVIDIA's ft_launcher side by side.

.venv/bin/python benchmarks/recovery.py --help    Needs root and Slurm: it starts a dev cluster of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from bench import document, ending, peer
from bench.document import Document, Row
from bench.recovery import contenders, marks
from bench.recovery.contenders import Contender, Place, Store
from bench.recovery.faults import Case
from bench.recovery.trial import Bounds, Outcome, run_trial
from rich.console import Console

from nvrx_slurm.cli.parameters import Duration
from nvrx_slurm.devcluster import DevCluster, DevClusterError, preflight

_QUICK_S = 150.0
"""A quick run takes a minute; on a busy machine more, but no more than this."""
_QUICK_CASES = (Case.RANK_SIGKILL,)
_FIRST_PORT = 29400


class Cases(click.ParamType):  # type: ignore[type-arg]
    """``rank_sigkill,node_loss``: in this order, without repetition."""

    name = "cases"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Case, ...]:
        known = {case.value: case for case in Case}
        words = [word.strip() for word in str(value).split(",")]
        for word in words:
            if word not in known:
                self.fail(f"there is no case {word!r}; the cases are {', '.join(known)}", param, ctx)
        return tuple(dict.fromkeys(known[word] for word in words))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="One run of rank_sigkill, ended after 150 s whatever comes.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--peer", "peer_name", type=click.Choice(["nvrx"]), help="Add NVIDIA's released ft_launcher.")
@click.option("--runs", type=click.IntRange(1, 100), help="Runs of each case.  [default: 5; quick: 1]")
@click.option(
    "--cases",
    type=Cases(),
    metavar="CASE,…",
    help=f"Of {', '.join(c.value for c in Case)}.  [default: all]",
)
@click.option(
    "--bound", type=Duration(), help="A contender that is not back by then counts as lost.  [default: 60s]"
)
@click.option(
    "--torchrun-store",
    type=click.Choice([store.value for store in Store]),
    default=Store.OWN.value,
    show_default=True,
    help="shared is torchrun's default, with which it does not come back.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave marks, logs and journals in this directory, which must not exist or be empty.",
)
def main(
    quick: bool,
    as_json: bool,
    peer_name: str | None,
    runs: int | None,
    cases: tuple[Case, ...] | None,
    bound: float | None,
    torchrun_store: str,
    keep: Path | None,
) -> None:
    """Kill a rank, make one fail, one hang, switch a node off: how long does training stand still?

    All launchers get the same script, nodes and faults on one dev cluster, by turns.
    """
    ending.as_ctrl_c()
    began = time.monotonic()
    cases = cases or (_QUICK_CASES if quick else tuple(Case))
    bounds = Bounds(start_s=120.0, recovery_s=bound or 60.0)
    if quick:
        bounds = Bounds(start_s=90.0, recovery_s=bound or 40.0, deadline=began + _QUICK_S)
    try:
        date, machine = document.now(), _machine()
        competing = [contenders.ours(), contenders.torchrun(Store(torchrun_store))]
        if peer_name is not None:
            competing.append(contenders.peer(peer.ensure_installed(_say)))
        with _work_dir(keep) as work:
            outcomes = _measure(cases, competing, runs or (1 if quick else 5), bounds, work)
    except (DevClusterError, peer.PeerError, OSError) as error:
        raise click.ClickException(str(error)) from error
    result = Document("recovery", machine, date, tuple(rows_of(outcomes)))
    if as_json:
        click.echo(result.to_json())
    else:
        titles = {case.value: case.title for case in cases}
        Console().print(document.render(result, titles, notes_of(outcomes)))


def _measure(
    cases: Sequence[Case], competing: Sequence[Contender], runs: int, bounds: Bounds, work: Path
) -> list[Outcome]:
    """Every contender once per case and run, each run beginning with another one: noise hits all alike."""
    nodes = contenders.TRAINING_NODES + max(case.spares for case in cases)
    outcomes: list[Outcome] = []
    with _cluster(nodes, work) as cluster:
        for run in range(runs):
            for case in cases:
                for turn in range(len(competing)):
                    contender = competing[(run + turn) % len(competing)]
                    outcomes.append(
                        _one(case, contender, cluster, bounds, work, run, port=_FIRST_PORT + len(outcomes))
                    )
    return outcomes


def _one(
    case: Case, contender: Contender, cluster: DevCluster, bounds: Bounds, work: Path, run: int, port: int
) -> Outcome:
    nodes = cluster.node_names[: contenders.TRAINING_NODES + case.spares]
    place = Place(nodes, work / f"{case.value}-{contender.who}-{run + 1}", port, case.heartbeat_s)
    load = round(os.getloadavg()[0], 1)
    if time.monotonic() > bounds.deadline:
        outcome = Outcome(case, contender.who, why_not="there was no time left for it", measured=False)
    else:
        outcome = run_trial(case, contender, place, cluster, bounds, jitter_s=0.37 * run % 1.0)
    result = f"{outcome.seconds['total']:.2f} s" if outcome.recovered else outcome.why_not
    _say(f"{case.value} run {run + 1}, {contender.who}: {result}  (load {load})")
    return dataclasses.replace(outcome, load=load)


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[Row]:
    """Yield the document's rows: per case and contender how often it came back, then how fast, by phase."""
    for case, who in dict.fromkeys((outcome.case, outcome.who) for outcome in outcomes):
        own = [o for o in outcomes if (o.case, o.who) == (case, who) and o.measured]
        if not own:
            continue
        back = [o for o in own if o.recovered]
        yield Row(case.value, who, "recovered", "runs", len(back), len(back), len(own))
        for metric in marks.METRICS:
            values = [o.seconds[metric] for o in back if metric in o.seconds]
            if values:
                yield document.summarize(case.value, who, metric, "s", values)


def notes_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what the numbers don't say: why somebody did not come back, what was left behind, the noise."""
    notes = []
    for case, who, why in dict.fromkeys((o.case, o.who, o.why_not) for o in outcomes if o.why_not):
        times = sum((o.case, o.who, o.why_not) == (case, who, why) for o in outcomes)
        notes.append(f"{case.value}, {who}, {times} times: {why}")
    for who in dict.fromkeys(o.who for o in outcomes):
        left = [o.left_behind for o in outcomes if o.who == who]
        if any(left):
            notes.append(f"{who} left {sum(left)} processes behind in {len(left)} jobs that Slurm had ended")
    loads = [o.load for o in outcomes]
    notes.append(
        f"load average before the runs: {min(loads)} to {max(loads)}, the benchmark's own part included"
    )
    return notes


@contextlib.contextmanager
def _cluster(nodes: int, work: Path) -> Iterator[DevCluster]:
    cluster = DevCluster(f"bench-{os.getpid()}")
    try:
        cluster.up(nodes=nodes, gpus_per_node=0, share=[work, *_peer_share()])
        _say(f"cluster {cluster.name!r} is up: {nodes} nodes")
        yield cluster
    finally:
        cluster.down()


def _peer_share() -> list[Path]:
    place = peer.environment_dir()
    return [place] if place.is_dir() else []


@contextlib.contextmanager
def _work_dir(keep: Path | None) -> Iterator[Path]:
    """A directory that every node sees; /tmp is each node's own."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise click.BadParameter(f"{keep} is not empty", param_hint="--keep")
        yield keep.absolute()
        return
    work = Path(tempfile.mkdtemp(prefix="nvrx-bench-", dir="/var/tmp"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _machine() -> str:
    slurm = preflight.slurm_version(preflight.find_programs("slurmd")["slurmd"])
    return document.describe_machine(f"torch {importlib.metadata.version('torch')}", f"Slurm {slurm}")


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
