"""What an agent tells of where its node is."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest

from nvrx_slurm.agent.location import (
    DomainError,
    GpuFabric,
    NvmlFabric,
    find_domain,
    is_placeholder,
    locate,
)
from nvrx_slurm.testing import FakeFabric

RACK = "3b2f0b7c-6a5e-4d1c-9a77-0c1d2e3f4a5b"


def gpu(uuid: str = RACK, clique: int = 1, registered: bool = True) -> GpuFabric:
    return GpuFabric(uuid, clique, registered)


def test_the_domain_is_the_cluster_and_clique_that_all_gpus_are_in() -> None:
    assert find_domain({}, FakeFabric(gpu(), gpu())) == f"{RACK}.1"


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([], "NVML: Driver Not Loaded"),
        ([gpu(), gpu(clique=2)], "the node's GPUs are in 2 NVLink domains"),
        ([gpu(), gpu(registered=False)], "in no NVLink fabric beyond this node"),
    ],
)
def test_gpus_that_are_not_all_in_one_domain_are_in_none(gpus: list[GpuFabric], why: str) -> None:
    with pytest.raises(DomainError, match=why):
        find_domain({}, FakeFabric(*gpus))


@pytest.mark.parametrize(
    "uuid",
    [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "0x0000000000000000",
        "0",
        "",
        " ",
        "N/A",
        "[N/A]",
        "None",
        "{00000000-0000-0000-0000-000000000000}",
        "-",
    ],
)
def test_w23_a_placeholder_is_no_domain_wherever_it_comes_from(uuid: str) -> None:
    assert is_placeholder(uuid)
    with pytest.raises(DomainError):
        find_domain({}, FakeFabric(gpu(uuid)))
    with pytest.raises(DomainError, match="NVRX_DOMAIN_ID"):
        find_domain({"NVRX_DOMAIN_ID": uuid}, FakeFabric(gpu()))


@pytest.mark.parametrize("name", [RACK, "1", "a", "rack-7", "00000000-0000-0000-0000-000000000001"])
def test_a_sites_own_name_wins_over_nvml(name: str) -> None:
    assert find_domain({"NVRX_DOMAIN_ID": f" {name} "}, FakeFabric()) == name


def test_slurms_address_and_the_replacement_group_are_passed_on_as_they_are() -> None:
    where = locate(
        {
            "SLURM_TOPOLOGY_ADDR": "s0.s1.n3",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            "NVRX_REPLACEMENT_GROUP_ID": "12",
        },
        domain="rack",
    )
    assert (where.topology_addr, where.topology_pattern) == ("s0.s1.n3", "switch.switch.node")
    assert (where.domain, where.group) == ("rack", "12")
    assert locate({}, "") == type(where)()


# --- NVML --------------------------------------------------------------------------------------------


class _Info(ctypes.Structure):
    """``nvmlGpuFabricInfo_v2_t`` as nvidia-ml-py 12.560 and later have it."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )


class _TextInfo(ctypes.Structure):
    """The same where the UUID is taken for a string."""

    _fields_ = (*_Info._fields_[:1], ("clusterUuid", ctypes.c_char * 16), *_Info._fields_[2:])


class NVMLError(Exception):
    pass


def nvml(
    monkeypatch: pytest.MonkeyPatch, info: type, uuid: bytes = b"\x3b\0" + b"\x11" * 14
) -> types.ModuleType:
    module = types.ModuleType("pynvml")

    def fill(_device: int, pointer: Any) -> None:
        into: _Info = pointer._obj
        raw = (ctypes.c_uint8 * 16).from_buffer(into, info.clusterUuid.offset)  # type: ignore[attr-defined]
        raw[:] = list(uuid)
        into.status, into.cliqueId, into.state = 0, 7, 3

    for name, value in {
        "NVMLError": NVMLError,
        "NVML_SUCCESS": 0,
        "NVML_GPU_FABRIC_STATE_COMPLETED": 3,
        "c_nvmlGpuFabricInfoV_t": info,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetGpuFabricInfoV": fill,
    }.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.mark.parametrize("info", [_Info, _TextInfo])
def test_nvml_tells_the_whole_uuid_zeros_included(monkeypatch: pytest.MonkeyPatch, info: type) -> None:
    nvml(monkeypatch, info)
    assert find_domain({}, NvmlFabric()) == "3b001111-1111-1111-1111-111111111111.7"


def test_w23_nvmls_zero_uuid_is_no_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(monkeypatch, _Info, bytes(16))
    with pytest.raises(DomainError, match="no NVLink fabric beyond this node"):
        find_domain({}, NvmlFabric())


def test_a_driver_that_is_not_there_or_too_old_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nvml(monkeypatch, _Info)

    def fails() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(module, "nvmlInit", fails)
    with pytest.raises(DomainError, match="NVML: Driver Not Loaded"):
        NvmlFabric().gpus()
    nvml(monkeypatch, _Info)
    monkeypatch.delattr(sys.modules["pynvml"], "c_nvmlGpuFabricInfoV_t")
    with pytest.raises(DomainError, match="c_nvmlGpuFabricInfoV_t"):
        NvmlFabric().gpus()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DomainError, match="nvidia-ml-py is not installed"):
        NvmlFabric().gpus()
