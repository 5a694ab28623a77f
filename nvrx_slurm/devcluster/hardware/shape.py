"""What hardware a simulated node has, and the files that show it while all of it is well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

MOST_GPUS, MOST_LINKS, MOST_NICS = 16, 36, 32
COUNTERS = ("link_downed", "symbol_error", "port_rcv_errors")
_DRIVER = "580.95.05"


@dataclass(frozen=True)
class PciDevice:
    """One device behind one bridge of its own or shared one."""

    root: str
    """``pci0000:10``"""
    address: str
    """``0000:20:00.0``"""
    vendor: str
    kind: str
    """The PCI class."""

    @property
    def path(self) -> str:
        bridge = f"{self.root.removeprefix('pci')}:01.0"
        return f"/sys/devices/{self.root}/{bridge}/{self.address}"


@dataclass(frozen=True)
class Shape:
    """As a node of eight H100: NIC N is near GPU N, the ninth is for storage and near none."""

    gpus: int = 8
    links: int = 18
    nics: int = 9

    def gpu(self, number: int) -> PciDevice:
        return PciDevice(
            f"pci0000:{0x10 + number:02x}", f"0000:{0x20 + 2 * number:02x}:00.0", "0x10de", "0x030200"
        )

    def nic(self, number: int) -> PciDevice:
        if number < self.gpus:
            root, address = f"pci0000:{0x10 + number:02x}", f"0000:{0x21 + 2 * number:02x}:00.0"
        else:
            root, address = f"pci0000:{0x40 + number:02x}", f"0000:{0x80 + number:02x}:00.0"
        return PciDevice(root, address, "0x15b3", "0x020700")

    @property
    def nic_names(self) -> tuple[str, ...]:
        return tuple(f"mlx5_{number}" for number in range(self.nics))

    @property
    def devices(self) -> tuple[PciDevice, ...]:
        return (*map(self.gpu, range(self.gpus)), *map(self.nic, range(self.nics)))


def nvml_values(shape: Shape, host: str) -> dict[str, str]:
    """Return the healthy state of the simulated NVML."""
    # Unlike on another node; a UUID has hexadecimal digits only.
    node = host.encode().hex()[-12:].rjust(12, "0")
    values = {"driver": _DRIVER, "gpus": str(shape.gpus), "links": str(shape.links)}
    for gpu in range(shape.gpus):
        values[f"gpu.{gpu}.uuid"] = f"GPU-{gpu:08x}-0000-4000-8000-{node}"
        values[f"gpu.{gpu}.pci"] = shape.gpu(gpu).address
    return values


def kernel_files(shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file below ``/sys`` and ``/proc``."""
    for device in shape.devices:
        yield f"{device.path}/vendor", device.vendor
        yield f"{device.path}/class", device.kind
        yield f"{device.path}/numa_node", "-1"
    for nic in shape.nic_names:
        yield from nic_files(nic)
    yield "/sys/fs/lustre/health_check", "healthy"
    yield "/proc/fs/lustre/osc/scratch-OST0000-osc/import", "import:\n    state: FULL"
    yield "/sys/devices/system/edac/mc/mc0/ue_count", "0"
    yield "/sys/devices/system/edac/mc/mc0/ce_count", "0"


def nic_files(nic: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the files of one adapter."""
    port = f"/sys/class/infiniband/{nic}/ports/1"
    yield f"{port}/state", "4: ACTIVE"
    yield f"{port}/phys_state", "5: LinkUp"
    yield f"{port}/rate", "400 Gb/sec (4X NDR)"
    for counter in COUNTERS:
        yield f"{port}/counters/{counter}", "0"


def kernel_links(shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield path and target of every symbolic link, relative as in sysfs."""
    for device in shape.devices:
        yield _link(f"/sys/bus/pci/devices/{device.address}", device.path)
    for number, nic in enumerate(shape.nic_names):
        yield _link(f"/sys/class/infiniband/{nic}/device", shape.nic(number).path)


def _link(path: str, target: str) -> tuple[str, str]:
    return path, os.path.relpath(target, os.path.dirname(path))


def grafts(shape: Shape) -> tuple[str, ...]:
    """Return the directories and files of the kernel's that a node sees in place of the machine's."""
    return (
        *(f"/sys/devices/{root}" for root in dict.fromkeys(device.root for device in shape.devices)),
        "/sys/devices/system/edac",
        "/sys/bus/pci/devices",
        "/sys/class/infiniband",
        "/sys/fs/lustre",
        "/proc/fs/lustre",
        "/dev/kmsg",
    )
