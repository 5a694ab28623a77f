"""The GPU of this rank as NVML numbers it, and the network adapters next to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache

from nvrx_slurm.health.nics import CLASS, Port, ports
from nvrx_slurm.health.nvml import Nvml, NvmlError, RealNvml
from nvrx_slurm.health.pci import nearest
from nvrx_slurm.health.tree import Tree
from nvrx_slurm.health.unavailable import UnavailableError

_PCI = "/sys/bus/pci/devices"
_log = logging.getLogger(__name__)


@cache
def this_node() -> Nvml | None:
    """Return this node's GPUs; None, said once in the log, where there is no driver or it does not answer."""
    try:
        return RealNvml()
    except (UnavailableError, NvmlError) as error:
        _log.info("GPUs are not looked at at a restart: %s", error)
        return None


def own_index(nvml: Nvml, environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the NVML index of this rank's GPU, by LOCAL_RANK and CUDA_VISIBLE_DEVICES; None: not told.

    Raises:
        NvmlError: the GPUs can't be asked for their names.
    """
    text = environ.get("LOCAL_RANK", "")
    if not (text.isascii() and text.isdigit()):
        return None
    local_rank, count = int(text), nvml.count()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    visible = [str(gpu) for gpu in range(count)] if listed is None else listed.replace(" ", "").split(",")
    if len(visible) == 1:
        local_rank = 0  # every rank sees its own alone
    if local_rank >= len(visible):
        return None
    chosen = visible[local_rank]
    if chosen.isascii() and chosen.isdigit():
        return int(chosen) if int(chosen) < count else None
    found = [gpu for gpu in range(count) if chosen.startswith("GPU-") and nvml.uuid(gpu).startswith(chosen)]
    return found[0] if len(found) == 1 else None


def near_ports(nvml: Nvml, gpu: int, tree: Tree) -> list[Port]:
    """Return the ports of the adapters that share most of the way to the processor with a GPU.

    Raises:
        NvmlError: the GPU does not tell its place.
        UnavailableError: nor does sysfs.
    """
    there = ports(tree)
    nics = {port.device: tree.resolve(f"{CLASS}/{port.device}/device") for port in there}
    near = nearest({gpu: tree.resolve(f"{_PCI}/{nvml.pci_bus_id(gpu)}")}, nics)[gpu]
    return [port for port in there if port.device in near]
