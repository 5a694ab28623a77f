#!/usr/bin/env python3
"""Seconds from a fault until every surviving rank is in the training function again, in the same process.

.venv/bin/python benchmarks/inprocess.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from bench import document, ending, peer
from bench.document import OURS, Document, Row
from bench.inprocess import hub, trial
from bench.inprocess.plans import RANKS, Case, Plan
from bench.inprocess.trial import Contender, Outcome
from rich.console import Console

_BOUND_S = {document.OURS: 20.0, "peer": 45.0}
"""The peer takes 30 s where a time-out of gloo has to pass."""
_QUICK = (Case.EXCEPTION, Case.EXCEPTION_GLOO, Case.SIGKILL_GLOO)
_PINGS = Plan("pings", faults=0, repetitions=50)
_MONITORS = Plan("none", faults=0, steady_s=12.0)
_TITLES = {
    **{case.word: f"{case.word}: {case.title}" for case in Case},
    "ping": "ping: one call of call_wrapper.ping()",
    "monitor": f"monitor: what watches {RANKS} ranks that ping 200 times a second, per rank",
    "barrier": "barrier: of ranks that are connections of one process, over sockets of this machine",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Three cases once, ours: done within 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--peer", "peer_name", type=click.Choice(["nvrx"]), help="Add NVIDIA's released package.")
@click.option("--runs", type=click.IntRange(1, 100), help="Jobs of each case.  [default: 5; quick: 1]")
@click.option(
    "--case",
    "words",
    multiple=True,
    type=click.Choice([*(case.word for case in Case), "ping", "monitor", "barrier"]),
    help="Only this one; may be given several times.",
)
def main(quick: bool, as_json: bool, peer_name: str | None, runs: int | None, words: tuple[str, ...]) -> None:
    """Make one of 4 ranks fail, die and hang, by turns under each package, on this machine."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine(f"torch {importlib.metadata.version('torch')}")
    contenders = [trial.OURS]
    try:
        if peer_name is not None:
            contenders.append(trial.peer(peer.ensure_installed(_say)))
    except peer.PeerError as error:
        raise click.ClickException(str(error)) from error
    chosen = words or tuple(case.word for case in (_QUICK if quick else Case))
    if not words and not quick:
        chosen += ("ping", "monitor", "barrier")
    with tempfile.TemporaryDirectory(prefix="nvrx-inprocess-") as folder:
        outcomes = list(_cases(chosen, contenders, runs or (1 if quick else 5), Path(folder)))
        rows = [*_recovery_rows(outcomes), *_costs(chosen, contenders, Path(folder))]
    result = Document("inprocess", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(document.render(result, _TITLES, _notes(outcomes)))


def _cases(
    words: Sequence[str], contenders: Sequence[Contender], runs: int, folder: Path
) -> Iterator[tuple[Case, Outcome]]:
    for run in range(runs):
        for case in (case for case in Case if case.word in words):
            for turn in range(len(contenders)):
                contender = contenders[(run + turn) % len(contenders)]
                place = folder / f"{case.word}-{contender.who}-{run}"
                outcome = trial.run(contender, case.plan, place, _BOUND_S[contender.who])
                _say(f"{case.word} run {run + 1}, {contender.who}: {_summary(case, outcome, place)}")
                yield case, outcome


def _summary(case: Case, outcome: Outcome, place: Path) -> str:
    times = ", ".join(f"{value:.3f} s" for value in outcome.recovery_s) or "no recovery"
    if case is Case.COMPLETION:
        times = f"end {outcome.end_s:.3f} s" if outcome.end_s is not None else "no end"
    survived = ", victim survives" if outcome.victim_survived else ""
    lost = outcome.hung or len(outcome.recovery_s) < case.plan.faults
    log = f"\n{(place / 'log').read_text(errors='replace')[-2000:]}" if lost and outcome.who == OURS else ""
    return f"{times}{survived}{', HUNG' if outcome.hung else ''}  (load {outcome.load}){log}"


def _recovery_rows(outcomes: Sequence[tuple[Case, Outcome]]) -> Iterator[Row]:
    for case, who in dict.fromkeys((case, outcome.who) for case, outcome in outcomes):
        own = [outcome for other, outcome in outcomes if (other, outcome.who) == (case, who)]
        if case is Case.COMPLETION:
            for metric in ("begin_s", "end_s"):
                values = [value for each in own if (value := getattr(each, metric)) is not None]
                if values:
                    yield document.summarize(case.word, who, metric.removesuffix("_s"), "s", values)
            continue
        times = [value for each in own for value in each.recovery_s]
        due = sum(case.plan.faults for _ in own)
        yield Row(case.word, who, "recovered", "runs", len(times), len(times), due)
        if times:
            yield document.summarize(case.word, who, "recovery", "s", times)
        survivors = sum(outcome.victim_survived for outcome in own)
        yield Row(case.word, who, "victim survived", "runs", survivors, survivors, len(own))


def _costs(words: Sequence[str], contenders: Sequence[Contender], folder: Path) -> Iterator[Row]:
    for contender in contenders:
        who = contender.who
        if "ping" in words:
            outcome = trial.run(contender, _PINGS, folder / f"ping-{who}", _BOUND_S[who])
            yield document.summarize("ping", who, "ping", "µs", [ns / 1000 for ns in outcome.ping_ns])
        if "monitor" in words:
            cost = trial.run(contender, _MONITORS, folder / f"monitor-{who}", 40.0, watch_s=10.0).monitor
            if cost is not None:
                yield Row("monitor", who, "processor", "% of a core", *[round(cost.cpu_percent, 2)] * 2, 1)
                yield Row("monitor", who, "own memory", "MiB", *[round(cost.uss_mib, 1)] * 2, 1)
    if "barrier" in words:
        yield from hub.rows(_say)


def _notes(outcomes: Sequence[tuple[Case, Outcome]]) -> list[str]:
    loads = [outcome.load for _, outcome in outcomes]
    notes = ["recovery: from the fault until the slowest of the other ranks has entered the function"]
    hung = [f"{case.word} of {outcome.who}" for case, outcome in outcomes if outcome.hung]
    notes += [f"had to be killed: {', '.join(dict.fromkeys(hung))}"] if hung else []
    if loads:
        notes.append(f"load average before the jobs: {min(loads)} to {max(loads)}, their own part included")
    return notes


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
