"""Where this node is in the network, in which NVLink domain its GPUs are, and with whom it is replaced."""

from __future__ import annotations

import ctypes
import importlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nvrx_slurm.wire.messages import NodeLocation

DOMAIN_VARIABLE = "NVRX_DOMAIN_ID"
GROUP_VARIABLE = "NVRX_REPLACEMENT_GROUP_ID"

_PLACEHOLDERS = ("", "none", "null", "n/a", "[n/a]", "unknown", "not supported")
_ONE_DIGIT = re.compile(r"([0-9a-f])\1*", re.IGNORECASE)


class DomainError(RuntimeError):
    """The node's NVLink domain can't be found out; the message says why."""


@dataclass(frozen=True)
class GpuFabric:
    """What NVML tells of one GPU's place in the NVLink fabric (``nvmlGpuFabricInfo_v2_t``)."""

    cluster_uuid: str
    clique_id: int
    registered: bool
    """The fabric manager has taken the GPU in, without an error."""


class Fabric(Protocol):
    """Tells where this node's GPUs are in the NVLink fabric."""

    def gpus(self) -> Sequence[GpuFabric]:
        """Return one entry per GPU.

        Raises:
            DomainError: nobody can tell.
        """
        ...


class NvmlFabric:
    """:class:`Fabric` by the NVIDIA driver, through the package nvidia-ml-py."""

    def gpus(self) -> Sequence[GpuFabric]:
        try:
            pynvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise DomainError("the package nvidia-ml-py is not installed") from error
        try:
            pynvml.nvmlInit()
            try:
                return [_fabric_of(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
            finally:
                pynvml.nvmlShutdown()
        except (pynvml.NVMLError, AttributeError) as error:
            # AttributeError: a package from before there were such fabrics.
            raise DomainError(f"NVML: {error}") from error


def _fabric_of(pynvml: Any, index: int) -> GpuFabric:
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    # The package passes on what it is given, and the library writes to where that points.
    pynvml.nvmlDeviceGetGpuFabricInfoV(pynvml.nvmlDeviceGetHandleByIndex(index), ctypes.byref(info))
    registered = info.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and info.status == pynvml.NVML_SUCCESS
    # As bytes: some versions of the package take the field for a string, which ends at the first zero.
    raw = ctypes.string_at(ctypes.addressof(info) + type(info).clusterUuid.offset, 16)
    return GpuFabric(str(uuid.UUID(bytes=raw)), int(info.cliqueId), registered)


def is_placeholder(name: str) -> bool:
    """Tell whether ``name`` stands for no domain: zeros, one digit all through, or a word for nothing.

    Nodes without a domain would be taken for one domain otherwise.
    """
    plain = name.strip()
    return plain.lower() in _PLACEHOLDERS or _is_filler(plain)


def _is_filler(name: str) -> bool:
    digits = name.replace("-", "").replace("{", "").replace("}", "")
    digits = digits[2:] if digits[:2].lower() == "0x" else digits
    # A site may well call its domains 1, 2, 3.
    return digits == "0" or (len(digits) >= 8 and _ONE_DIGIT.fullmatch(digits) is not None) or not digits


def find_domain(environ: Mapping[str, str], fabric: Fabric) -> str:
    """Return the NVLink domain: ``NVRX_DOMAIN_ID`` if it is set, else cluster UUID and clique of the GPUs.

    Raises:
        DomainError: there is none, or the GPUs are not all in one.
    """
    named = environ.get(DOMAIN_VARIABLE)
    if named is not None:
        if is_placeholder(named):
            raise DomainError(f"{DOMAIN_VARIABLE}={named.strip()[:60]!r} is a placeholder")
        return named.strip()
    domains = set()
    for gpu in fabric.gpus():
        if not gpu.registered or is_placeholder(gpu.cluster_uuid):
            raise DomainError("the GPUs are in no NVLink fabric beyond this node")
        domains.add(f"{gpu.cluster_uuid}.{gpu.clique_id}")
    if len(domains) != 1:
        raise DomainError(f"the node's GPUs are in {len(domains)} NVLink domains")
    return domains.pop()


def locate(environ: Mapping[str, str], domain: str) -> NodeLocation:
    """Return what Slurm and the site say in a step's environment, and ``domain``."""
    return NodeLocation(
        topology_addr=environ.get("SLURM_TOPOLOGY_ADDR", ""),
        topology_pattern=environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""),
        domain=domain,
        group=environ.get(GROUP_VARIABLE, "").strip(),
    )
