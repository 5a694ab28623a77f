#!/usr/bin/env python3
"""What timing single kernels costs a training step, and whether the times are those of torch.profiler.

.venv/bin/python benchmarks/straggler_gpu.py --help    Needs a GPU and libcupti.

Steps of the example GPT run in blocks, by turns without and with sections, so that a change of clocks meets
both. The same step is then recorded by torch.profiler and by the detector, by turns, and each kernel's total
is compared.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from bench import document, ending
from bench.document import Document, Row
from rich.console import Console

from nvrx_slurm.straggler import Detector, Statistic

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt.model import GPT, VOCABULARY

_BLOCK = 20
_WARM_UP = 30
_LEAST_SHARE = 0.01
"""Kernels below this share of all time are not compared: of a very short one a clock's tick is 1 %."""
_TITLES = {
    "overhead": "time of a training step, three sections with kernels around all of it",
    "agreement": "total time of each kernel, detector against torch.profiler",
}


class Training:
    """One step after the other of the same work."""

    def __init__(self, device: str, width: int, layers: int, batch: int, length: int) -> None:
        torch.manual_seed(1)
        self._device = device
        self.model = GPT(block=length, layers=layers, heads=width // 64, width=width, dropout=0.0).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), fused=device == "cuda")
        text = torch.randint(0, VOCABULARY, (batch, length + 1), device=device)
        self._tokens, self._targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def step(self, is_measured: bool) -> None:
        with _section("forward", is_measured):
            loss = self.model(self._tokens, self._targets)
        with _section("backward", is_measured):
            loss.backward()
        with _section("optimizer", is_measured):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def steps(self, count: int, is_measured: bool) -> float:
        """Run steps; return milliseconds of one."""
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            self.step(is_measured)
        self.wait()
        return (time.perf_counter() - began) * 1e3 / count

    def wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Fewer blocks: done within a minute.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--width", default=1024, show_default=True, help="Of the model; a multiple of 64.")
@click.option("--layers", default=12, show_default=True, help="Of the model.")
@click.option("--batch", default=16, show_default=True, help="Sequences of 512 bytes in a step.")
def main(quick: bool, as_json: bool, width: int, layers: int, batch: int) -> None:
    """Measure a training step with and without the timing of kernels, and compare with torch.profiler."""
    ending.as_ctrl_c()
    if not torch.cuda.is_available():
        raise click.UsageError("this needs a CUDA GPU, and torch sees none")
    date = document.now()
    machine = document.describe_machine(torch.cuda.get_device_name(), f"CUDA {torch.version.cuda}")
    training = Training("cuda", width, layers, batch, 512)
    Detector.initialize(report_time_interval=1e9)
    training.steps(_WARM_UP, True)
    if not _kernels():
        raise click.ClickException("no kernel was timed: the log above says why")
    rows = [*overhead(training, 10 if quick else 60), *agreement(training, 3 if quick else 10)]
    Detector.shutdown()
    result = Document("straggler_gpu", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(document.render(result, _TITLES, ["a block is 20 steps"]))


def overhead(training: Training, blocks: int) -> list[Row]:
    """Return the time of a step without and with sections, and how much more the latter is, pair by pair."""
    without, measured = [], []
    for block in range(blocks):
        _say(f"overhead: pair {block + 1} of {blocks} …")
        # Who comes first changes, for the second one meets a warmer GPU.
        for is_measured in (False, True) if block % 2 else (True, False):
            (measured if is_measured else without).append(training.steps(_BLOCK, is_measured))
        Detector.generate_report()
    more = [(ours / floor - 1) * 100 for ours, floor in zip(measured, without, strict=True)]
    return [
        document.summarize("overhead", "floor", "step", "ms", without),
        document.summarize("overhead", document.OURS, "step", "ms", measured),
        document.summarize("overhead", document.OURS, "more than without", "%", more),
    ]


def agreement(training: Training, rounds: int) -> list[Row]:
    """Return how far the kernels' totals are from torch.profiler's, over the same number of steps."""
    theirs: defaultdict[str, float] = defaultdict(float)
    ours: defaultdict[str, float] = defaultdict(float)
    _kernels()
    for number in range(rounds):
        _say(f"agreement: round {number + 1} of {rounds} …")
        for name, spent in _profiled(training).items():
            theirs[name] += spent
        training.steps(_BLOCK, True)
        for name, spent in _kernels().items():
            ours[name] += spent
    total = sum(theirs.values())
    compared = [name for name, spent in theirs.items() if spent >= _LEAST_SHARE * total]
    missing = [name for name in compared if name not in ours]
    if missing:
        raise click.ClickException(f"torch.profiler knows kernels that the detector does not: {missing}")
    apart = [abs(ours[name] / theirs[name] - 1) * 100 for name in compared]
    _say(f"agreement: {len(compared)} kernels compared, the farthest {max(apart):.2f} % apart")
    whole = abs(sum(ours[name] for name in compared) / sum(theirs[name] for name in compared) - 1) * 100
    return [
        document.summarize("agreement", document.OURS, "a kernel's total differs", "%", apart),
        document.summarize("agreement", document.OURS, "the farthest", "%", [max(apart)]),
        document.summarize("agreement", document.OURS, "all of them together", "%", [whole]),
    ]


def _profiled(training: Training) -> dict[str, float]:
    """Return the microseconds in each kernel of one block, by torch.profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        training.steps(_BLOCK, False)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            found[event["name"]] += event["dur"]
    return found


def _kernels() -> dict[str, float]:
    """End a period; return the microseconds in each of its kernels, by the detector."""
    torch.cuda.synchronize()
    report = Detector.generate_report()
    assert report is not None
    found: defaultdict[str, float] = defaultdict(float)
    for name, times in report.local_kernel_summaries.items():
        if not name.startswith("section:"):
            # torch.profiler writes names as in the source.
            found[torch._C._demangle(name)] += times[Statistic.NUM] * times[Statistic.AVG]
    return found


def _section(name: str, is_measured: bool) -> AbstractContextManager[Any]:
    return Detector.detection_section(name) if is_measured else nullcontext()


def _say(text: str) -> None:
    click.echo(text, err=True)


if __name__ == "__main__":
    main()
