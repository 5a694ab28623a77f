#!/usr/bin/env python3
"""What a checkpoint costs training, and when it is on disk: ours, torch's own, the peer's, and the floors.

.venv/bin/python benchmarks/checkpoint.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from bench import document, ending, peer
from bench.checkpoint import gpt_loop, loads, plot, savers
from bench.checkpoint.savers import TENSOR_BYTES, Save, State, Times, make_state, timed
from bench.document import OURS, Document, Row
from rich.console import Console

from nvrx_slurm.checkpointing.async_ckpt.core import SnapshotMode

_PEER_SAVES = Path(__file__).parent / "bench" / "checkpoint" / "peer_saves.py"
_PEERS = {"peer, forked": 0, "peer, persistent (torn)": 1}
_PATIENCE_S = 600.0
_WORLD = 4
_INTERVALS = (1, 2, 4, 8, 16, 32)
_SLOW = 256 << 20
"""Bytes per second of the storage in "share": with a local disk every interval would be long enough."""
_FEW_SAVES = 4
_FEW_STEPS = 16
_TITLES = {
    "disk": "saving float32 tensors of 16 MiB to disk",
    "shm": "saving them to /dev/shm",
    "load": "loading what was saved, from the page cache; first: in a process that has loaded nothing",
    "cold": "the same from the disk, with nothing in the page cache",
    "fsdp2": f"{_WORLD} gloo ranks save the FSDP2 state of a model and its AdamW to disk",
    "training": "a GPT trains on one core and saves its state: what steps take longer until that is complete",
    "training, all cores": "the same on all cores: whatever a save takes is taken from steps",
    "share": f"share of wall time that goes to GPT steps, a save every so many; storage: {_SLOW >> 20} MiB/s",
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
@click.option("--only", type=click.Choice(list(_TITLES)), multiple=True, help="Cases.  [default: all]")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Write the shares there, as SVG.")
@click.option(
    "--dir",
    "disk",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="On the disk that is measured.  [default: the working directory]",
)
def main(
    quick: bool,
    as_json: bool,
    peer: str | None,
    mib: int | None,
    runs: int | None,
    only: tuple[str, ...],
    plot_file: Path | None,
    disk: Path,
) -> None:
    """Measure one contender after another, each from its first save on."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine(f"torch {torch.__version__}")
    mib, runs = mib or (128 if quick else 1024), runs or (2 if quick else 5)
    cases = only or tuple(_TITLES)
    state = make_state(mib if {"disk", "shm", "load", "cold"} & set(cases) else 16)
    rows = []
    with _one_rank(), _folders(disk) as folders:
        for case, folder in folders.items():
            if case in cases:
                rows += _save_rows(case, folder / "run", state, runs, quick=quick, with_peer=peer is not None)
        for case in ("load", "cold"):
            if case in cases:
                with tempfile.TemporaryDirectory(dir=folders["disk"]) as folder:
                    rows += _load_rows(case, state, Path(folder), runs, quick=quick)
        if "fsdp2" in cases:
            _say("fsdp2 …")
            rows += _fsdp2_rows(folders["disk"], runs=runs, width=512 if quick else 2048)
        for case, threads in {"training": 1, "training, all cores": os.cpu_count() or 1}.items():
            if case in cases:
                rows += _training_rows(case, threads, folders["disk"], runs)
        if "share" in cases:
            rows += _share_rows(folders["disk"], intervals=(2,) if quick else _INTERVALS)
    if plot_file is not None:
        plot_file.write_text(_plot(rows))
    result = Document("checkpoint", machine, date, tuple(rows))
    if as_json:
        click.echo(result.to_json())
    else:
        Console(width=None if sys.stdout.isatty() else 250).print(document.render(result, _TITLES, _NOTES))


def _save_rows(
    case: str, folder: Path, state: State, runs: int, *, quick: bool, with_peer: bool
) -> list[Row]:
    rows = []
    for who, contender in contenders().items():
        if quick and who == "dcp.async, process":
            continue
        _say(f"{case}: {who} …")
        with contender() as save:
            rows += _rows(case, who, *timed(save, state, folder, runs))
    if with_peer:
        rows += _peer_rows(case, folder, len(state), runs)
    return rows


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
        first, *later = (Times(*each) for each in _said_by(who, argv))
        rows += _rows(case, who, first, later)
    return rows


def _said_by(who: str, argv: Sequence[object]) -> Any:
    """Run a contender in a process of its own, and return the JSON that it prints."""
    with ending.program(list(map(str, argv)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        output, _ = program.communicate(timeout=_PATIENCE_S)
        if program.returncode:
            raise click.ClickException(f"{who} ended with exit code {program.returncode}")
    return json.loads(output)


def _load_rows(case: str, state: State, folder: Path, runs: int, *, quick: bool) -> list[Row]:
    """Contenders take turns, each time in a process of its own."""
    loads.write(state, folder)
    os.sync()
    whose = loads.COLD if case == "cold" else list(loads.contenders(folder))
    first: dict[str, list[float]] = {who: [] for who in whose}
    later: dict[str, list[float]] = {who: [] for who in whose}
    for number in range(runs):
        _say(f"{case}: {number + 1} of {runs} …")
        for who in whose:
            argv = [sys.executable, loads.__file__, folder, who, 2 if quick or case == "cold" else 3, case]
            began, *others = _said_by(who, argv)
            first[who].append(began)
            later[who] += others
    rows = [document.summarize(case, who, "load", "s", later[who]) for who in whose]
    return rows + [document.summarize(case, who, "first_load", "s", first[who]) for who in whose]


def _training_rows(case: str, threads: int, folder: Path, runs: int) -> list[Row]:
    _say(f"{case} …")
    torch.set_num_threads(threads)
    loop = gpt_loop.Loop()
    gibibytes = loop.size() / 2**30
    with contextlib.ExitStack() as stack:
        savers = {
            who: stack.enter_context(saver)
            for who, saver in {
                OURS: gpt_loop.asynchronous(loop),
                "ours, strict": gpt_loop.asynchronous(loop, snapshot_mode=SnapshotMode.STRICT),
                "floor: memcpy": gpt_loop.memcpy(loop),
                "floor: memcpy, SCHED_IDLE": gpt_loop.memcpy(loop, idle=True),
                "torch.save": gpt_loop.torch_save(loop),
                "no save": gpt_loop.nobody(),
            }.items()
        }
        found = gpt_loop.added(loop, savers, folder, runs)
    plain = [each * 1000 for each in found.pop("plain")]
    rows = [
        Row(case, OURS, "state", "MiB", gibibytes * 1024, gibibytes * 1024, 1),
        document.summarize(case, "no save", "step", "ms", plain),
    ]
    for who, values in found.items():
        per_gib = [each * 1000 / gibibytes for each in values]
        rows.append(document.summarize(case, who, "added_to_the_loop_per_GiB", "ms", per_gib))
    return rows


def _share_rows(folder: Path, *, intervals: Sequence[int]) -> list[Row]:
    torch.set_num_threads(1)
    loop = gpt_loop.Loop(width=768)
    rows = []
    for every in intervals:
        for who, contender in {
            OURS: lambda: gpt_loop.asynchronous(loop, max_bytes_per_s=_SLOW),
            "torch.save": lambda: gpt_loop.torch_save(loop, bytes_per_s=_SLOW),
        }.items():
            _say(f"share: {who}, every {every} steps …")
            steps = max(every, min(_FEW_SAVES * every, _FEW_STEPS))
            with contender() as saver:
                share = gpt_loop.share_of_training(loop, saver, folder, every=every, steps=steps)
            rows.append(document.summarize("share", who, f"every_{every}_steps", "%", [share * 100]))
    step_s = loop.steps(_FEW_STEPS) / _FEW_STEPS
    rows.append(document.summarize("share", "no save", "step", "s", [step_s]))
    rows.append(document.summarize("share", "no save", "write", "s", [loop.size() / _SLOW]))
    return rows


def _plot(rows: Sequence[Row]) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.case == "share" and row.unit == "%":
            series.setdefault(row.who, []).append((float(row.metric.split("_")[1]), row.p50 / 100))
    return plot.shares("Share of wall time spent training", "steps between saves", series)


def _fsdp2_rows(folder: Path, *, runs: int, width: int) -> list[Row]:
    script = Path(__file__).parent / "bench" / "checkpoint" / "fsdp_ranks.py"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [[sys.executable, script, rank, _WORLD, runs, width, folder] for rank in range(_WORLD)]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(ending.program(list(map(str, each)), stdout=subprocess.PIPE, env=environ))
            for each in argv
        ]
        output, _ = ranks[0].communicate(timeout=_PATIENCE_S)
        codes = [rank.wait(_PATIENCE_S) for rank in ranks]
    if any(codes):
        raise click.ClickException(f"ranks with FSDP2 ended with exit codes {codes}")
    rows = []
    for who, each in json.loads(output).items():
        first, *later = (Times(*times) for times in each)
        rows += _rows("fsdp2", who, first, later)
    size = 3 * 8 * width * width * 4 / 2**20
    return [*rows, Row("fsdp2", OURS, "state", "MiB", size, size, 1)]


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
