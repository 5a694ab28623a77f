"""GPU memory that a job left behind."""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import CheckResult, fail
from nvrx_slurm.health.stage import Stage

_SIGNAL = "nvmlDeviceGetMemoryInfo"
_MIB = 1 << 20


class GpuMemorySettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    left_mib: Annotated[
        int, msgspec.Meta(ge=0, description="MiB in use beyond the baseline that are still no finding")
    ] = 512


@check(
    "gpu-memory",
    stages=(Stage.PROLOG, Stage.EPILOG),
    needs=(Need.NVML, Need.BASELINE),
    settings=GpuMemorySettings,
    strikes=3,
)
def gpu_memory(node: Node, settings: GpuMemorySettings) -> list[CheckResult]:
    """The job's GPUs have their memory free.

    Memory in use on a GPU without processes, beyond what was in use at the baseline. With processes on it,
    gpu-processes speaks.
    """
    baseline = node.baseline_of_this_boot
    known = baseline.gpu_memory_used if baseline is not None else {}

    def look(gpu: int) -> list[CheckResult]:
        if node.nvml.processes(gpu):
            return []
        beyond = node.nvml.memory(gpu).used - known.get(node.nvml.uuid(gpu), 0)
        if beyond <= settings.left_mib * _MIB:
            return []
        evidence = f"{beyond // _MIB} MiB in use by no process"
        return [fail(evidence, _SIGNAL, name(gpu), remedy="reset the GPU")]

    return each_gpu(node, _SIGNAL, look, node.job.gpus)
