"""Are all GPUs there?"""

from __future__ import annotations

from typing import Annotated

import msgspec

from nvrx_slurm.health.node import Node
from nvrx_slurm.health.nvml import Nvml, NvmlError
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
    Fewer is a fail. A GPU that is listed and does not tell its UUID is not missing. Inside a job NVML sees
    only the job's GPUs, so there the configured number does not count. GPUs on the PCI bus that NVML does not
    list are a warn.
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
    if wanted is not None and count < wanted and not any(_mig_enabled(nvml, gpu) for gpu in range(count)):
        return [_missing(f"{count} GPUs where {wanted} are expected")]
    uuids = [_uuid(nvml, gpu) for gpu in range(count)]
    silent = uuids.count(None)
    gone = sorted(set(known or ()) - set(uuids))
    if len(gone) > silent:
        of = f"{len(gone) - silent} of " if silent else ""
        return [_missing(f"{of}{', '.join(gone)} of the baseline {'is' if len(gone) == 1 else 'are'} gone")]
    if silent:
        return [ok(f"{count} GPUs, {silent} of which can't be read: see gpu-lost", _SIGNAL)]
    on_bus = _on_pci_bus(node)
    if node.stage is not Stage.RESTART and on_bus > count:
        return [warn(f"the PCI bus shows {on_bus} GPUs, NVML {count}", _PCI, remedy=_REMEDY)]
    return [ok(f"{count} GPUs", _SIGNAL)]


def _uuid(nvml: Nvml, gpu: int) -> str | None:
    try:
        return nvml.uuid(gpu)
    except NvmlError:
        return None


def _mig_enabled(nvml: Nvml, gpu: int) -> bool:
    try:
        return nvml.mig_enabled(gpu)
    except NvmlError:
        return False


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
