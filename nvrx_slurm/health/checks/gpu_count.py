"""Are all GPUs there?"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.registry import Need, Settings, check
from nvrx_slurm.health.result import Action, CheckResult, fail, ok, skip, warn
from nvrx_slurm.health.stage import EVERY_STAGE, Stage
from nvrx_slurm.health.unavailable import UnavailableError

_SIGNAL = "nvmlDeviceGetCount"
_PCI = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
_REMEDY = "look for the GPU in lspci and the kernel log; reboot, and if it stays away replace it"


class GpuCountSettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    expected: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=64)] | None,
        msgspec.Meta(description="GPUs of this node; null: as in the baseline"),
    ] = None


@check("gpu-count", stages=EVERY_STAGE, needs=(Need.NVML, Need.BASELINE), settings=GpuCountSettings)
def gpu_count(node: Node, settings: GpuCountSettings) -> list[CheckResult]:
    """All GPUs of the node are there.

    Compares NVML's list with the configuration, with what Slurm gave the job, and with the baseline's UUIDs.
    Fewer is a fail. Inside a job NVML sees only the job's GPUs, so there the configured number does not
    count. GPUs on the PCI bus that NVML does not list are a warn.
    """
    wanted = node.job.gpu_count if node.stage is Stage.RESTART else settings.expected
    known = node.baseline.gpus if node.baseline is not None else None
    try:
        nvml = node.nvml
    except UnavailableError as error:
        if wanted or known:
            raise UnavailableError(error.why, error.signal, expected=True) from error
        raise
    count = nvml.count()
    if count == 0 and not wanted and not known:
        return [skip("the driver lists no GPU, and none is expected", _SIGNAL)]
    if wanted is not None and count < wanted and not any(nvml.mig_enabled(gpu) for gpu in range(count)):
        return [_missing(f"{count} GPUs where {wanted} are expected")]
    present = {nvml.uuid(gpu) for gpu in range(count)}
    if gone := sorted(set(known or ()) - present):
        return [_missing(f"{', '.join(gone)} of the baseline {'is' if len(gone) == 1 else 'are'} gone")]
    on_bus = _on_pci_bus(node)
    if node.stage is not Stage.RESTART and on_bus > count:
        return [warn(f"the PCI bus shows {on_bus} GPUs, NVML {count}", _PCI, remedy=_REMEDY)]
    return [ok(f"{count} GPUs", _SIGNAL)]


def _missing(evidence: str) -> CheckResult:
    return fail(evidence, _SIGNAL, remedy=_REMEDY, action=Action.REBOOT, node_lost=True)


def _on_pci_bus(node: Node) -> int:
    count = 0
    for device in node.tree.names(_PCI):
        try:
            vendor = node.tree.text(f"{_PCI}/{device}/vendor")
            kind = node.tree.text(f"{_PCI}/{device}/class")
        except UnavailableError:
            continue
        count += vendor == _NVIDIA and kind[:6] in _GPU_CLASSES
    return count
