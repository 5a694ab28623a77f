#!/usr/bin/env python3
"""A hundred faults of random kind in one job: nothing may leak, and training must end as if undisturbed.

.venv/bin/python benchmarks/soak.py --help    Needs root and Slurm: it starts a dev cluster of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
from bench import document, ending
from bench.document import OURS, Document, Row
from bench.soak import audit
from bench.soak.audit import Census
from bench.soak.job import ACTIVE_NODES, WORLD, Place, SoakError, SoakJob, running
from bench.soak.plan import Kind, Strike, draw, steps_needed
from rich.console import Console

from nvrx_slurm.devcluster import DevCluster, DevClusterError
from nvrx_slurm.devcluster.status import Power
from nvrx_slurm.journal import FirstStep, Verdict

_SPARES = 2
_START_S = 120.0
_RECOVERY_S = 90.0
_STEPS_S = 120.0
_END_S = 300.0
_SETTLE_S = 20.0
_STEP_DELAY_S = 0.1
_QUICK_FAULTS = 5
_QUICK_KINDS = (Kind.RANK_SIGKILL, Kind.RANK_EXCEPTION, Kind.RANK_ORPHAN, Kind.SERVER_SIGKILL)


@dataclass
class Findings:
    """What a soak has shown."""

    seconds: dict[Kind, list[float]] = field(default_factory=dict)
    """From a strike to the first step of every rank after it."""
    censuses: list[Census] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help=f"{_QUICK_FAULTS} faults of ranks and their server.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--faults", type=click.IntRange(1, 10_000), help="How many.  [default: 100]")
@click.option("--kinds", help=f"Of {', '.join(kind.value for kind in Kind)}.  [default: all]")
@click.option("--seed", type=int, help="Repeats a run.  [default: a new one]")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave logs and journals in this directory, which must not exist or be empty.",
)
def main(
    quick: bool, as_json: bool, faults: int | None, kinds: str | None, seed: int | None, keep: Path | None
) -> None:
    """Train a small GPT on 4 nodes with 2 spares through many faults, and look for what they leave.

    Exits with 1 when anything leaked, was out of order or came out differently.
    """
    ending.as_ctrl_c()
    chosen = _kinds(kinds) or (_QUICK_KINDS if quick else tuple(Kind))
    seed = random.randrange(10**6) if seed is None else seed
    strikes = draw(seed, faults or (_QUICK_FAULTS if quick else 100), WORLD, chosen, losses=_SPARES)
    date, machine = document.now(), document.describe_machine()
    began = time.monotonic()
    try:
        with _work_dir(keep) as work, _cluster(work) as cluster:
            found = _soak(cluster, work, strikes)
    except (DevClusterError, OSError) as error:
        raise click.ClickException(str(error)) from error
    result = Document("soak", machine, date, tuple(rows_of(found, strikes)))
    if as_json:
        click.echo(result.to_json())
    else:
        notes = [f"seed {seed}, {len(strikes)} faults in {time.monotonic() - began:.0f} s"]
        titles = {"all": "all faults", **{kind.value: kind.value for kind in Kind}}
        Console().print(document.render(result, titles, notes))
    for complaint in found.complaints:
        _say(f"FAILED: {complaint}")
    if found.complaints:
        sys.exit(1)


def _soak(cluster: DevCluster, work: Path, strikes: Sequence[Strike]) -> Findings:
    found = Findings()
    steps = steps_needed(strikes)
    try:
        expected = _undisturbed(cluster, work, steps)
        with running(Place(work / "soaked"), cluster, cluster.node_names, steps, _STEP_DELAY_S) as job:
            job.wait("training began", lambda: job.trains, _START_S)
            for number, strike in enumerate(strikes):
                _one(number, strike, job, found)
            code = job.wait_for_end(_END_S)
            job.update()
            if code != 0:
                found.complaints.append(f"the job ended with {code}")
            found.complaints += audit.losses(expected, job.losses())
            found.complaints += audit.journal_order(job.records)
            found.complaints += audit.growth(found.censuses, WORLD)
            found.complaints += _left_behind(job, cluster)
    except SoakError as error:
        found.complaints.append(str(error))
    return found


def _undisturbed(cluster: DevCluster, work: Path, steps: int) -> dict[int, float]:
    nodes = cluster.node_names[:ACTIVE_NODES]
    with running(Place(work / "undisturbed"), cluster, nodes, steps, 0.0) as job:
        code = job.wait_for_end(_START_S + steps)
        if code != 0:
            raise SoakError(f"without any fault the job ended with {code}")
        _say(f"undisturbed: {steps} steps")
        return dict(job.losses())


def _one(number: int, strike: Strike, job: SoakJob, found: Findings) -> None:
    """Strike when training is there, wait until it goes on, and count."""
    job.wait(
        f"step {strike.step}",
        lambda: job.trains and (job.losses() or [(0, 0.0)])[-1][0] >= strike.step,
        _STEPS_S,
    )
    cycle = job.cycle
    moment = job.strike(strike.kind, strike.rank)
    if strike.again_after_s is not None:
        time.sleep(strike.again_after_s)
        # In the middle of a recovery there may be no such rank at this moment.
        with contextlib.suppress(SoakError):
            job.strike(Kind.RANK_SIGKILL, (strike.rank + 1) % WORLD)

    def recovered() -> bool:
        return job.trains and job.cycle > cycle

    job.wait(f"training after {strike.kind.value} of rank {strike.rank}", recovered, _RECOVERY_S)
    first_step = [r for r in job.records if isinstance(r.event, FirstStep)][-1]
    seconds = first_step.ts - moment
    found.seconds.setdefault(strike.kind, []).append(seconds)
    found.censuses.append(_settled_census(job))
    verdict = next(r.event for r in job.records if r.cycle == cycle and isinstance(r.event, Verdict))
    if verdict.kind not in strike.kind.blamed and strike.again_after_s is None:
        found.complaints.append(f"{strike.kind.value} of rank {strike.rank} was called: {verdict.why}")
    _say(f"{number + 1}: {strike.kind.value}, rank {strike.rank}: {seconds:.2f} s: {verdict.why}")


def _settled_census(job: SoakJob) -> Census:
    """Count when all ranks are there: the second kill of a strike may have hit the cycle that followed."""
    until = time.monotonic() + _SETTLE_S
    while (census := job.census()).ranks != WORLD and time.monotonic() < until:
        job.wait("training went on", lambda: job.trains, _RECOVERY_S)
    return census


def _left_behind(job: SoakJob, cluster: DevCluster) -> Iterator[str]:
    until = time.monotonic() + 20
    while (left := job.left()) and time.monotonic() < until:
        time.sleep(0.2)
    if left:
        yield f"still running after the end: {', '.join(left)}"
    lost = _switched_off(cluster)
    for node in cluster.node_names:
        if node not in lost:
            listed = cluster.exec(
                node,
                ["sh", "-c", "ls -d /dev/shm/nvrx-* /tmp/nvrx-* 2>/dev/null"],
                capture_output=True,
                text=True,
            ).stdout.split()
            if listed:
                yield f"{node} still has {', '.join(listed)}"


def _switched_off(cluster: DevCluster) -> set[str]:
    status = cluster.status()
    assert status is not None
    return {node.name for node in status.nodes if node.power is Power.OFF}


def rows_of(found: Findings, strikes: Sequence[Strike]) -> Iterator[Row]:
    """Yield how often and how fast training went on, over all faults and by kind, and what grew."""
    every = [seconds for values in found.seconds.values() for seconds in values]
    yield Row("all", OURS, "recovered", "runs", len(every), len(every), len(strikes))
    if not every:
        return
    yield document.summarize("all", OURS, "fault to first step", "s", every)
    for name in sorted(found.censuses[0].descriptors):
        for what, unit in (("descriptors", "files"), ("rss_mib", "MiB")):
            values = [getattr(c, what)[name] for c in found.censuses if name in getattr(c, what)]
            yield document.summarize("all", OURS, f"{name} {unit}", unit, values)
    for kind, values in found.seconds.items():
        yield document.summarize(kind.value, OURS, "fault to first step", "s", values)


def _kinds(words: str | None) -> tuple[Kind, ...]:
    known = {kind.value: kind for kind in Kind}
    chosen = [word.strip() for word in words.split(",")] if words else []
    for word in chosen:
        if word not in known:
            raise click.BadParameter(f"there is no kind {word!r}: {', '.join(known)}", param_hint="--kinds")
    return tuple(dict.fromkeys(known[word] for word in chosen))


@contextlib.contextmanager
def _cluster(work: Path) -> Iterator[DevCluster]:
    cluster = DevCluster(f"soak-{os.getpid()}")
    try:
        cluster.up(nodes=ACTIVE_NODES + _SPARES, gpus_per_node=0, share=[work])
        yield cluster
    finally:
        cluster.down()


@contextlib.contextmanager
def _work_dir(keep: Path | None) -> Iterator[Path]:
    """A directory that every node sees; /tmp is each node's own."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise click.BadParameter(f"{keep} is not empty", param_hint="--keep")
        yield keep.absolute()
        return
    work = Path(tempfile.mkdtemp(prefix="nvrx-soak-", dir="/var/tmp"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
