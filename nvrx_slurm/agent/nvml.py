"""GPUs by NVML, the library of NVIDIA's driver, through ``nvidia-ml-py``.

Indices of ``CUDA_VISIBLE_DEVICES`` are taken in the order of the PCI bus, which is NVML's. CUDA's own order
differs on a node with GPUs of several kinds unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.agent.gpus import Gpu, GpuError

_MIB = 1024 * 1024


def open_gpus(devices: Sequence[str] | None, module: Any = None) -> list[Gpu]:
    """Return the GPUs that ``devices`` names (:func:`~nvrx_slurm.agent.gpus.visible_devices`).

    Initialises NVML, which takes seconds where the driver has to be loaded first.

    Args:
        module: in place of ``pynvml``.

    Raises:
        GpuError: no NVML here, or it does not know one of the devices.
    """
    nvml = _pynvml() if module is None else module
    with _errors_of(nvml):
        nvml.nvmlInit()
        if devices is None:
            devices = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [NvmlGpu(nvml, _find(nvml, device)) for device in devices]


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise GpuError(f"nvidia-ml-py is not installed: {error}") from error
    return pynvml


def _find(nvml: Any, device: str) -> Any:
    if device.isascii() and device.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device))
    if device.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(device)
    # CUDA accepts the beginning of a UUID, too.
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(device):
            return handle
    raise GpuError(f"NVML knows no GPU {device}")


class NvmlGpu:
    """A :class:`~nvrx_slurm.agent.gpus.Gpu` of a driver."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._name = str(nvml.nvmlDeviceGetUUID(handle))
        self._pci_address = self._find_pci_address()

    @property
    def name(self) -> str:
        return self._name

    @property
    def pci_address(self) -> str:
        return self._pci_address

    def used_mb(self) -> float:
        with _errors_of(self._nvml):
            return float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / _MIB)

    def processes(self) -> Mapping[int, float]:
        with _errors_of(self._nvml):
            found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            return {process.pid: (process.usedGpuMemory or 0) / _MIB for process in found}

    def _find_pci_address(self) -> str:
        nvml, card = self._nvml, self._handle
        try:
            if self._name.startswith("MIG-"):
                card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(card)
            domain, _, rest = nvml.nvmlDeviceGetPciInfo(card).busId.partition(":")
        except nvml.NVMLError:
            return ""
        # NVML writes eight digits of the domain, in capitals; sysfs four, in small letters.
        return f"{int(domain, 16):04x}:{rest.lower()}"


@contextlib.contextmanager
def _errors_of(nvml: Any) -> Iterator[None]:
    try:
        yield
    except (nvml.NVMLError, getattr(nvml, "NVMLLibraryMismatchError", nvml.NVMLError)) as error:
        # The second: the driver is too old for the package, which says so of some calls.
        raise GpuError(str(error)) from error
    except UnicodeDecodeError as error:
        raise GpuError("NVML answered with what is no text") from error
