"""Do driver and library fit?"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import NvmlCode, NvmlError
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, warn
from nvrx_slurm.health.stage import EVERY_STAGE
from nvrx_slurm.health.unavailable import UnavailableError


class GpuDriverSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        str,
        msgspec.Meta(max_length=40, description="beginning of the driver's version, as 570.; warn if not"),
    ] = ""


@check("gpu-driver", stages=EVERY_STAGE, needs=(Need.NVML,), settings=GpuDriverSettings)
def gpu_driver(node: Node, settings: GpuDriverSettings) -> list[CheckResult]:
    """The driver answers, and its library is of the same version.

    ``nvmlInit`` with NVML_ERROR_LIB_RM_VERSION_MISMATCH is a fail: the driver was updated under a loaded
    kernel module, and no CUDA program starts. Any other error of nvmlInit is a warn.
    """
    try:
        version = node.nvml.driver_version()
    except UnavailableError as error:
        cause = error.__cause__
        if isinstance(cause, NvmlError) and cause.code == NvmlCode.LIB_RM_VERSION_MISMATCH:
            return [
                fail(
                    "the driver's library and its kernel module are of different versions",
                    "nvmlInit: NVML_ERROR_LIB_RM_VERSION_MISMATCH",
                    remedy="reload the nvidia kernel module, or reboot",
                    action=Action.REBOOT,
                )
            ]
        raise
    signal = "nvmlSystemGetDriverVersion"
    if not version.startswith(settings.expected):
        evidence = f"driver {version[:40]}, not {settings.expected}"
        return [warn(evidence, signal, remedy="install the driver that the other nodes have")]
    return [ok(f"driver {version[:40]}", signal)]
