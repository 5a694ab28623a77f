"""What the dev cluster asks its own Slurm.

Every answer can be "could not be asked", which is None here and never means that a node is well or gone.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from pathlib import Path

from nvrx_slurm.devcluster.errors import DevClusterError

_TIMEOUT_S = 15.0
_FIELD = re.compile(r"(?:^| )(State|SlurmdStartTime)=(\S+)")
_REASON = re.compile(r" Reason=(.*?)(?: \[[^\]]*\])?(?= \w+=|\s*$)")


@dataclasses.dataclass(frozen=True)
class NodeInfo:
    """One node as slurmctld sees it."""

    name: str
    state: str
    """As ``scontrol show node`` prints it, in lower case: ``idle``, ``down*+drain`` …"""
    registered: int
    """When its slurmd last started, in seconds since the epoch; 0 before the first time."""
    reason: str

    @property
    def base(self) -> str:
        return re.split(r"[^a-z]", self.state)[0]

    @property
    def responds(self) -> bool:
        return "*" not in self.state and "not_responding" not in self.state


def parse_nodes(text: str) -> dict[str, NodeInfo]:
    """Read ``scontrol -o show nodes`` with times in seconds: one line per node."""
    nodes = {}
    for line in text.splitlines():
        name = re.match(r"NodeName=(\S+)", line)
        if name is None:
            continue
        fields = dict(_FIELD.findall(line))
        started = fields.get("SlurmdStartTime", "")
        reason = _REASON.search(line)
        nodes[name[1]] = NodeInfo(
            name=name[1],
            state=fields.get("State", "unknown").lower(),
            registered=int(started) if started.isdigit() else 0,
            reason=reason[1] if reason else "",
        )
    return nodes


class SlurmClient:
    """Slurm's own commands against one slurm.conf."""

    def __init__(self, slurm_conf: Path) -> None:
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "SLURM_TIME_FORMAT": "%s",
            "SLURM_CONF": str(slurm_conf),
        }

    def nodes(self) -> dict[str, NodeInfo] | None:
        """Every node; None when slurmctld could not be asked."""
        done = self._run("scontrol", "-o", "show", "nodes")
        return parse_nodes(done.stdout) if done is not None and done.returncode == 0 else None

    def resume(self, node: str) -> bool:
        """Ask for a node that is DOWN to be put back into service.

        Returns:
            Whether slurmctld did. It refuses when the node has just come back by itself.
        """
        return self._update(node, "State=RESUME") == ""

    def report_lost(self, node: str) -> None:
        """Tell slurmctld now what it would find out after SlurmdTimeout: the node is DOWN.

        Raises:
            DevClusterError: slurmctld does not do it.
        """
        why_not = self._update(node, "State=DOWN", "Reason=booted after a power loss")
        if why_not:
            raise DevClusterError(f"slurmctld does not take down the lost node {node}: {why_not}")

    def _update(self, node: str, *changes: str) -> str:
        """Why slurmctld did not do it; empty when it did."""
        done = self._run("scontrol", "update", f"NodeName={node}", *changes)
        if done is None:
            return "it does not answer"
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"

    def _run(self, *argv: str) -> subprocess.CompletedProcess[str] | None:
        try:
            return subprocess.run(
                argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, OSError):
            return None
