"""Are all network adapters there?"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.nics import CLASS, ports
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, skip
from nvrx_slurm.health.stage import EVERY_STAGE


class NicPresentSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        tuple[str, ...],
        msgspec.Meta(description="adapters or ports, as mlx5_0 or mlx5_0/1; beside the baseline's"),
    ] = ()


@check(
    "nic-present",
    stages=EVERY_STAGE,
    needs=(Need.SYSFS, Need.BASELINE),
    settings=NicPresentSettings,
    lane="nic",
)
def nic_present(node: Node, settings: NicPresentSettings) -> list[CheckResult]:
    """No InfiniBand, RoCE or EFA adapter is missing.

    Every port of the baseline, and every adapter or port that is configured, must be below
    /sys/class/infiniband. One that is not is a fail.
    """
    there = ports(node.tree)
    names = {port.name for port in there} | {port.device for port in there}
    known = node.baseline.ports if node.baseline is not None else {}
    wanted = dict.fromkeys([*settings.expected, *known])
    if not wanted:
        return [skip(f"{len(there)} ports; none is configured, and there is no baseline", CLASS)]
    missing = [
        fail(
            "has vanished" if name in known else "is not there",
            f"{CLASS}/{name.partition('/')[0]}",
            f"nic {name}",
            remedy="look for the adapter in lspci and the kernel log; reboot, replace it if it stays away",
            action=Action.REBOOT,
            node_lost=True,
        )
        for name in wanted
        if name not in names
    ]
    return missing or [ok(f"{len(there)} ports", CLASS)]
