"""What the commands of ``nvrx-health`` share."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvrx_slurm.health.config import HealthConfig
    from nvrx_slurm.health.node import JobContext, Node
    from nvrx_slurm.health.registry import Check

UNKNOWN = 3
"""Of Nagios; Click's 2 for wrong usage would mean that the node has failed."""


class Refused(click.ClickException):
    """One sentence, and the exit code that says that nothing is known of the node."""

    exit_code = UNKNOWN

    def show(self, file: object = None) -> None:
        click.echo(f"nvrx-health: {self.message}", err=True)


config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    help="The site's configuration.  [default: that of the hooks that run this, /etc/nvrx/health.yaml]",
)
state_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Where the baseline and what must be remembered are.  [default: state_dir of the configuration]",
)


def configured(path: Path | None) -> tuple[Mapping[str, Check], HealthConfig]:
    """Return all checks, and the site's configuration."""
    from nvrx_slurm.health.config import ConfigError, load_config
    from nvrx_slurm.health.registry import all_checks

    checks = all_checks()
    try:
        return checks, load_config(path or _beside_this_command(), checks)
    except ConfigError as error:
        raise Refused(str(error)) from error


def _beside_this_command() -> Path | None:
    """Return the configuration that install-hooks wrote, when this runs as its ``PREFIX/bin/nvrx-health``."""
    beside = Path(sys.argv[0]).parent.parent / "health.yaml"
    return beside if beside.exists() else None


def make_node(
    stage: str, config: HealthConfig, state_dir: Path | None, job: JobContext | None = None
) -> Node:
    """Return this node, for the job that Slurm's variables tell of unless given."""
    from nvrx_slurm.health.node import JobContext, Node, ScontrolClock
    from nvrx_slurm.health.stage import Stage
    from nvrx_slurm.health.state import StateDir

    node = Node(stage=Stage(stage), job=job or JobContext.from_environ(os.environ))
    name = os.environ.get("SLURMD_NODENAME")
    settings = config.hooks
    controller = ScontrolClock(
        scontrol=str(Path(settings.slurm_bin) / "scontrol"),
        slurm_conf=os.environ.get("SLURM_CONF") or settings.slurm_conf,
    )
    state = StateDir(state_dir or config.state_dir)
    return replace(node, host=name or node.host, controller=controller, state=state)
