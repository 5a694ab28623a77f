"""The example with checkpoints in memory: a killed rank costs steps, and no disk is read for them."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from harness import LocalJob, until

from nvrx_slurm import journal
from nvrx_slurm.checkpointing.local.space import file_system_type

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = ("--layers", "1", "--heads", "2", "--width", "16", "--batch", "2", "--block", "16")


def test_a_restart_loads_from_memory_outside_the_ranks(job: Callable[..., LocalJob], tmp_path: Path) -> None:
    run = job(
        "",
        arguments=(*TINY, "--steps=60", "--ckpt=local", "--ckpt-every=5", "--step-delay=0.1"),
        real_torch=True,
    )
    examples = tmp_path / "examples"
    shutil.copytree(REPOSITORY / "examples", examples)
    run.replace_script(examples / "train_gpt.py")
    run.start()
    ram, victim = Path(run.rank(0).environ()["NVRX_RAM_DIR"]), run.rank(1)
    run.wait_for(journal.CheckpointSaved)
    # Nothing moves while it is looked at.
    victim.suspend()
    parts = list(ram.rglob("iter_*_local.pt"))
    assert parts
    assert file_system_type(ram) == "tmpfs"
    saved = max(event.step for event in run.events(journal.CheckpointSaved))
    victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    (loaded,) = run.events(journal.CheckpointLoaded)
    assert loaded.layer == "local"
    assert loaded.step >= saved
    losses = run.run_dir / "train" / "loss.jsonl"
    steps = [json.loads(line)["step"] for line in losses.read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 61))
    assert list(losses.parent.iterdir()) == [losses]  # no checkpoint on disk
    until("memory is given back", lambda: not ram.exists())
    assert run.nothing_is_left()
