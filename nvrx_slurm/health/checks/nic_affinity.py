"""A network adapter near every GPU."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import name
from nvrx_slurm.health.nics import ACTIVE, CLASS, ports
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NvmlError
from nvrx_slurm.health.pci import nearest
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, ok, skip, warn
from nvrx_slurm.health.stage import NODE_STAGES
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError

_PCI = "/sys/bus/pci/devices"


class NicAffinitySettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    map: Annotated[
        dict[int, str],
        msgspec.Meta(description="GPU index to adapter, as {0: mlx5_0}, where the PCI tree does not tell"),
    ] = msgspec.field(default_factory=dict)


@check("nic-affinity", stages=NODE_STAGES, needs=(Need.NVML, Need.SYSFS), settings=NicAffinitySettings)
def nic_affinity(node: Node, settings: NicAffinitySettings) -> list[CheckResult]:
    """Every GPU has an adapter near it that is up.

    From the places of GPUs and adapters in the PCI tree, or from ``map`` where that does not tell (GB200). A
    GPU whose near adapters are all down or missing is a warn: what is wrong with the adapter, nic-state says.
    """
    up = _up(node.tree)
    if not up and not settings.map:
        return [skip("there is no InfiniBand, RoCE or EFA adapter", CLASS)]
    near = {gpu: (nic,) for gpu, nic in settings.map.items()} or nearest(_gpus(node), _nics(node.tree, up))
    results = [
        warn(
            f"no adapter near it is up: {', '.join(nics) or 'there is none'}",
            "map of the configuration" if settings.map else _PCI,
            name(gpu),
            "look at these adapters, or give the right ones as map of nic-affinity in the configuration",
        )
        for gpu, nics in near.items()
        if not any(up.get(nic) for nic in nics)
    ]
    said = ", ".join(f"{name(gpu)}: {'/'.join(nics)}" for gpu, nics in near.items())
    return results or [ok(said or "no GPU", _PCI)]


def _up(tree: Tree) -> dict[str, bool]:
    """Return whether any port of each adapter is up."""
    found: dict[str, bool] = {}
    for port in ports(tree):
        try:
            active = port.state(tree) == ACTIVE
        except UnavailableError:
            active = False
        found[port.device] = found.get(port.device, False) or active
    return found


def _gpus(node: Node) -> dict[int, str]:
    found = {}
    for gpu in range(node.nvml.count()):
        try:
            found[gpu] = node.tree.resolve(f"{_PCI}/{node.nvml.pci_bus_id(gpu)}")
        except (NvmlError, UnavailableError):
            continue
    return found


def _nics(tree: Tree, names: dict[str, bool]) -> dict[str, str]:
    found = {}
    for nic in names:
        try:
            found[nic] = tree.resolve(f"{CLASS}/{nic}/device")
        except UnavailableError:
            continue
    return found
