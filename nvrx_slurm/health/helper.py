"""Checks on request, for a process that must not be held up by them: a line in, a report out.

Every line on standard input is a request, every line on standard output its answer. An agent keeps one
beside a job's ranks: it starts once, runs at low priority, and what hangs or crashes does so in here. It ends
with its input.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from nvrx_slurm.health.config import ConfigError, HealthConfig, load_config
from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.registry import all_checks
from nvrx_slurm.health.report import HealthReport, examine, select
from nvrx_slurm.health.result import Status
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.state import StateDir
from nvrx_slurm.health.take_baseline import remember_baseline

_NICENESS = 10


class Answer(msgspec.Struct, frozen=True):
    """One line of output."""

    report: HealthReport | None = None
    interval_s: float = 0.0
    """When to ask again, if nothing happens."""
    error: str = ""
    """Why there is no report, and never will be one."""


@dataclass
class Helper:
    """Looks at ``node`` whenever it is asked to."""

    node: Node
    config: HealthConfig
    _has_baseline: bool = False

    def look(self) -> HealthReport:
        """Run the checks of the stage."""
        # A node remembers what it has read once, such as the baseline.
        node = replace(self.node)
        return examine(select(all_checks(), node.stage, self.config), node, self.config)

    def remember(self, report: HealthReport) -> None:
        """Make what the first good look has seen the baseline of the later ones."""
        if not self._has_baseline and report.status is not Status.FAIL:
            remember_baseline(replace(self.node))
            self._has_baseline = True


def serve(helper: Helper, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer every line, until there are no more."""
    for number, _ in enumerate(requests):
        if number == 1:
            # The job waits for the first look; later ones run beside its training.
            os.nice(_NICENESS)
        report = helper.look()
        answers.write(msgspec.json.encode(Answer(report, helper.config.job_interval_s)) + b"\n")
        answers.flush()
        helper.remember(report)


def main() -> None:
    """Serve with the configuration and the state directory that the last two arguments name."""
    config, state_dir = sys.argv[-2:]
    with contextlib.suppress(OSError):
        # For ps(1) and top(1).
        Path("/proc/self/comm").write_text("nvrx-health")
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        loaded = load_config(Path(config) if config else None, all_checks())
    except ConfigError as error:
        answers.write(msgspec.json.encode(Answer(error=str(error))) + b"\n")
        return
    with contextlib.suppress(ImportError):
        # Once here instead of in every child; the library itself is not opened by that.
        import pynvml  # noqa: F401
    node = Node(
        stage=Stage.RESTART,
        state=StateDir(Path(state_dir)),
        job=JobContext.from_environ(os.environ),
    )
    serve(
        Helper(replace(node, host=os.environ.get("SLURMD_NODENAME") or node.host), loaded), requests, answers
    )
