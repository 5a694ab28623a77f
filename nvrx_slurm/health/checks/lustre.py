"""Lustre's own opinion."""

from __future__ import annotations

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError

_HEALTH = "/sys/fs/lustre/health_check"
_IMPORTS = "/proc/fs/lustre"
_CLIENTS = ("mdc", "osc")
_CONNECTED = ("FULL", "IDLE")
_REMEDY = "look at the Lustre client's messages in the kernel log, and at its servers; remount"


@check("lustre", stages=EVERY_STAGE, needs=(Need.SYSFS, Need.PROCFS), budget_s=5.0, strikes=2)
def lustre(node: Node, settings: Settings) -> list[CheckResult]:
    """Lustre is healthy, and connected to its servers.

    /sys/fs/lustre/health_check must say healthy; anything else is a fail. An import below /proc/fs/lustre
    that is neither FULL nor IDLE is a warn: the client may be reconnecting. Without Lustre it is skipped.
    """
    if not node.tree.exists(_HEALTH):
        return [skip("there is no Lustre client", _HEALTH)]
    said = node.tree.text(_HEALTH)
    if not said:
        raise UnavailableError("says nothing", _HEALTH, expected=True)
    results = []
    if said != "healthy":
        results.append(fail(f"says {said[:60]!r}", _HEALTH, remedy=_REMEDY))
    for path, state in _imports(node.tree).items():
        if state not in _CONNECTED:
            results.append(warn(f"import is {state[:20]}", path, remedy=_REMEDY))
    return results or [ok("healthy", _HEALTH)]


def _imports(tree: Tree) -> dict[str, str]:
    found = {}
    for kind in _CLIENTS:
        for target in tree.names(f"{_IMPORTS}/{kind}"):
            path = f"{_IMPORTS}/{kind}/{target}/import"
            try:
                lines = tree.text(path).splitlines()
            except UnavailableError:
                continue
            states = [line.partition(":")[2].strip() for line in lines if line.strip().startswith("state:")]
            if states:
                found[path] = states[0]
    return found
