#!/usr/bin/env python3
"""Faults of all kinds at random points of an in-process restart: all that are left go on, or end, in time.

.venv/bin/python benchmarks/inprocess_chaos.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from bench import document, ending
from bench.document import OURS, Document, Row
from bench.inprocess_ranks.client import Outcome, Rank, Ranks
from rich.console import Console

_TIMES = {
    "soft_timeout": 2.0,
    "hard_timeout": 5.0,
    "barrier_timeout": 30.0,
    "completion_timeout": 30.0,
    "heartbeat_interval": 0.5,
    "heartbeat_timeout": 15.0,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.5,
}
_ANYWHERE = ("exception", "uncopyable", "sigkill", "segfault", "keyboard", "kill_later", "interrupt_later")
_IN_FUNCTION = (*_ANYWHERE, "sigstop", "gil", "block", "livelock", "exit", "restart")
_KINDS = {
    "function": _IN_FUNCTION,
    "collective": _IN_FUNCTION,
    "atomic": ("exception", "sigkill", "keyboard", "kill_later"),
    "end": ("exception", "sigkill", "keyboard", "kill_later", "interrupt_later"),
    "initialize": (*_ANYWHERE, "gil", "livelock"),
    "health_check": (*_ANYWHERE, "livelock"),
    "abort": ("exception", "sigkill", "kill_later"),
    "finalize": (*_ANYWHERE, "block", "livelock"),
    "assignment": (*_ANYWHERE, "block", "livelock"),
}
_AFTER_A_FAULT = ("abort", "finalize", "assignment")
_ENDINGS = (
    "SystemExit",
    "KeyboardInterrupt",
    "ValueError",
    "TwoArguments",
    "HealthCheckError",
    "InternalError",
)
"""What may come out of a rank that had a fault itself."""
_WORLD_SIZE = 8
_TITLES = {"chaos": f"{_WORLD_SIZE} ranks that reduce in a gloo group; from a fault to the last re-entry"}


@dataclass
class Findings:
    faults: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    recovery_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    jobs: int = 0
    hub_kills: int = 0
    bystanders: int = 0
    """Ranks without a fault of their own that nothing unblocked; killed past the soft time-out."""


def plan_job(chance: random.Random) -> dict[str, Any]:
    """Return the faults of one job: for each iteration one, or two that meet."""
    ranks = list(range(_WORLD_SIZE))
    faults: list[tuple[int, int, str, str, float]] = []
    for iteration in range(_WORLD_SIZE + 4):
        first = chance.choice(ranks)
        faults.append((iteration, first, *_fault(chance, False)))
        if chance.random() < 0.4:
            other = chance.choice([rank for rank in ranks if rank != first])
            faults.append((iteration, other, *_fault(chance, True)))
    if chance.random() < 0.3:
        kind = chance.choice(["hub", "supervisor"])
        faults.append((chance.randrange(3), chance.choice(ranks), "collective", kind, 0.0))
    return {"chaos": faults, "duration": 1.0, "times": _TIMES}


def _fault(chance: random.Random, is_second: bool) -> tuple[str, str, float]:
    points = [point for point in _KINDS if (point in _AFTER_A_FAULT) <= is_second]
    point = chance.choice(points)
    return point, chance.choice(_KINDS[point]), round(chance.random() * 0.05, 4)


def judge(outcome: Outcome, findings: Findings, name: str) -> None:
    """Count what happened in one job, and complain of what must not."""
    findings.jobs += 1
    faulty = {number for number, rank in enumerate(outcome.ranks) if rank.all("fault")}
    kinds = Counter(fault["kind"] for rank in outcome.ranks for fault in rank.all("fault"))
    findings.faults += kinds
    # Rank 0's supervisor is the one that runs the hub.
    is_hub_lost = kinds["hub"] > 0 or any(f["kind"] == "supervisor" for f in outcome.ranks[0].all("fault"))
    findings.hub_kills += is_hub_lost

    def complain(what: str) -> None:
        findings.complaints.append(f"{name}: {what}")

    if outcome.hung:
        complain(f"ranks {outcome.hung} hung")
    if outcome.left_behind:
        complain("a supervisor was left behind")
    for number, rank in enumerate(outcome.ranks):
        for what in _leaks(rank):
            complain(f"rank {number} has {what}")
        if rank.all("returned"):
            continue
        raised = rank.all("raised")
        if number not in faulty and rank.exit == -signal.SIGTERM:
            findings.bystanders += 1
        elif number not in faulty and not is_hub_lost:
            said = f"{raised[0]['type']}: {raised[0]['text']}" if raised else f"exit {rank.exit}"
            complain(f"rank {number} is lost without a fault of its own: {said}")
        elif raised and raised[0]["type"] not in _ENDINGS:
            complain(f"rank {number} ended with {raised[0]['type']}: {raised[0]['text']}")
    returned = [rank.entered[-1] for rank in outcome.ranks if rank.all("returned")]
    if len(set(returned)) > 1:
        complain(f"ranks returned from different iterations: {returned}")
    _measure(outcome, findings)


def _leaks(rank: Rank) -> list[str]:
    found: list[str] = []
    for end in rank.all("end"):
        if end["threads"] != ["MainThread"]:
            found.append(f"threads left: {end['threads']}")
        if end["memfds"] or end["shm"]:
            found.append("shared memory left")
        # An exception's traceback may still hold the function's own group.
        if rank.all("returned") and end["sockets"]:
            found.append(f"{end['sockets']} sockets left")
    return found


def _measure(outcome: Outcome, findings: Findings) -> None:
    """Take the time from an iteration's only fault to the next iteration's last entry."""
    by_iteration: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for rank in outcome.ranks:
        for fault in rank.all("fault"):
            by_iteration[fault["iteration"]].append(fault)
    for iteration, faults in by_iteration.items():
        entries = [e["t"] for r in outcome.ranks for e in r.all("enter") if e["iteration"] == iteration + 1]
        if len(faults) == 1 and entries and faults[0]["point"] in ("function", "collective"):
            findings.recovery_s[faults[0]["kind"]].append(max(entries) - faults[0]["t"])


def rows(findings: Findings) -> tuple[Row, ...]:
    """Return the document's rows."""
    made = [
        document.summarize("chaos", OURS, metric, "faults" if metric == "faults" else "jobs", [count])
        for metric, count in (("faults", findings.faults.total()), ("jobs", findings.jobs))
    ]
    made.append(document.summarize("chaos", OURS, "broken_promises", "", [len(findings.complaints)]))
    made.append(document.summarize("chaos", OURS, "bystanders_killed", "ranks", [findings.bystanders]))
    made += [
        document.summarize("chaos", OURS, f"re_entry_after_{kind}", "s", values)
        for kind, values in sorted(findings.recovery_s.items())
    ]
    return tuple(made)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--faults", default=200, show_default=True, help="How many, over as many jobs as that takes.")
@click.option("--seed", type=int, help="Of the plans; default: another one every time, which is printed.")
@click.option("--quick", is_flag=True, help="24 faults.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(faults: int, seed: int | None, quick: bool, as_json: bool) -> None:
    """Break in-process restart wherever it can be broken."""
    ending.as_ctrl_c()
    seed = random.randrange(10**6) if seed is None else seed
    wanted = 24 if quick else faults
    console = Console(stderr=True)
    console.print(f"seed {seed}")
    chance = random.Random(seed)
    findings = Findings()
    began = document.now()
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(Path(directory))
        try:
            while findings.faults.total() < wanted:
                name = f"job {findings.jobs}"
                before, start = findings.faults.total(), time.monotonic()
                judge(ranks.run(plan_job(chance), _WORLD_SIZE, "chaotic", 120.0), findings, name)
                new = findings.faults.total() - before
                console.print(f"{name}: {new} faults in {time.monotonic() - start:.1f} s")
                if new == 0:
                    raise click.ClickException("a job ended before its first fault")
        finally:
            ranks.close()
    for complaint in findings.complaints:
        console.print(complaint, style="red")
    made = Document("in-process restart, chaos", document.describe_machine(), began, rows(findings))
    if as_json:
        click.echo(made.to_json())
    else:
        notes = ["faults: " + ", ".join(f"{kind} {count}" for kind, count in findings.faults.most_common())]
        Console().print(document.render(made, _TITLES, notes))
    sys.exit(1 if findings.complaints else 0)


if __name__ == "__main__":
    main()
