"""Clocks held down by the hardware."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import Throttle
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, warn
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "nvmlDeviceGetCurrentClocksThrottleReasons"
_REMEDY = "look at cooling, power cables and power supplies of the node"


class GpuThrottleSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    severity: Annotated[
        Literal["warn", "fail"], msgspec.Meta(description="what a GPU that is held down is")
    ] = "warn"


@check("gpu-throttle", stages=EVERY_STAGE, needs=(Need.NVML,), settings=GpuThrottleSettings, strikes=3)
def gpu_throttle(node: Node, settings: GpuThrottleSettings) -> list[CheckResult]:
    """No GPU is slowed down by heat or by its power supply.

    Reads the reasons for the current clocks: hardware slowdown, thermal slowdown, power brake. Being idle, a
    power cap and clocks that somebody has set are none of them.
    """

    def look(gpu: int) -> list[CheckResult]:
        reasons = node.nvml.throttle_reasons(gpu)
        seen = [reason for reason in Throttle if reasons & reason]
        if not seen:
            return []
        said = ", ".join((reason.name or "").replace("_", " ").lower() for reason in seen)
        signal = f"{_SIGNAL} = {reasons:#x}"
        if settings.severity == "fail":
            return [fail(said, signal, name(gpu), remedy=_REMEDY)]
        return [warn(said, signal, name(gpu), _REMEDY)]

    return each_gpu(node, _SIGNAL, look)
