"""Device nodes that must be there."""

from __future__ import annotations

import stat
from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "stat"


class DevicesSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    required: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="device nodes, as /dev/nvidia0, /dev/infiniband/uverbs0, /dev/gdrdrv"),
    ] = ()


@check("devices", stages=EVERY_STAGE, needs=(Need.FILE_SYSTEMS,), settings=DevicesSettings, lane="host")
def devices(node: Node, settings: DevicesSettings) -> list[CheckResult]:
    """Every required device node is there.

    Looks whether each is a character or block device. A missing one is a fail, anything else in its place
    too; one that this user may not look at is a warn.
    """
    if not settings.required:
        return [skip("nothing is configured: checks: devices: required", _SIGNAL)]
    results = []
    for path in settings.required:
        scope = f"device {path}"
        try:
            mode = node.tree.at(path).stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            results.append(_fail("is not there", scope))
        except OSError as error:
            results.append(warn(f"can't be looked at: {error.strerror}", _SIGNAL, scope))
        else:
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                results.append(_fail("is no device", scope))
    return results or [ok(f"{len(settings.required)} device nodes", _SIGNAL)]


def _fail(evidence: str, scope: str) -> CheckResult:
    remedy = "load the device's driver again (for a GPU: nvidia-modprobe -u), or reboot"
    return fail(evidence, _SIGNAL, scope, remedy=remedy, action=Action.REBOOT, node_lost=True)
