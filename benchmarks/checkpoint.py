#!/usr/bin/env python3
"""What a checkpoint costs training, and when it is on disk: ours, torch's own, the peer's, and the floors.

.venv/bin/python benchmarks/checkpoint.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import click
import torch
import torch.distributed as dist
from bench import document, ending, peer
from bench.checkpoint import savers
from bench.checkpoint.savers import TENSOR_BYTES, Save, State, Times, make_state, timed
from bench.document import OURS, Document, Row
from rich.console import Console

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.core import SnapshotMode
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from gpt.model import GPT

_PEER_SAVES = Path(__file__).parent / "bench" / "checkpoint" / "peer_saves.py"
_PEERS = {"peer, forked": 0, "peer, persistent (torn)": 1}
_PATIENCE_S = 600.0
_TITLES = {
    "disk": "saving float32 tensors of 16 MiB to disk",
    "shm": "saving them to /dev/shm",
    "load": "loading what was saved, from the page cache",
    "training": "real GPT steps, the state of the GPT itself saved",
}
_NOTES = [
    "foreground: until the call has returned; ours (overlapped) copies during the next pass",
    "ours, step at once: an optimizer steps right after the call, so its guard copies everything",
    "total: until the checkpoint is on disk; torch.save and the peer do not wait for the disk (no fsync)",
    "peer, persistent: does not copy CPU tensors, so what it saves changes while training goes on",
]


def contenders() -> dict[str, Callable[[], AbstractContextManager[Save]]]:
    return {
        OURS: lambda: savers.ours(SnapshotMode.OVERLAPPED),
        "ours, strict": lambda: savers.ours(SnapshotMode.STRICT),
        "ours, step at once": lambda: savers.ours(SnapshotMode.OVERLAPPED, step_at_once=True),
        "floor: memcpy": savers.memcpy_floor,
        "floor: write": savers.write_floor,
        "torch.save": savers.torch_save,
        "dcp.save": savers.dcp_save,
        "dcp.async, thread": lambda: savers.dcp_async("thread"),
        "dcp.async, process": lambda: savers.dcp_async("process"),
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="128 MiB, two runs, without the process of dcp.async.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
@click.option("--peer", type=click.Choice(["nvrx"]), help="Also NVIDIA's package, in its own environment.")
@click.option("--mib", type=click.IntRange(16), help="Size of the state.  [default: 1024]")
@click.option("--runs", type=click.IntRange(1), help="Saves after the first one.  [default: 5]")
@click.option(
    "--dir",
    "disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="On the disk that is measured.  [default: the working directory]",
)
def main(quick: bool, as_json: bool, peer: str | None, mib: int | None, runs: int | None, disk: Path) -> None:
    """Measure one contender after another, each from its first save on."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine(f"torch {torch.__version__}")
    mib, runs = mib or (128 if quick else 1024), runs or (2 if quick else 5)
    state = make_state(mib)
    rows = []
    with _one_rank(), _folders(disk) as folders:
        for case, folder in folders.items():
            for who, contender in contenders().items():
                if quick and who == "dcp.async, process":
                    continue
                _say(f"{case}: {who} …")
                with contender() as save:
                    rows += _rows(case, who, *timed(save, state, folder / "run", runs))
            if peer:
                rows += _peer_rows(case, folder / "run", len(state), runs)
        _say("load …")
        rows += _load_rows(state, folders["disk"], runs)
        _say("training …")
        rows += _training_rows(folders["disk"], 2 if quick else 6)
    result = Document("checkpoint", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else 250).print(document.render(result, _TITLES, _NOTES))


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """A process group of one: torch's asynchronous savers want one."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(environ, MASTER_PORT=str(store.port))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _folders(disk: Path) -> Iterator[dict[str, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="nvrx-ckpt-bench-", dir=disk) as on_disk,
        tempfile.TemporaryDirectory(prefix="nvrx-ckpt-bench-", dir="/dev/shm") as in_memory,
    ):
        yield {"disk": Path(on_disk), "shm": Path(in_memory)}


def _rows(case: str, who: str, first: Times, later: list[Times]) -> list[Row]:
    return [
        document.summarize(case, who, "foreground", "s", [each.foreground for each in later]),
        document.summarize(case, who, "total", "s", [each.total for each in later]),
        document.summarize(case, who, "first_foreground", "s", [first.foreground]),
        document.summarize(case, who, "first_total", "s", [first.total]),
    ]


def _peer_rows(case: str, folder: Path, tensors: int, runs: int) -> list[Row]:
    python = peer.ensure_installed(_say) / "bin" / "python"
    rows = []
    for who, persistent in _PEERS.items():
        _say(f"{case}: {who} …")
        argv = [python, _PEER_SAVES, folder, persistent, tensors, TENSOR_BYTES, runs]
        with ending.program(
            list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as program:
            output, _ = program.communicate(timeout=_PATIENCE_S)
            if program.returncode:
                raise click.ClickException(f"{who} ended with exit code {program.returncode}")
        first, *later = (Times(*each) for each in json.loads(output))
        rows += _rows(case, who, first, later)
    return rows


def _load_rows(state: State, folder: Path, runs: int) -> list[Row]:
    path = folder / "load.pt"
    storage.save(state, path)
    buffer = memoryview(mmap.mmap(-1, path.stat().st_size))

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            rest = buffer
            while rest and (count := file.readinto(rest)):
                rest = rest[count:]

    calls: dict[str, Callable[[], object]] = {
        OURS: lambda: storage.load(path),
        "ours, not verified": lambda: storage.load(path, verify=False),
        "ours, mmap": lambda: storage.load(path, mmap=True),
        "floor: read": read,
        "torch.load": lambda: torch.load(path, weights_only=True),
    }
    rows = []
    for who, call in calls.items():
        call()
        values = []
        for _ in range(runs):
            began = time.perf_counter()
            call()
            values.append(time.perf_counter() - began)
        rows.append(document.summarize("load", who, "load", "s", values))
    path.unlink()
    return rows


def _training_rows(folder: Path, runs: int) -> list[Row]:
    """The step after a save beside one without: each pair right after another, since machines change."""
    torch.set_num_threads(1)  # the other cores are for the copy and the worker, as in a job
    model = GPT(block=64, layers=6, heads=8, width=512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 64))

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
        return time.perf_counter() - began

    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    size = sum(t.nbytes for t in model.state_dict().values()) * 3
    rows = []
    for who, mode in {OURS: SnapshotMode.OVERLAPPED, "ours, strict": SnapshotMode.STRICT}.items():
        checkpoint = TorchAsyncCheckpoint(snapshot_mode=mode)
        added, plain = [], []
        for run in range(runs + 1):
            without = step()
            began = time.perf_counter()
            checkpoint.async_save(state, folder / "training.pt")
            step()
            with_save = time.perf_counter() - began
            checkpoint.finalize_async_save(blocking=True)
            if run:  # the first allocates
                added.append((with_save - without) * 1000 * 2**30 / size)
                plain.append(without * 1000)
        checkpoint.close()
        rows += [
            document.summarize("training", who, "added_to_the_loop_per_GiB", "ms", added),
            document.summarize("training", who, "step_without_save", "ms", plain),
        ]
    state_mib = size / 2**20
    rows.append(Row("training", OURS, "state", "MiB", state_mib, state_mib, 1))
    _say(f"median step {statistics.median(plain):.0f} ms, state {state_mib:.0f} MiB")
    return rows


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
