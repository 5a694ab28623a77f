"""Stands in for NVIDIA's driver: who holds GPU N is in a test's file ``gpuN``, ``PID MIB`` a line."""

import os
from types import SimpleNamespace

_MIB = 1024 * 1024


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    with open(f"{os.environ['TEST_FOLDER']}/nvml_opened", "a") as file:
        file.write("opened\n")


def nvmlDeviceGetCount() -> int:
    return 8


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetPciInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(busId=f"00000000:0{handle}:00.0")


def _holders(handle: int) -> dict[int, int]:
    try:
        with open(f"{os.environ['TEST_FOLDER']}/gpu{handle}") as file:
            return {int(line.split()[0]): int(line.split()[1]) for line in file}
    except FileNotFoundError:
        return {}


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:
    return SimpleNamespace(used=sum(_holders(handle).values()) * _MIB)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=mib * _MIB) for pid, mib in _holders(handle).items()]
