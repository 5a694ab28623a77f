#!/usr/bin/env python3
"""What straggler detection costs: a section in the training loop, and a report of all ranks.

.venv/bin/python benchmarks/straggler.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import click
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.straggler import Detector, Report, Watch

_BATCH = 1000
_START_S = 120.0
_TITLES = {
    "section": "one passage, entered and left",
    "report of 4 ranks": "generate_report on rank 0, over gloo on this machine",
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
    """Measure a section, reports of 4 ranks, and what is judged of them for 16,384."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine()
    rows = [*_section_rows(100 if quick else 1000)]
    for kernels in (300, 2000):
        rows += _report_rows(kernels, 20 if quick else 200)
    rows.append(_watch_row(3 if quick else 10))
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


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
