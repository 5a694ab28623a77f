"""How far checkpoints have come, as their directory shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.attribution.checkpoint_dir import newest_checkpoint
from nvrx_slurm.cli.attribute import main

LAYOUTS: dict[str, tuple[dict[str, str], int | None]] = {
    "nothing": ({}, None),
    "Megatron-LM": ({"latest_checkpointed_iteration.txt": "100\n", "iter_0000200/model.pt": ""}, 100),
    "Megatron-LM, a release": ({"latest_checkpointed_iteration.txt": "release"}, None),
    "DeepSpeed": (
        {"latest": "global_step120", "global_step120/states.pt": "", "global_step140/s.pt": ""},
        120,
    ),
    "torch.distributed.checkpoint": (
        {"step-40/.metadata": "", "step-50/__0_0.distcp": "", "step-9/.metadata": ""},
        40,
    ),
    "transformers": ({"checkpoint-500/trainer_state.json": "", "checkpoint-1000/model.safetensors": ""}, 500),
    "Lightning": ({"epoch=1-step=300.ckpt": "", "epoch=2-step=450.ckpt": "", "last.ckpt": ""}, 450),
    "single files": (
        {"step_10.pt": "", "step_20.pt.tmp": "", ".step_30.pt": "", "notes_step_99.txt": ""},
        10,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_newest_complete_checkpoint_of_each_framework_is_found(tmp_path: Path, layout: str) -> None:
    files, step = LAYOUTS[layout]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert newest_checkpoint(tmp_path) == step


def test_a_link_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "real.pt").touch()
    (tmp_path / "step_10.pt").symlink_to(tmp_path / "real.pt")
    assert newest_checkpoint(tmp_path) is None


def test_the_command_shows_it_and_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED DUE TO TIME LIMIT ***\n"
    )
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "step_70.pt").touch()
    command = ["log", str(tmp_path / "job.log"), "--json", "--checkpoint-dir"]
    shown = CliRunner().invoke(main, [*command, str(tmp_path / "ckpt")])
    assert json.loads(shown.stdout)["progress"]["last_checkpoint_step"] == 70
    refused = CliRunner().invoke(main, [*command, str(tmp_path / "none")])
    assert refused.exit_code == 2
    assert "No such file" in refused.output
