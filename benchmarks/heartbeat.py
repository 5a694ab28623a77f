#!/usr/bin/env python3
"""What hang detection costs: a rank per heartbeat and section, a node's agent per second.

.venv/bin/python benchmarks/heartbeat.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import psutil
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.fault_tolerance.config import build_config
from nvrx_slurm.wire.page import PAGE_VARIABLE, HeartbeatPage
from nvrx_slurm.wire.rank_channel import SOCKET_VARIABLE
from nvrx_slurm.wire.timeouts import MONITORING_VARIABLE

RANKS = 8
SECTIONS = "step:30,checkpoint:300,setup:600,evaluation:300"
_BATCH = 1000
_START_S = 60.0
_TITLES = {
    "client": "one call in the training loop",
    "agent": f"the agent of a node with {RANKS} ranks, each with 50 steps a second: heartbeat and section",
}
_LOCAL_JOB = Path(__file__).parent / "bench" / "local_job.py"
_TRAINING = """
import os, time
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
step = 0
while True:
    step += 1
    client.start_section("step")
    time.sleep(0.02)
    client.end_section("step")
    client.send_heartbeat(step=step)
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer repetitions: done within 30 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
def main(quick: bool, as_json: bool) -> None:
    """Measure the calls of RankMonitorClient one by one, then a whole job's agent."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine()
    rows = [*_client_rows(100 if quick else 1000), *_agent_rows(1 if quick else 5, 5.0 if quick else 20.0)]
    result = Document("heartbeat", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        notes = ["p50 and p90 of the client are over batches of 1,000 calls, the loop included"]
        Console().print(document.render(result, _TITLES, notes))


def _client_rows(batches: int) -> list[Row]:
    _say(f"client: {batches} batches of {_BATCH} calls of each kind …")
    config = build_config(("benchmark", {"rank_section_timeouts": SECTIONS}))
    with (
        tempfile.TemporaryDirectory(dir=_memory()) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        page = HeartbeatPage.create(Path(folder, "page"))
        listener.bind(f"{folder}/socket")
        listener.listen()
        os.environ.update(
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "TORCHELASTIC_RESTART_COUNT": "0",
                PAGE_VARIABLE: f"{folder}/page",
                SOCKET_VARIABLE: f"{folder}/socket",
                MONITORING_VARIABLE: msgspec.json.encode(config.monitoring()).decode(),
            }
        )
        client = RankMonitorClient()
        client.init_workload_monitoring()

        def heartbeat() -> None:
            client.send_heartbeat(step=1)

        def section() -> None:
            client.start_section("step")
            client.end_section("step")

        def inner_section() -> None:
            client.start_section("checkpoint")
            client.end_section("checkpoint")

        rows = [
            _time("send_heartbeat", heartbeat, batches),
            _time("start_section_and_end_section", section, batches),
        ]
        client.start_section("setup")
        rows.append(_time("start_section_and_end_section_inside_another", inner_section, batches))
        rows.append(_time("should_stop", client.should_stop, batches))
        client.shutdown_workload_monitoring()
        page.close()
    return rows


def _time(metric: str, call: Callable[[], object], batches: int) -> Row:
    values = []
    for _ in range(batches):
        began = time.perf_counter_ns()
        for _ in range(_BATCH):
            call()
        values.append((time.perf_counter_ns() - began) / _BATCH / 1000)
    return document.summarize("client", document.OURS, metric, "µs", values)


def _agent_rows(runs: int, seconds: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="nvrx-heartbeat-") as folder:
        script = Path(folder, "train.py")
        script.write_text(_TRAINING)
        argv = [sys.executable, str(_LOCAL_JOB), f"{folder}/run", "1", str(RANKS), str(script)]
        _say(f"agent: starting a job of {RANKS} ranks …")
        with ending.program(
            [*argv, f"rank_section_timeouts={SECTIONS}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as job:
            journal = Path(folder, "run", "journal.jsonl")
            _wait("all ranks train", lambda: b'"first_step"' in journal.read_bytes())
            agent = _agent_of(job)
            shares, memory = [], []
            for run in range(runs):
                _say(f"agent: run {run + 1} of {runs}, {seconds:g} s …")
                before, began = sum(agent.cpu_times()[:2]), time.monotonic()
                time.sleep(seconds)
                used = sum(agent.cpu_times()[:2]) - before
                shares.append(100 * used / (time.monotonic() - began))
                memory.append(agent.memory_info().rss / 2**20)
    return [
        document.summarize("agent", document.OURS, "cpu", "% of a core", shares),
        document.summarize("agent", document.OURS, "resident_memory", "MiB", memory),
    ]


def _agent_of(job: subprocess.Popen[bytes]) -> psutil.Process:
    def find() -> psutil.Process | None:
        for process in psutil.Process(job.pid).children(recursive=True):
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == "nvrx-agent":
                return process
        return None

    return _wait("the agent", find)


def _wait(what: str, condition: Callable[[], psutil.Process | bool | None]) -> psutil.Process:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            found = condition()
        except (OSError, psutil.Error):
            found = None
        if found:
            return found  # type: ignore[return-value]
        if time.monotonic() > deadline:
            raise click.ClickException(f"not within {_START_S:g} s: {what}")
        time.sleep(0.05)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    main()
