"""Uncorrectable memory errors."""

from __future__ import annotations

from nvrx_slurm.health.gpus import each_gpu, name
from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NOT_THERE, NvmlError
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail
from nvrx_slurm.health.stage import EVERY_STAGE

_SIGNAL = "nvmlDeviceGetTotalEccErrors(uncorrected, volatile)"
_RETIRED = "nvmlDeviceGetRetiredPagesPendingStatus"


@check("gpu-ecc", stages=EVERY_STAGE, needs=(Need.NVML, Need.BASELINE))
def gpu_ecc(node: Node, settings: Settings) -> list[CheckResult]:
    """No uncorrectable memory error since the baseline.

    Reads the volatile counter of uncorrected errors, which begins anew when the GPU is reset. More than in
    the baseline of this boot, or more than 0 without one, is a fail; so are retired pages that wait for a
    reset (GPUs before Ampere). Corrected errors are not counted: they harm nobody.
    """
    baseline = node.baseline_of_this_boot
    known = baseline.uncorrected_ecc if baseline is not None else {}

    def look(gpu: int) -> list[CheckResult]:
        found = []
        errors = node.nvml.uncorrected_ecc(gpu)
        before = known.get(node.nvml.uuid(gpu), 0)
        if errors > before:
            found.append(
                _fail(f"{errors - before} uncorrectable memory errors", f"{_SIGNAL} = {errors}", gpu)
            )
        if _retired_pending(node, gpu):
            found.append(_fail("retired memory pages wait for a reset", _RETIRED, gpu))
        return found

    return each_gpu(node, _SIGNAL, look)


def _fail(evidence: str, signal: str, gpu: int) -> CheckResult:
    remedy = "reset the GPU; replace it if errors come back"
    return fail(evidence, signal, name(gpu), remedy=remedy, action=Action.RESET)


def _retired_pending(node: Node, gpu: int) -> bool:
    try:
        return node.nvml.retired_pages_pending(gpu)
    except NvmlError as error:
        if error.code in NOT_THERE:
            return False
        raise
