#!/usr/bin/env python3
"""What attribution costs and how often it is right; torch's own analyser beside it.

.venv/bin/python benchmarks/attribution.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import click
import psutil
from bench import attribution_data as data
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.attribution.flight_recorder import analyze_directory
from nvrx_slurm.attribution.logs.finding import Source
from nvrx_slurm.attribution.logs.rules import load_rules
from nvrx_slurm.attribution.logs.scan import LogScanner

_TORCH = "torchfrtrace"
_MB = 1_000_000
_TITLES = {
    "log_healthy": "a healthy job's log, on one core",
    "log_failing": "a log in which every line is a failure, on one core",
    "log_tracebacks": "a log of nothing but tracebacks, on one core",
    "labelled_lines": "labelled lines: right category",
    "real_traces": "real 16-rank traces: exactly the injected ranks named",
}
_NOTES = [
    "processor seconds are what one core needs; the wall clock of a loaded machine is longer",
    "real_traces and labelled_lines have rows where the data is beside the clone, in ../shared/data",
    "torchfrtrace prints missing ranks per mismatch; it counts as right if the union of them is the truth",
]
_MISSING = re.compile(r"missing ranks: \{([\d, ]+)\}")
_FAULT = re.compile(r"Fault ranks: \[([\d, ]+)\]")
_CLONE = Path(__file__).resolve().parent.parent


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Small logs, 256 ranks: done within 60 s.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--largest-log", default=1000, show_default=True, help="Size of the largest log in MB.")
@click.option("--runs", default=3, show_default=True, help="Repetitions.")
@click.option("--workers", default=None, type=int, help="Processes that read dumps; by default one per core.")
def main(quick: bool, as_json: bool, largest_log: int, runs: int, workers: int | None) -> None:
    """Measure throughput, memory and accuracy of attribution."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine(f"torch {metadata.version('torch')}")
    sizes = [10] if quick else [10, largest_log]
    worlds = [(16, 200), (256, 200)] if quick else [(16, 2000), (512, 2000), (4096, 2000)]
    runs = 1 if quick else runs
    rows = [*_log_rows("log_healthy", data.training_log, sizes, runs)]
    rows += _log_rows("log_failing", data.failing_log, [2 if quick else 10], runs)
    rows += _log_rows("log_tracebacks", data.tracebacks_log, [2 if quick else 10], runs)
    rows += _labelled_rows()
    rows += _trace_rows()
    for ranks, entries in worlds:
        rows += _dump_rows(ranks, entries, 1 if ranks > 1000 else runs, workers)
        _TITLES.setdefault(f"dumps_{ranks}x{entries}", f"{ranks:,} dumps of {entries:,} entries")
    result = Document("attribution", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(document.render(result, _TITLES, _NOTES))


def _log_rows(case: str, log: Callable[[int], Iterator[bytes]], sizes: list[int], runs: int) -> list[Row]:
    rules = load_rules()
    rows = []
    for size in sizes:
        rates = []
        for run in range(runs):
            _say(f"{case}: {size} MB, run {run + 1} of {runs} …")
            scanner = LogScanner(Source(Path("log")), rules)
            spent = 0.0
            for block in log(size * _MB):
                began = time.process_time()
                scanner.feed(block)
                spent += time.process_time() - began
            rates.append(scanner.finish().bytes_read / _MB / spent)
        rows.append(document.summarize(case, document.OURS, f"{size}_MB", "MB per processor second", rates))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows.append(document.summarize(case, document.OURS, "peak_memory_of_the_benchmark", "MiB", [peak]))
    return rows


def _labelled_rows() -> list[Row]:
    path = _shared("failure_lines.json")
    if path is None:
        return []
    rules = load_rules()
    cases = json.loads(path.read_text())
    right = [(found := rules.classify(c["line"])) is not None and found.id == c["category"] for c in cases]
    return [
        Row(
            "labelled_lines", document.OURS, "right", "runs", float(sum(right)), float(sum(right)), len(cases)
        )
    ]


def _trace_rows() -> list[Row]:
    folder = _shared("fr_traces")
    if folder is None:
        return []
    right = {document.OURS: 0, _TORCH: 0}
    seconds: dict[str, list[float]] = {document.OURS: [], _TORCH: []}
    traces = sorted(path for path in folder.iterdir() if path.is_dir())
    for trace in traces:
        found = _FAULT.search((trace / "fault_injection.log").read_text())
        truth = {int(rank) for rank in found.group(1).split(",")} if found else set()
        for who, name in ((document.OURS, _ours), (_TORCH, _torchs)):
            _say(f"real_traces: {trace.name}, {who} …")
            began = time.monotonic()
            right[who] += name(trace) == truth
            seconds[who].append(time.monotonic() - began)
    rows = [
        Row("real_traces", who, "right", "runs", float(n), float(n), len(traces)) for who, n in right.items()
    ]
    return rows + [document.summarize("real_traces", w, "wall", "s", values) for w, values in seconds.items()]


def _ours(trace: Path) -> set[int]:
    program = Path(sys.executable).parent / "nvrx-attribute"
    done = subprocess.run([program, "fr", trace, "--json"], capture_output=True, text=True, check=False)
    return {culprit["rank"] for culprit in json.loads(done.stdout)["culprits"]}


def _torchs(trace: Path) -> set[int]:
    program = Path(sys.executable).parent / "torchfrtrace"
    done = subprocess.run([program, trace, "-p", "_dump_"], capture_output=True, text=True, check=False)
    found = _MISSING.findall(done.stdout + done.stderr)
    return {int(rank) for ranks in found for rank in ranks.split(",")}


def _dump_rows(ranks: int, entries: int, runs: int, workers: int | None) -> list[Row]:
    case = f"dumps_{ranks}x{entries}"
    walls: list[float] = []
    processor: list[float] = []
    pools: list[float] = []
    right = 0
    with tempfile.TemporaryDirectory(prefix="nvrx-attribution-") as folder:
        _say(f"{case}: writing …")
        culprit = data.write_dumps(Path(folder, "dumps"), ranks, entries)
        for run in range(runs):
            _say(f"{case}: run {run + 1} of {runs} …")
            before, began = _spent(), time.monotonic()
            with _pool_memory(pools):
                report = analyze_directory(Path(folder, "dumps"), workers=workers)
            walls.append(time.monotonic() - began)
            processor.append(_spent() - before)
            right += [found.rank for found in report.culprits] == [culprit]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Row(case, document.OURS, "right", "runs", float(right), float(right), runs),
        document.summarize(case, document.OURS, "wall", "s", walls),
        document.summarize(case, document.OURS, "processor_time_of_all", "s", processor),
        document.summarize(case, document.OURS, "peak_memory_of_the_reader", "MiB", [peak]),
        document.summarize(case, document.OURS, "peak_memory_of_the_pool", "MiB", pools),
    ]


@contextlib.contextmanager
def _pool_memory(peaks: list[float]) -> Iterator[None]:
    """Append the highest sum of our child processes' resident memory in MiB, looked at ten times a second."""
    me, over, highest = psutil.Process(), threading.Event(), 0.0

    def watch() -> None:
        nonlocal highest
        while not over.wait(0.1):
            with contextlib.suppress(psutil.Error):
                highest = max(highest, sum(child.memory_info().rss for child in me.children()) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        peaks.append(highest)


def _spent() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _shared(name: str) -> Path | None:
    places = [parent / "shared" / "data" / name for parent in _CLONE.parents]
    return next((place for place in places if place.exists()), None)


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
