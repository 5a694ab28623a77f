"""Memory errors that the processor's memory controller counts."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.unavailable import UnavailableError

_EDAC = "/sys/devices/system/edac/mc"


class EdacSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    corrected: Annotated[
        int, msgspec.Meta(ge=0, description="more corrected errors of one controller since boot are a warn")
    ] = 10_000


@check("edac", stages=EVERY_STAGE, needs=(Need.SYSFS,), settings=EdacSettings, lane="host")
def edac(node: Node, settings: EdacSettings) -> list[CheckResult]:
    """The node's memory has no uncorrectable error since boot.

    Reads ue_count and ce_count of every memory controller below /sys/devices/system/edac. An uncorrectable
    error is a fail.
    """
    controllers = [name for name in node.tree.names(_EDAC) if name.startswith("mc") and name[2:].isdigit()]
    if not controllers:
        return [skip("the kernel counts no memory errors here", _EDAC)]
    results = []
    for name in controllers:
        try:
            uncorrected = node.tree.number(f"{_EDAC}/{name}/ue_count")
            corrected = node.tree.number(f"{_EDAC}/{name}/ce_count")
        except UnavailableError as error:
            results.append(warn(f"can't be read: {error.why}", error.signal, f"memory {name}"))
            continue
        remedy = "replace the memory module that the kernel log or the BMC names"
        if uncorrected > 0:
            evidence = f"{uncorrected} uncorrectable errors since boot"
            signal = f"{_EDAC}/{name}/ue_count"
            results.append(fail(evidence, signal, f"memory {name}", remedy=remedy, action=Action.ISOLATE))
        elif corrected > settings.corrected:
            evidence = f"{corrected} corrected errors since boot"
            results.append(warn(evidence, f"{_EDAC}/{name}/ce_count", f"memory {name}", remedy))
    return results or [ok(f"{len(controllers)} memory controllers", _EDAC)]
