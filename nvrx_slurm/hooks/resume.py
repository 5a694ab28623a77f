"""Returning a node to service: only one that we have drained, and only when nothing fails there any more."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.health import strikes
from nvrx_slurm.health.config import HealthConfig
from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.reasons import Reason
from nvrx_slurm.health.registry import Check
from nvrx_slurm.health.report import examine, select
from nvrx_slurm.health.result import Status
from nvrx_slurm.health.take_baseline import remember_baseline
from nvrx_slurm.health.text import line, summary
from nvrx_slurm.hooks.brake import our_reason
from nvrx_slurm.slurm.administration import NodeAdmin
from nvrx_slurm.slurm.client import SlurmRefusedError, SlurmUnavailableError

_REMOTE_S = 180.0
REFUSED = 3
"""The exit code of a resume that leaves the node as it is."""


class RefusedError(RuntimeError):
    """The node stays as it is; the message says why."""


@dataclass(frozen=True)
class Resumption:
    """One node's way back.

    Args:
        say: tells the person who waits.
    """

    name: str
    admin: NodeAdmin
    node: Node
    checks: Mapping[str, Check]
    config: HealthConfig
    say: Callable[[str], None]

    def require_ours(self) -> Reason:
        """Return why we have drained it.

        Raises:
            RefusedError: it is not drained, somebody else has done it, or Slurm can't be asked.
        """
        try:
            nodes = {record.name: record for record in self.admin.node_records()}
        except SlurmUnavailableError as error:
            raise RefusedError(f"Slurm could not be asked: {error}") from error
        record = nodes.get(self.name)
        if record is None:
            raise RefusedError(f"Slurm does not know node {self.name}")
        if not record.drained:
            raise RefusedError(f"node {self.name} is not drained: it is {record.state}")
        reason = our_reason(record)
        if reason is None:
            raise RefusedError(
                f"node {self.name} was drained by {record.set_by or 'somebody'}, not by these checks, for: "
                f"{record.reason}; whoever did so resumes it, with scontrol"
            )
        return reason

    def run(self, *, repaired: bool) -> None:
        """Check this node, and return it to service.

        Args:
            repaired: what is there now is what is expected from now on; it is checked after that.

        Raises:
            RefusedError: something fails, or Slurm refuses.
        """
        drained_for = self.require_ours()
        node = replace(self.node, job=JobContext())
        if repaired and (why := remember_baseline(node)):
            raise RefusedError(f"no new baseline: {why}")
        chosen = select(self.checks, node.stage, self.config)
        extra = self.checks.get(drained_for.check)
        if extra is not None and extra not in chosen and self.config.of(extra).mode != "off":
            chosen.append(extra)
        report = examine(chosen, replace(node), self.config)
        for result in report.results:
            if result.status in (Status.WARN, Status.FAIL):
                self.say(line(result))
        self.say(summary(report))
        if report.status is Status.FAIL or strikes.pending(node.state):
            hint = "" if repaired else "; where that is an old count or log, and repaired, say --repaired"
            raise RefusedError(f"node {self.name} stays drained: something still fails{hint}")
        self._return()
        if not repaired and (why := remember_baseline(replace(node))):
            self.say(f"no new baseline: {why}")

    def _return(self) -> None:
        # Somebody may have given another reason while the checks were running.
        drained_for = self.require_ours()
        try:
            self.admin.resume(self.name)
        except (SlurmRefusedError, SlurmUnavailableError) as error:
            raise RefusedError(f"Slurm does not resume node {self.name}: {error}") from error
        self.say(f"node {self.name} is back in service; it was drained for {drained_for}")


def elsewhere(via: str, node: str, command: Sequence[str]) -> int:
    """Run our ``command`` on another node; return its exit code.

    Args:
        via: such as ``ssh``, with its options.

    Raises:
        RefusedError: it can't be run, takes too long, or ends with another code than ours: 0 or 3.
    """
    try:
        words = shlex.split(via)
    except ValueError as error:
        raise RefusedError(f"--via {via!r}: {error}") from error
    if not words:
        raise RefusedError("--via: a command is needed, such as ssh")
    argv = [*words, node, shlex.join(command)]
    try:
        code = subprocess.run(argv, timeout=_REMOTE_S, check=False, stdin=subprocess.DEVNULL).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RefusedError(f"`{shlex.join(argv)}`: {error}") from error
    if code not in (0, REFUSED):
        raise RefusedError(
            f"`{shlex.join(argv)}` ended with code {code}: node {node} was not looked at, or not to the end"
        )
    return code
