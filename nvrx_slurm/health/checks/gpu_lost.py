"""Does every GPU answer?"""

from __future__ import annotations

from nvrx_slurm.health.gpus import LOST, each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NvmlCode, NvmlError
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "nvmlDeviceGetUUID, nvmlDeviceGetMemoryInfo"


@check("gpu-lost", stages=EVERY_STAGE, needs=(Need.NVML,))
def gpu_lost(node: Node, settings: Settings) -> list[CheckResult]:
    """No GPU has fallen off the bus.

    Asks each GPU for its UUID and memory. NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED are fails,
    every other error is a warn.
    """

    def look(gpu: int) -> list[CheckResult]:
        try:
            node.nvml.uuid(gpu)
            node.nvml.memory(gpu)
        except NvmlError as error:
            if error.code not in LOST:
                raise
            lost = error.code == NvmlCode.GPU_IS_LOST
            evidence = "fallen off the bus" if lost else "must be reset before it works again"
            return [
                fail(
                    evidence,
                    f"{_SIGNAL}: {error}",
                    name(gpu),
                    remedy="reboot; replace the GPU if it happens again" if lost else "reset the GPU",
                    action=Action.REBOOT if lost else Action.RESET,
                    node_lost=True,
                )
            ]
        return []

    return each_gpu(node, _SIGNAL, look)
