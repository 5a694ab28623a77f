#!/usr/bin/env python3
"""How long a prolog holds up a job: 8 simulated GPUs with 18 NVLinks each, 9 network adapters.

.venv/bin/python benchmarks/hooks.py --help    Needs root, Slurm and a C compiler: it starts a dev cluster.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from bench import document, ending
from bench.document import OURS, Document, Row
from rich.console import Console

from nvrx_slurm.devcluster import DevCluster, DevClusterError
from nvrx_slurm.devcluster.hardware import Shape

_NODE = "n1"
_SHAPE = Shape()
_COMMAND_S = 60.0
_HEALTH = Path(sys.executable).with_name("nvrx-health")
_CONFIG = """\
budget_s: 30
state_dir: /local/health
checks:
  gpu-count: {expected: 8}
  gpu-mig: {enabled: false}
  nvlink-links: {expected: 18}
  nic-present: {expected: [mlx5_0, mlx5_8]}
  mounts: {expected: {/storage: ""}}
  paths: {paths: {/storage: write, /local: list}}
  devices: {required: [/dev/null]}
  site-scripts: {directory: /local/checks.d}
"""
_TIMER = """
import json, resource, subprocess, sys, time
rounds, *commands = json.load(sys.stdin)
def processor_time():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
runs = [[] for _ in commands]
for _ in range(rounds):
    for place, command in enumerate(commands):
        began, used = time.monotonic(), processor_time()
        done = subprocess.run(command, capture_output=True, text=True)
        runs[place].append((time.monotonic() - began, processor_time() - used))
        if done.returncode:
            sys.exit(f"{command}: exit code {done.returncode}: {done.stdout}{done.stderr}")
print(json.dumps([runs, done.stdout]))
"""
_HARDWARE = f"{_SHAPE.gpus} GPUs, {_SHAPE.links} NVLinks each, {_SHAPE.nics} adapters"
_TITLES = {
    "prolog": f"the checks of a prolog on {_HARDWARE}",
    "hook": f"the whole hook as slurmd runs it, with its script and a new baseline, on {_HARDWARE}",
}
_PREFIX = "/local/nvrx"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="10 runs instead of 100.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
def main(quick: bool, as_json: bool) -> None:
    """Time nvrx-health check --stage prolog, the hook and a bare interpreter in turn, on a dev cluster."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine()
    cluster = DevCluster(f"hooks{os.getpid()}")
    try:
        _say("starting a dev cluster …")
        cluster.up(nodes=1, gpus_per_node=_SHAPE.gpus, nics=_SHAPE.nics)
        rows, said = _measure(cluster, 10 if quick else 100)
    except DevClusterError as error:
        raise click.ClickException(str(error)) from error
    finally:
        cluster.down()
    result = Document("hooks", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(
            document.render(result, _TITLES, [said, "seconds from the start of the process to its end"])
        )


def _measure(cluster: DevCluster, rounds: int) -> tuple[list[Row], str]:
    """Return the rows, and what the last check said of itself."""
    local = cluster.local_dir_of(_NODE)
    config = local / "health.yaml"
    config.write_text(_CONFIG)
    config.chmod(0o600)
    (local / "checks.d").mkdir(mode=0o755)
    script = local / "checks.d" / "10-fine"
    script.write_text("#!/bin/sh\necho fine\n")
    script.chmod(0o755)
    health, options = str(_HEALTH), ["--config", "/local/health.yaml"]
    check = [health, "check", "--stage", "prolog", "--json", *options]
    # What the last command prints is what the table tells of: the checks.
    commands = {
        ("prolog", "floor"): [sys.executable, "-c", "pass"],
        ("hook", OURS): _install_hook(cluster),
        ("prolog", OURS): check,
    }
    _in_node(cluster, 1, [[health, "baseline", *options], check])
    _say(f"{rounds} runs of each …")
    runs, output = _in_node(cluster, rounds, list(commands.values()))
    rows = []
    for (case, who), of_one in list(zip(commands, runs, strict=True))[::-1]:
        seconds, cpu = ([run[place] for run in of_one] for place in (0, 1))
        rows.append(document.summarize(case, who, "time", "s", seconds))
        last = statistics.quantiles(seconds, n=100, method="inclusive")[98]
        rows.append(Row(case, who, "time_p99", "s", round(last, 4), round(last, 4), len(seconds)))
        rows.append(document.summarize(case, who, "cpu", "s", cpu))
    return rows, _told(output)


def _install_hook(cluster: DevCluster) -> list[str]:
    """Return the command line that runs the hook as slurmd does."""
    (cluster.local_dir_of(_NODE) / "nvrx").mkdir()
    (cluster.local_dir_of(_NODE) / "nvrx" / "health.yaml").write_text(_CONFIG)
    _in_node(cluster, 1, [[str(_HEALTH), "install-hooks", "--prefix", _PREFIX]])
    told = ["SLURM_SCRIPT_CONTEXT=prolog_slurmd", f"SLURMD_NODENAME={_NODE}", "SLURM_JOB_ID=1"]
    command = ["env", *told, f"{_PREFIX}/prolog.d/50-nvrx-health"]
    done = cluster.exec(_NODE, command, capture_output=True, text=True, timeout=_COMMAND_S, cwd="/")
    if done.returncode != 0 or "is broken" in done.stderr:
        raise click.ClickException(f"the hook does not pass: {done.stderr.strip()}")
    return command


def _in_node(
    cluster: DevCluster, rounds: int, commands: Sequence[Sequence[str]]
) -> tuple[list[list[tuple[float, float]]], str]:
    """Run the commands in turn, so many times.

    Returns:
        Of every command seconds and seconds of processor time of each run, and what the last one printed.
    """
    argv = [sys.executable, "-I", "-S", "-c", _TIMER]
    done = cluster.exec(
        _NODE,
        argv,
        input=json.dumps([rounds, *commands]),
        capture_output=True,
        text=True,
        timeout=_COMMAND_S + rounds * len(commands) * 5.0,
        cwd="/",
        # As slurmd's hooks have it, without the user's words, such as that Python shall not keep bytecode.
        env={"PATH": os.defpath, "LC_ALL": "C.UTF-8", **cluster.environment()},
    )
    if done.returncode != 0:
        raise click.ClickException(done.stderr.strip())
    runs, output = json.loads(done.stdout)
    return runs, output


def _told(output: str) -> str:
    report = json.loads(output)
    counts: dict[str, list[str]] = {}
    for result in report["results"]:
        counts.setdefault(result["status"], []).append(result["check"])
    words = [f"{len(set(checks))} {status}" for status, checks in sorted(counts.items())]
    skipped = ", ".join(counts.get("skip", ())) or "none"
    slow = sorted(report["durations"].items(), key=lambda pair: -pair[1])[:3]
    slowest = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in slow)
    return f"{', '.join(words)}; skipped: {skipped}; all checks {report['seconds']:.2f} s, slowest: {slowest}"


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


if __name__ == "__main__":
    main()
