"""The GPU's PCIe link."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_WIDTH = "nvmlDeviceGetCurrPcieLinkWidth"
_SPEED = "nvmlDeviceGetCurrPcieLinkGeneration"
_REMEDY = "reseat the GPU or its riser; reboot"


class GpuPcieSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    load_percent: Annotated[
        int, msgspec.Meta(ge=1, le=100, description="the link's speed is looked at from this utilization on")
    ] = 50


@check("gpu-pcie", stages=EVERY_STAGE, needs=(Need.NVML,), settings=GpuPcieSettings, strikes=2)
def gpu_pcie(node: Node, settings: GpuPcieSettings) -> list[CheckResult]:
    """The PCIe link has its full width, and under load its full speed.

    Fewer lanes than GPU and slot can do is a fail. A lower generation is a warn, and only on a GPU that
    works: idle ones lower it to save power.
    """

    def look(gpu: int) -> list[CheckResult]:
        link = node.nvml.pcie_link(gpu)
        if 0 < link.width < link.max_width:
            return [fail(f"x{link.width} of x{link.max_width} lanes", _WIDTH, name(gpu), remedy=_REMEDY)]
        if 0 < link.generation < link.max_generation and node.nvml.utilization(gpu) >= settings.load_percent:
            evidence = f"generation {link.generation} of {link.max_generation} under load"
            return [warn(evidence, _SPEED, name(gpu), _REMEDY)]
        return []

    return each_gpu(node, f"{_WIDTH}, {_SPEED}", look)
