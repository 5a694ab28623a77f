"""Row remapping."""

from __future__ import annotations

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, warn
from nvrx_slurm.health.stage import EVERY_STAGE, Stage

_SIGNAL = "nvmlDeviceGetRemappedRows"


@check("gpu-row-remap", stages=EVERY_STAGE, needs=(Need.NVML,))
def gpu_row_remap(node: Node, settings: Settings) -> list[CheckResult]:
    """Bad memory rows could be remapped.

    A failed remapping is a fail: the GPU has no spare row left. One that waits for a reset is a fail between
    jobs, and a warn inside a job, whose processes do not get the bad row.
    """

    def look(gpu: int) -> list[CheckResult]:
        rows = node.nvml.remapped_rows(gpu)
        if rows.failure:
            remedy = "replace the GPU"
            return [fail("row remap failed", _SIGNAL, name(gpu), remedy=remedy, action=Action.ISOLATE)]
        if not rows.pending:
            return []
        evidence, remedy = "a row remap waits for a reset", "reset the GPU"
        if node.stage is Stage.RESTART:
            return [warn(evidence, _SIGNAL, name(gpu), remedy)]
        return [fail(evidence, _SIGNAL, name(gpu), remedy=remedy, action=Action.RESET)]

    return each_gpu(node, _SIGNAL, look)
