"""``--help`` of the commands that start ranks."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import launch, srun
from nvrx_slurm.cli.help_sections import OTHER


@pytest.mark.parametrize("command", [srun.main, launch.main], ids=["nvrx-srun", "nvrx-launch"])
def test_every_option_is_listed_once_in_a_section(command: click.Command) -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=200).output
    lines = [line.split()[0].rstrip(",") for line in shown.splitlines() if line.startswith("  -")]
    assert len(lines) == len(set(lines))
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert len(lines) == len(options) + 1, "and --help"
    beyond = shown.partition(f"{OTHER}:\n")[2]
    assert beyond.split() == ["-h,", "--help", "Show", "this", "message", "and", "exit."]
