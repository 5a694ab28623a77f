#!/usr/bin/env python3
"""What straggler detection costs: a section of the training loop, a report of all ranks, a kernel's record.

.venv/bin/python benchmarks/straggler.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.straggler import Detector, Report, Watch

_BATCH = 1000
_START_S = 120.0
_RECORD_BYTES = 216
"""Of CUpti_ActivityKernel10, and here of every record."""
_TITLES = {
    "section": "one passage, entered and left",
    "report of 4 ranks": "generate_report on rank 0, over gloo on this machine",
    "kernel records": "the aggregator, on one core: seconds of processor time",
    "watch": "judging one report of 16,384 ranks with 8 sections, on rank 0",
}
_RANK = """
import json, sys, time
import torch.distributed as dist
from nvrx_slurm.straggler.exchange import OverTorch
from nvrx_slurm.straggler.reporting import SCORES, ReportGenerator
from nvrx_slurm.straggler.statistic import summarize

folder, rank, world, kernels, reports = sys.argv[1], *map(int, sys.argv[2:6])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
generator = ReportGenerator(frozenset(SCORES), True, "n0")
exchange = OverTorch(60)
names = [f"kernel_{index}_blk_128_1_1_grid_64_1_1" for index in range(kernels)]
summaries = {name: summarize([float(index + rank)] * 9) for index, name in enumerate(names)}
sections = {name: summarize([1.0, 2.0]) for name in ("load", "forward", "backward", "step")}
took = []
for _ in range(reports):
    dist.barrier()
    begun = time.perf_counter()
    generator.generate(sections, summaries, exchange)
    took.append((time.perf_counter() - begun) * 1e3)
if rank == 0:
    json.dump(took, sys.stdout)
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer repetitions: done within 30 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
def main(quick: bool, as_json: bool) -> None:
    """Measure a section, reports of 4 ranks, what is judged of them for 16,384, and records of kernels."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine()
    rows = [*_section_rows(100 if quick else 1000)]
    for kernels in (300, 2000):
        rows += _report_rows(kernels, 20 if quick else 200)
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
    for metric, interval in (("measured", 1), ("skipped", 1_000_000_000)):
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


def _report_rows(kernels: int, reports: int) -> list[Row]:
    _say(f"report: 4 ranks with {kernels} kernels each …")
    with tempfile.TemporaryDirectory(prefix="nvrx-straggler-") as folder, ExitStack() as stack:
        program = Path(folder, "rank.py")
        program.write_text(_RANK)
        ranks = [
            stack.enter_context(
                ending.program(
                    [sys.executable, str(program), folder, str(rank), "4", str(kernels), str(reports + 1)],
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                )
            )
            for rank in range(4)
        ]
        first, *others = json.loads(ranks[0].communicate(timeout=_START_S)[0])
    case = "report of 4 ranks"
    return [
        document.summarize(case, document.OURS, f"first, {kernels} kernels", "ms", [first]),
        document.summarize(case, document.OURS, f"later, {kernels} kernels", "ms", others),
    ]


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
