"""Multi-instance mode."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail, skip
from nvrx_slurm.health.stage import NODE_STAGES

_SIGNAL = "nvmlDeviceGetMigMode"


class GpuMigSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: Annotated[
        bool | None, msgspec.Meta(description="whether MIG must be enabled; null: either is fine")
    ] = None


@check("gpu-mig", stages=NODE_STAGES, needs=(Need.NVML,), settings=GpuMigSettings)
def gpu_mig(node: Node, settings: GpuMigSettings) -> list[CheckResult]:
    """Multi-instance mode is as configured.

    Compares the current mode of every GPU with ``enabled``.
    """
    if settings.enabled is None:
        return [skip("nothing is configured: checks: gpu-mig: enabled", _SIGNAL)]

    def look(gpu: int) -> list[CheckResult]:
        enabled = node.nvml.mig_enabled(gpu)
        if enabled == settings.enabled:
            return []
        evidence = f"MIG is {'on' if enabled else 'off'}"
        remedy = f"nvidia-smi -i {gpu} -mig {int(not enabled)}, then reset the GPU"
        return [fail(evidence, _SIGNAL, name(gpu), remedy=remedy)]

    return each_gpu(node, _SIGNAL, look)
