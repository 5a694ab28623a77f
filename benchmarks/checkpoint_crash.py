#!/usr/bin/env python3
"""Kill trainers, their checkpoint workers, or nodes at random moments: the newest committed step must load.

.venv/bin/python benchmarks/checkpoint_crash.py --help    Needs neither root nor Slurm.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

import click
import torch
import torch.distributed.checkpoint as dcp
from bench import document, ending
from bench.checkpoint import crash_local
from bench.checkpoint.crash_local import Victim
from bench.checkpoint.crash_trainer import SIZE, TENSORS, state_of
from bench.document import OURS, Document, Row
from rich.console import Console

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)

_TRAINER = Path(__file__).parent / "bench" / "checkpoint" / "crash_trainer.py"
_PATIENCE_S = 120.0
_TITLES = {"crash": f"a save of {TENSORS * SIZE * 4 / 2**20:.0f} MiB without pause, killed with SIGKILL"}


class Mode(Enum):
    FILES = "files"
    """TorchAsyncCheckpoint's way: a file for each step."""
    DCP = "dcp"
    """A directory of torch.distributed.checkpoint, overwritten by each save."""
    LOCAL = "local"
    """Parts of four ranks on two pretended nodes, each part on both."""


@dataclass
class Findings:
    kills: dict[tuple[Mode, Victim], int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    in_flight: int = 0
    """Kills that interrupted a save."""
    leftovers: int = 0
    """Torn files that were found and removed."""

    def complain(self, what: str) -> None:
        self.complaints.append(what)
        click.echo(f"WRONG: {what}", err=True)


class CrashError(click.ClickException):
    """The trainer did not do what a trainer does."""


class Trainer:
    """A trainer process, and what it has said."""

    def __init__(self, folder: Path, mode: Mode, step: int) -> None:
        self.worker = 0
        self.save_s = 0.0
        """How long the last save took, its preparation included."""
        self._heard_at = 0.0
        self.committed = step
        self.attempted = step
        self._process = subprocess.Popen(
            [sys.executable, _TRAINER, folder, mode.value, str(step)], stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.split(maxsplit=2))
        self._lines.put([])

    def hear(self, word: str) -> bool:
        """Take lines in until one begins with ``word``; False at the end of the output."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE_S)
            except queue.Empty:
                raise CrashError(f"the trainer has not said {word!r} for {_PATIENCE_S:g} s") from None
            match line:
                case ["worker", pid]:
                    self.worker = int(pid)
                    self.attempted = max(self.attempted, self.committed) + 1
                case ["committed", step]:
                    self.committed = self.attempted = int(step)
                    now = time.monotonic()
                    self.save_s, self._heard_at = now - (self._heard_at or now), now
                case ["failed", step, _]:
                    self.attempted = int(step)
            if not line or line[0] == word:
                return bool(line)

    def kill(self, victim: Victim) -> None:
        """Kill one of the two with SIGKILL."""
        if victim is Victim.WORKER:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.worker, signal.SIGKILL)
        else:
            self.end()

    def end(self) -> None:
        """Kill the rank, and wait for the worker's end, too: it has the rank's standard output."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            while self.hear("nothing that it says"):
                pass


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="12 kills.")
@click.option("--kills", type=click.IntRange(1, 100_000), help="How many.  [default: 200]")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws victims and moments.")
@click.option("--json", "as_json", is_flag=True, help="Print the document instead of the table.")
def main(quick: bool, kills: int | None, seed: int, as_json: bool) -> None:
    """Kill, load, compare; exits 1 if a committed step was lost, or something torn was loaded."""
    ending.as_ctrl_c()
    date, machine = document.now(), document.describe_machine(f"torch {torch.__version__}")
    kills = kills or (12 if quick else 200)
    findings = Findings()
    for number, mode in enumerate(Mode):
        share = kills // len(Mode) + (number < kills % len(Mode))
        draw = random.Random(f"{seed} {mode.value}")
        with tempfile.TemporaryDirectory(prefix="nvrx-crash-", dir=Path.cwd()) as folder:
            if mode is Mode.LOCAL:
                note = partial(_note, findings, mode, share)
                for complaint in crash_local.strike(Path(folder), share, draw, note):
                    findings.complain(complaint)
            else:
                _strike(Path(folder), mode, share, draw, findings)
    result = Document("checkpoint_crash", machine, date, tuple(_rows(findings, kills)))
    if as_json:
        click.echo(result.to_json())
    else:
        Console().print(document.render(result, _TITLES))
    sys.exit(1 if findings.complaints else 0)


def _strike(folder: Path, mode: Mode, kills: int, draw: random.Random, findings: Findings) -> None:
    step = 0
    left = kills
    while left:
        with _training(folder, mode, step) as trainer:
            trainer.hear("committed")
            trainer.hear("committed")  # the second save shows how long one takes
            while left:
                # A rank's death costs the start of another trainer: two thirds of the kills are of workers.
                victim = draw.choice([Victim.RANK, Victim.WORKER, Victim.WORKER])
                threading.Event().wait(draw.uniform(0, 1.2 * trainer.save_s))  # the random moment
                trainer.kill(victim)
                left -= 1
                _note(findings, mode, kills, victim)
                if victim is Victim.RANK:
                    break
                trainer.hear("committed")
                trainer.hear("committed")
        step = _judge(folder, mode, trainer, findings)


def _note(findings: Findings, mode: Mode, kills: int, victim: Victim) -> None:
    key = mode, victim
    findings.kills[key] = findings.kills.get(key, 0) + 1
    done = sum(count for (where, _), count in findings.kills.items() if where is mode)
    click.echo(f"{mode.value}: {victim.value} killed, {kills - done} to go", err=True)


@contextlib.contextmanager
def _training(folder: Path, mode: Mode, step: int) -> Iterator[Trainer]:
    trainer = Trainer(folder, mode, step)
    try:
        yield trainer
    finally:
        trainer.end()


def _judge(folder: Path, mode: Mode, trainer: Trainer, findings: Findings) -> int:
    """Load what is there; complain if it is not a whole step, or older than the newest committed one."""
    place = folder / "dcp" if mode is Mode.DCP else folder
    findings.leftovers += len(storage.remove_leftovers(place))
    findings.in_flight += trainer.attempted > trainer.committed
    try:
        step = _newest_file(folder) if mode is Mode.FILES else _directory(place)
    except Exception as error:
        findings.complain(f"{mode.value}: not loadable: {error}")
        return trainer.attempted
    if step < trainer.committed:
        findings.complain(f"{mode.value}: step {trainer.committed} was committed, {step} was loaded")
    return max(step, trainer.attempted)


def _newest_file(folder: Path) -> int:
    for path in folder.glob("step_*.pt"):
        step = int(path.stem.partition("_")[2])
        _compare(storage.load(path), step)
    return max(int(path.stem.partition("_")[2]) for path in folder.glob("step_*.pt"))


def _directory(folder: Path) -> int:
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
    dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(folder), no_dist=True)
    step = int(loaded["0"][0].item()) // TENSORS
    _compare(loaded, step)
    return step


def _compare(loaded: dict[str, torch.Tensor], step: int) -> None:
    expected = state_of(step)
    if not all(torch.equal(loaded[name], tensor) for name, tensor in expected.items()):
        raise RuntimeError(f"what loads is not step {step} to the last bit")


def _rows(findings: Findings, kills: int) -> list[Row]:
    counts = {f"kills_of_{mode.value}_{victim.value}": n for (mode, victim), n in findings.kills.items()}
    counts |= {
        "saves_in_flight_when_the_rank_died": findings.in_flight,
        "torn_files_removed": findings.leftovers,
        "committed_steps_lost_or_torn": len(findings.complaints),
    }
    return [Row("crash", OURS, name, "", count, count, kills) for name, count in counts.items()]


if __name__ == "__main__":
    main()
