"""The NVSwitch fabric."""

from __future__ import annotations

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NvmlError
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "nvmlDeviceGetGpuFabricInfo"
_NOT_SUPPORTED, _COMPLETED = 0, 3
_STATES = {1: "has not begun", 2: "is in progress"}
_REMEDY = "restart nvidia-fabricmanager, and look at its log"


@check("gpu-fabric", stages=EVERY_STAGE, needs=(Need.NVML,), strikes=3)
def gpu_fabric(node: Node, settings: Settings) -> list[CheckResult]:
    """The fabric manager has registered every GPU.

    Reads the state of the GPU's registration with the NVSwitch fabric. One that has not completed, or
    completed with an error, is a fail: CUDA does not start there.
    """

    def look(gpu: int) -> list[CheckResult]:
        fabric = node.nvml.fabric(gpu)
        if fabric.state == _NOT_SUPPORTED or (fabric.state == _COMPLETED and fabric.status == 0):
            return []
        if fabric.state == _COMPLETED:
            evidence = f"fabric registration failed: {NvmlError(fabric.status)}"
        elif fabric.state in _STATES:
            evidence = f"fabric registration {_STATES[fabric.state]}"
        else:
            return []
        return [fail(evidence, _SIGNAL, name(gpu), remedy=_REMEDY)]

    return each_gpu(node, _SIGNAL, look)
