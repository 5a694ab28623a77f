"""What the checks ask NVML, and the answer of the real one.

Every call may raise :class:`NvmlError`. GPUs are NVML indexes. Source of names and numbers: ``nvml.h`` of
driver branch r580.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

from nvrx_slurm.health.unavailable import UnavailableError

_T = TypeVar("_T")


class NvmlCode(enum.IntEnum):
    """``nvmlReturn_t``."""

    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    ALREADY_INITIALIZED = 5
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    INSUFFICIENT_POWER = 8
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    IRQ_ISSUE = 11
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    CORRUPTED_INFOROM = 14
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    VGPU_ECC_NOT_SUPPORTED = 22
    INSUFFICIENT_RESOURCES = 23
    FREQ_NOT_SUPPORTED = 24
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    INVALID_STATE = 29
    RESET_TYPE_NOT_SUPPORTED = 30
    UNKNOWN = 999


NOT_THERE = (NvmlCode.NOT_SUPPORTED, NvmlCode.FUNCTION_NOT_FOUND, NvmlCode.DEPRECATED)
"""This GPU or driver does not know the question: nothing to check."""


class NvmlError(Exception):
    """NVML answered with an error code."""

    def __init__(self, code: int) -> None:
        name = NvmlCode(code).name if code in list(NvmlCode) else f"code {code}"
        super().__init__(f"NVML_ERROR_{name}" if code in list(NvmlCode) else f"NVML error {name}")
        self.code = code


class RecoveryAction(enum.IntEnum):
    """``nvmlDeviceGpuRecoveryAction_t``; from driver r570 on."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class Throttle(enum.IntFlag):
    """The part of ``nvmlClocksEventReasons`` that hardware gives when it protects itself."""

    HW_SLOWDOWN = 0x08
    SW_THERMAL_SLOWDOWN = 0x20
    HW_THERMAL_SLOWDOWN = 0x40
    HW_POWER_BRAKE_SLOWDOWN = 0x80


class NvLinkCounter(enum.Enum):
    """Errors of one NVLink."""

    RECOVERY = "recovery"
    RECEIVE = "receive"
    RETRY = "retry"
    REPLAY = "replay"
    CRC = "crc"


@dataclass(frozen=True)
class RemappedRows:
    correctable: int
    uncorrectable: int
    pending: bool
    """Needs a GPU reset to take effect."""
    failure: bool
    """No row is left to remap to: the GPU has to be replaced."""


@dataclass(frozen=True)
class PcieLink:
    generation: int
    max_generation: int
    width: int
    max_width: int


@dataclass(frozen=True)
class GpuMemory:
    """Bytes."""

    total: int
    used: int
    """By processes; without what the driver keeps for itself where NVML can tell."""


@dataclass(frozen=True)
class FabricState:
    """``nvmlGpuFabricInfo_t``: how the GPU's registration with the NVSwitch fabric went."""

    state: int
    """0 not supported, 1 not started, 2 in progress, 3 completed."""
    status: int
    """``nvmlReturn_t`` once completed."""


class Nvml(Protocol):
    """One node's GPUs."""

    def driver_version(self) -> str: ...

    def count(self) -> int: ...

    def uuid(self, gpu: int) -> str: ...

    def pci_bus_id(self, gpu: int) -> str:
        """As sysfs writes it: ``0000:3b:00.0``."""
        ...

    def recovery_action(self, gpu: int) -> int: ...

    def uncorrected_ecc(self, gpu: int) -> int:
        """Errors since the driver was loaded or the GPU reset."""
        ...

    def remapped_rows(self, gpu: int) -> RemappedRows: ...

    def retired_pages_pending(self, gpu: int) -> bool:
        """GPUs before Ampere retire pages instead of remapping rows."""
        ...

    def throttle_reasons(self, gpu: int) -> int: ...

    def sm_clock_mhz(self, gpu: int) -> tuple[int, int]:
        """The clock now, and the highest that it can have."""
        ...

    def temperature_c(self, gpu: int) -> int: ...

    def pcie_link(self, gpu: int) -> PcieLink: ...

    def utilization(self, gpu: int) -> int:
        """Percent of the time with a kernel running."""
        ...

    def processes(self, gpu: int) -> list[int]:
        """Process ids with a context on the GPU."""
        ...

    def mig_enabled(self, gpu: int) -> bool: ...

    def memory(self, gpu: int) -> GpuMemory: ...

    def fabric(self, gpu: int) -> FabricState: ...

    def nvlink_active(self, gpu: int, link: int) -> bool: ...

    def nvlink_errors(self, gpu: int, link: int) -> dict[NvLinkCounter, int]:
        """The counters that this GPU has."""
        ...


_FI_RECOVERY_ACTION = 230
_MEMORY_V2 = 0x02000028
_VOLATILE, _UNCORRECTED = 0, 1
# NVLink 5 counts in fields whose scope is the link; older ones answer nvmlDeviceGetNvLinkErrorCounter.
_LINK_FIELDS = {NvLinkCounter.RECOVERY: 215, NvLinkCounter.RECEIVE: 208, NvLinkCounter.RETRY: 295}
_LINK_COUNTERS = {NvLinkCounter.REPLAY: 0, NvLinkCounter.RECOVERY: 1, NvLinkCounter.CRC: 2}


class RealNvml:
    """The driver's library through nvidia-ml-py. Call it from one process only, after any fork."""

    def __init__(self) -> None:
        """Open the library.

        Raises:
            UnavailableError: there is none.
            NvmlError: the driver does not answer it.
        """
        try:
            import pynvml
        except ImportError:
            raise UnavailableError("the Python package nvidia-ml-py is not installed", "pynvml") from None
        self._lib: ModuleType = pynvml
        self._handles: dict[int, Any] = {}
        with self._errors():
            pynvml.nvmlInit()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._lib.NVMLError as error:
            if error.value == NvmlCode.LIBRARY_NOT_FOUND:
                raise UnavailableError("there is no NVIDIA driver library", "libnvidia-ml.so.1") from None
            raise NvmlError(error.value) from None
        except getattr(self._lib, "NVMLLibraryMismatchError", self._lib.NVMLError):
            # Of some calls the package says with it that the driver is too old for them.
            raise NvmlError(NvmlCode.FUNCTION_NOT_FOUND) from None
        except UnicodeDecodeError:
            # The package decodes what the driver calls a text.
            raise NvmlError(NvmlCode.UNKNOWN) from None

    def _ask(self, function: Callable[..., _T], gpu: int, *args: object) -> _T:
        with self._errors():
            if gpu not in self._handles:
                self._handles[gpu] = self._lib.nvmlDeviceGetHandleByIndex(gpu)
            return function(self._handles[gpu], *args)

    def _field(self, gpu: int, field: int, scope: int = 0) -> int:
        value = self._ask(self._lib.nvmlDeviceGetFieldValues, gpu, [(field, scope)])[0]
        if value.nvmlReturn != 0:
            raise NvmlError(value.nvmlReturn)
        # nvmlValueType_t: 1 unsigned int, 2 and 3 64 bits.
        return int(value.value.uiVal if value.valueType == 1 else value.value.ullVal)

    def driver_version(self) -> str:
        with self._errors():
            return _text(self._lib.nvmlSystemGetDriverVersion())

    def count(self) -> int:
        with self._errors():
            return int(self._lib.nvmlDeviceGetCount())

    def uuid(self, gpu: int) -> str:
        return _text(self._ask(self._lib.nvmlDeviceGetUUID, gpu))

    def pci_bus_id(self, gpu: int) -> str:
        info = self._ask(self._lib.nvmlDeviceGetPciInfo, gpu)
        return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"

    def recovery_action(self, gpu: int) -> int:
        return self._field(gpu, _FI_RECOVERY_ACTION)

    def uncorrected_ecc(self, gpu: int) -> int:
        return int(self._ask(self._lib.nvmlDeviceGetTotalEccErrors, gpu, _UNCORRECTED, _VOLATILE))

    def remapped_rows(self, gpu: int) -> RemappedRows:
        correctable, uncorrectable, pending, failure = self._ask(self._lib.nvmlDeviceGetRemappedRows, gpu)
        return RemappedRows(correctable, uncorrectable, bool(pending), bool(failure))

    def retired_pages_pending(self, gpu: int) -> bool:
        return bool(self._ask(self._lib.nvmlDeviceGetRetiredPagesPendingStatus, gpu))

    def throttle_reasons(self, gpu: int) -> int:
        return int(self._ask(self._lib.nvmlDeviceGetCurrentClocksThrottleReasons, gpu))

    def sm_clock_mhz(self, gpu: int) -> tuple[int, int]:
        lib = self._lib
        return (
            int(self._ask(lib.nvmlDeviceGetClockInfo, gpu, lib.NVML_CLOCK_SM)),
            int(self._ask(lib.nvmlDeviceGetMaxClockInfo, gpu, lib.NVML_CLOCK_SM)),
        )

    def temperature_c(self, gpu: int) -> int:
        lib = self._lib
        return int(self._ask(lib.nvmlDeviceGetTemperature, gpu, lib.NVML_TEMPERATURE_GPU))

    def pcie_link(self, gpu: int) -> PcieLink:
        lib = self._lib
        return PcieLink(
            self._ask(lib.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
            self._ask(lib.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
            self._ask(lib.nvmlDeviceGetCurrPcieLinkWidth, gpu),
            self._ask(lib.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        )

    def utilization(self, gpu: int) -> int:
        return int(self._ask(self._lib.nvmlDeviceGetUtilizationRates, gpu).gpu)

    def processes(self, gpu: int) -> list[int]:
        return [
            int(process.pid) for process in self._ask(self._lib.nvmlDeviceGetComputeRunningProcesses, gpu)
        ]

    def mig_enabled(self, gpu: int) -> bool:
        return bool(self._ask(self._lib.nvmlDeviceGetMigMode, gpu)[0])

    def memory(self, gpu: int) -> GpuMemory:
        try:
            info = self._ask(self._lib.nvmlDeviceGetMemoryInfo, gpu, _MEMORY_V2)
        except NvmlError as error:
            if error.code not in NOT_THERE:
                raise
            info = self._ask(self._lib.nvmlDeviceGetMemoryInfo, gpu)
        return GpuMemory(int(info.total), int(info.used))

    def fabric(self, gpu: int) -> FabricState:
        info = self._lib.c_nvmlGpuFabricInfo_t()
        self._ask(self._lib.nvmlDeviceGetGpuFabricInfo, gpu, self._lib.byref(info))
        return FabricState(int(info.state), int(info.status))

    def nvlink_active(self, gpu: int, link: int) -> bool:
        return bool(self._ask(self._lib.nvmlDeviceGetNvLinkState, gpu, link))

    def nvlink_errors(self, gpu: int, link: int) -> dict[NvLinkCounter, int]:
        found = self._counters(_LINK_FIELDS, lambda field: self._field(gpu, field, link))
        if found:
            return found
        ask = self._lib.nvmlDeviceGetNvLinkErrorCounter
        return self._counters(_LINK_COUNTERS, lambda number: int(self._ask(ask, gpu, link, number)))

    def _counters(
        self, numbers: Mapping[NvLinkCounter, int], read: Callable[[int], int]
    ) -> dict[NvLinkCounter, int]:
        found = {}
        for counter, number in numbers.items():
            try:
                found[counter] = read(number)
            except NvmlError as error:
                if error.code not in (*NOT_THERE, NvmlCode.INVALID_ARGUMENT):
                    raise
        return found


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
