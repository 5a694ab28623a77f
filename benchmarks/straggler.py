#!/usr/bin/env python3
"""What straggler detection costs: a section of the training loop, a report of all ranks, a kernel's record.

.venv/bin/python benchmarks/straggler.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench import document, ending, peer
from bench.document import Document, Row
from bench.straggler import through_agents
from rich.console import Console

from nvrx_slurm.straggler import Detector, Report, Watch

_BATCH = 1000
_START_S = 120.0
_RANKS = Path(__file__).resolve().parent / "bench" / "straggler" / "exchange_ranks.py"
_PEER_SECTION = """
import json, os, sys, time
from nvidia_resiliency_ext.straggler import Detector

batches, batch, interval = map(int, sys.argv[1:])
Detector.initialize(profiling_interval=interval)
section, values = Detector.detection_section, []
for _ in range(batches):
    began = time.perf_counter_ns()
    for _ in range(batch):
        with section("step", profile_cuda=False):
            pass
    values.append((time.perf_counter_ns() - began) / batch / 1000)
json.dump(values, sys.stdout)
sys.stdout.flush()
os._exit(0)  # Without a driver its shutdown crashes.
"""
_INTERVALS = {"measured": 1, "skipped": 1_000_000_000}
_RECORD_BYTES = 216
"""Of CUpti_ActivityKernel10, and here of every record."""
_TITLES = {
    "section": "one passage, entered and left",
    "report of 4 ranks": "generate_report on rank 0, over gloo on this machine",
    "report of 64 ranks": "the same, with 64 ranks on these processors",
    "through the agents": "the same under nvrx-srun: the rank tells and goes on, the Coordinator judges",
    "kernel records": "the aggregator, on one core: seconds of processor time",
    "watch": "judging one report of 16,384 ranks with 8 sections, on rank 0",
}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer repetitions: done within 30 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--peer", "peer_name", type=click.Choice(["nvrx"]), help="Measure NVIDIA's package, too.")
def main(quick: bool, as_json: bool, peer_name: str | None) -> None:
    """Measure a section, reports of all ranks, what is judged of them for 16,384, and records of kernels.

    The peer's sections are measured where libcupti.so.12 is found: LD_LIBRARY_PATH names its folder.
    """
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine()
    contenders = {document.OURS: sys.executable}
    if peer_name is not None:
        contenders[peer_name] = str(peer.ensure_installed(_say) / "bin" / "python")
    rows = [*_section_rows(100 if quick else 1000)]
    if peer_name is not None:
        rows += _peer_section_rows(contenders[peer_name], peer_name, 100 if quick else 1000)
    for world in (4,) if quick else (4, 64):
        for kernels in (300, 2000):
            rows += _report_rows(contenders, world, kernels, (10 if quick else 40) if world == 4 else 4)
    rows += through_agents.rank_rows(20 if quick else 200)
    rows += through_agents.coordinator_rows(1 if quick else 3)
    rows.append(_watch_row(3 if quick else 10))
    rows += _kernel_rows(1_000_000 if quick else 10_000_000)
    result = Document("straggler", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        notes = ["p50 and p90 of a section are over batches of 1,000 passages, the loop included"]
        Console().print(document.render(result, _TITLES, notes))


def _section_rows(batches: int) -> list[Row]:
    rows = []
    for metric, interval in _INTERVALS.items():
        Detector.initialize(profiling_interval=interval)
        section = Detector.detection_section
        values = []
        for _ in range(batches):
            began = time.perf_counter_ns()
            for _ in range(_BATCH):
                with section("step", profile_cuda=False):
                    pass
            values.append((time.perf_counter_ns() - began) / _BATCH / 1000)
        Detector.shutdown()
        rows.append(document.summarize("section", document.OURS, metric, "µs", values))
    return rows


def _peer_section_rows(python: str, who: str, batches: int) -> list[Row]:
    rows = []
    for metric, interval in _INTERVALS.items():
        done = subprocess.run(
            [python, "-W", "ignore", "-c", _PEER_SECTION, str(batches), str(_BATCH), str(interval)],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            _say(f"{who}: its sections are not measured: {said[-1]}")
            return []
        rows.append(document.summarize("section", who, metric, "µs", json.loads(done.stdout)))
    return rows


def _report_rows(contenders: Mapping[str, str], world: int, kernels: int, reports: int) -> Iterator[Row]:
    """Measure all contenders, one after the other, twice: what the machine does meanwhile hits all alike."""
    took: dict[str, tuple[list[float], list[float]]] = {who: ([], []) for who in contenders}
    for who, python in [*contenders.items()] * 2:
        _say(f"report: {who}, {world} ranks with {kernels} kernels each …")
        with ending.program(
            [python, "-W", "ignore", str(_RANKS), who, str(world), str(kernels), str(reports + 1)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        ) as ranks:
            out, _ = ranks.communicate(timeout=_START_S)
        if ranks.returncode != 0:
            raise click.ClickException(f"{who}: {world} ranks ended with {ranks.returncode}")
        first, *others = json.loads(out)
        took[who][0].append(first)
        took[who][1].extend(others)
    case = f"report of {world} ranks"
    for who, (first_ms, later_ms) in took.items():
        yield document.summarize(case, who, f"first, {kernels} kernels", "ms", first_ms)
        yield document.summarize(case, who, f"later, {kernels} kernels", "ms", later_ms)


def _watch_row(reports: int) -> Row:
    _say("watch: 16,384 ranks …")
    ranks = range(16_384)
    medians = {
        f"section{index}": {rank: 10.0 + (rank * 7919 + index) % 13 / 10 for rank in ranks}
        for index in range(8)
    }
    report = Report({}, {}, {}, {}, dict.fromkeys(ranks, "n"), {}, {}, 0.0, True, 0, medians)
    watch, values = Watch(), []
    for _ in range(reports):
        began = time.perf_counter()
        watch.add(report)
        values.append((time.perf_counter() - began) * 1e3)
    return document.summarize("watch", document.OURS, "add", "ms", values)


def _kernel_rows(kernels: int) -> list[Row]:
    """Kernels of 300 names in one section; first all launches of a batch, then its kernels."""
    try:
        from nvrx_slurm.straggler import _cupti
    except ImportError:
        _say("kernel records: left out, the extension is not built")
        return []
    _say(f"kernel records: {kernels:,} kernels, with their launches …")
    batch = 100_000
    names = [
        ctypes.create_string_buffer(b"void at::native::kernel_%03d<" % i + b"x" * 150) for i in range(300)
    ]
    random = np.random.default_rng(0)
    numbers = np.arange(1, batch + 1)
    which = random.integers(0, len(names), batch)
    ran = _records(10, ((16, "u8", 1000), (92, "u4", numbers)), batch)
    ran["f24"] = 1000 + random.lognormal(10, 0.1, batch) * (1 + which / 30)
    ran["f104"] = np.array([ctypes.addressof(name) for name in names])[which]
    told = _records(39, ((4, "u4", 5), (8, "u8", 1), (16, "u4", numbers)), batch)
    called = _records(5, ((8, "u8", 1000), (32, "u4", numbers)), batch)
    aggregator = _cupti.SyntheticAggregator(_RECORD_BYTES)
    rates, of_kernels = [], []
    for _ in range(kernels // batch):
        began = time.thread_time()
        aggregator.read(told)
        aggregator.read(called)
        launched = time.thread_time()
        aggregator.read(ran)
        ended = time.thread_time()
        rates.append(3 * batch / (ended - began) / 1e6)
        of_kernels.append(batch / (ended - launched) / 1e6)
    began = time.perf_counter()
    found = aggregator.take()
    took = (time.perf_counter() - began) * 1e3
    if sum(kernel.times.count for kernel in found) != kernels // batch * batch:
        raise click.ClickException("the aggregator has lost kernels")
    numbers_of = {name.value.decode(): number for number, name in enumerate(names)}
    durations = ran["f24"] - ran["f16"]
    for kernel in found:
        exact = float(np.median(durations[which == numbers_of[kernel.name]])) / 1e3
        if abs(kernel.times.median_us / exact - 1) > _cupti.RELATIVE_ERROR:
            raise click.ClickException(f"a median of {kernel.times.median_us} µs should be {exact}")
    case, ours = "kernel records", document.OURS
    return [
        document.summarize(case, ours, "records of all kinds", "M/s", rates),
        document.summarize(case, ours, "records of kernels", "M/s", of_kernels),
        document.summarize(case, ours, "statistics of 300 kernels", "ms", [took]),
        document.summarize(case, ours, "memory per kernel and section", "B", [_cupti.SKETCH_BYTES]),
    ]


def _records(kind: int, fields: Sequence[tuple[int, str, Any]], count: int) -> Any:
    """Return records laid out as CUPTI's: values by offset. Those of kernels have their end and name, too."""
    places = {0: "u4", 24: "u8", 104: "u8"} | {offset: form for offset, form, _ in fields}
    if kind != 10:
        del places[24], places[104]
    layout = {
        "names": [f"f{offset}" for offset in sorted(places)],
        "formats": [places[offset] for offset in sorted(places)],
        "offsets": sorted(places),
        "itemsize": _RECORD_BYTES,
    }
    records = np.zeros(count, np.dtype(layout))
    records["f0"] = kind
    for offset, _, value in fields:
        records[f"f{offset}"] = value
    return records


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
