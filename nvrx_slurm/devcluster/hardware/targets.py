"""Everything that can be changed about a node's hardware, as one table.

Every row says what it accepts, where it is written, and which check sees it; parser, error messages and the
table of ``docs/devcluster.md`` follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.devcluster.hardware.accepts import (
    Accepts,
    AnswerOfNvml,
    Count,
    Nothing,
    Number,
    Words,
)
from nvrx_slurm.devcluster.hardware.node_hardware import NodeHardware
from nvrx_slurm.devcluster.hardware.storage import Storage

Names = Mapping[str, str]
"""What a path's capital words stand for: ``{"N": "3"}``."""
Get = Callable[[NodeHardware, Names], str]
Put = Callable[[NodeHardware, Names, str], None]
_NAME_PATTERNS = {
    "N": r"\d{1,2}",
    "L": r"\d{1,2}",
    "DEVICE": r"[a-z0-9_]{1,20}",
    "CALL": r"nvml[A-Za-z0-9]{1,60}",
}
_IB = "/sys/class/infiniband/{DEVICE}/ports/1"
_LUSTRE = "/sys/fs/lustre/health_check"
_NIC_STATES = {
    "DOWN": ("1: DOWN", "2: Polling"),
    "INIT": ("2: INIT", "5: LinkUp"),
    "ARMED": ("3: ARMED", "5: LinkUp"),
    "ACTIVE": ("4: ACTIVE", "5: LinkUp"),
}
_KERNEL_LINES = {
    "oops": "BUG: unable to handle page fault for address: ffffffffc0a81234",
    "hard_lockup": "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12",
    "soft_lockup": "watchdog: BUG: soft lockup - CPU#3 stuck for 26s! [python:4242]",
    "hung_task": "INFO: task python:4242 blocked for more than 122 seconds.",
    "oom_kill": "Memory cgroup out of memory: Killed process 4242 (python) total-vm:9kB, anon-rss:9kB",
}


@dataclass(frozen=True)
class Target:
    """One row: something that can be changed. Of several words for a state the last is the healthy one."""

    path: str
    """Capital words stand for names: ``gpu.N.lost``."""
    accepts: Accepts
    does: str
    seen_by: str
    """The checks that tell of it."""
    put: Put
    get: Get
    """What is there now, for ``+=``."""

    @property
    def syntax(self) -> str:
        return self.path + self.accepts.syntax

    @property
    def pattern(self) -> re.Pattern[str]:
        words = [
            f"(?P<{word}>{_NAME_PATTERNS[word]})" if word in _NAME_PATTERNS else re.escape(word)
            for word in self.path.split(".")
        ]
        return re.compile(r"\.".join(words), re.ASCII)


def _nvml(path: str, accepts: Accepts, key: str, does: str, seen_by: str) -> Target:
    def put(hardware: NodeHardware, names: Names, value: str) -> None:
        # An empty word is the healthy one.
        hardware.set_nvml(key.format(**names), value or None)

    def get(hardware: NodeHardware, names: Names) -> str:
        return hardware.nvml(key.format(**names)) or ""

    return Target(path, accepts, does, seen_by, put, get)


def _file(path: str, accepts: Accepts, file: str, does: str, seen_by: str, text: str = "{}") -> Target:
    def put(hardware: NodeHardware, names: Names, value: str) -> None:
        hardware.write(file.format(**names), text.format(value))

    def get(hardware: NodeHardware, names: Names) -> str:
        return hardware.read(file.format(**names))

    return Target(path, accepts, does, seen_by, put, get)


def _action(path: str, accepts: Accepts, put: Put, does: str, seen_by: str) -> Target:
    return Target(path, accepts, does, seen_by, put, lambda hardware, names: "")


def _same(words: Mapping[str, object]) -> Words:
    return Words({word: word for word in words})


# ── What takes more than one value in one place ──


def _say_xid(hardware: NodeHardware, names: Names, value: str) -> None:
    pci = hardware.shape.gpu(int(names["N"])).address.rpartition(".")[0]
    hardware.say(f"NVRM: Xid (PCI:{pci}): {value}, pid=4242, name=python, simulated")


def _say_switch_xid(hardware: NodeHardware, names: Names, value: str) -> None:
    hardware.say(f"nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, {value}, Link 12 simulated")


def _say_kernel(hardware: NodeHardware, names: Names, value: str) -> None:
    hardware.say(_KERNEL_LINES[value])


def _row_remap(hardware: NodeHardware, names: Names, value: str) -> None:
    for word in ("failed", "pending"):
        hardware.set_nvml(f"gpu.{names['N']}.row_remap_{word}", "1" if word == value else None)


def _process(hardware: NodeHardware, names: Names, value: str) -> None:
    key = f"gpu.{names['N']}.processes"
    hardware.set_nvml(key, f"{hardware.nvml(key) or ''} {value}:600".strip())


def _fabric(hardware: NodeHardware, names: Names, value: str) -> None:
    failed = value == "failed"
    hardware.set_nvml(f"gpu.{names['N']}.fabric_state", None if failed else value or None)
    hardware.set_nvml(f"gpu.{names['N']}.fabric_status", "999" if failed else None)


def _nic_state(hardware: NodeHardware, names: Names, value: str) -> None:
    port = _IB.format(**names)
    state, physical = _NIC_STATES[value]
    hardware.write(f"{port}/phys_state", physical)
    hardware.write(f"{port}/state", state)


def _nic_gone(hardware: NodeHardware, names: Names, value: str) -> None:
    hardware.remove_nic(names["DEVICE"])


def _lustre(hardware: NodeHardware, names: Names, value: str) -> None:
    if value:
        hardware.write(_LUSTRE, value)
    else:
        hardware.remove(_LUSTRE)


def _nothing_in_files(hardware: NodeHardware, names: Names, value: str) -> None:
    """Done inside of the running node: :mod:`~nvrx_slurm.devcluster.hardware.storage`."""


TARGETS: Sequence[Target] = (
    _action("gpu.N.xid", Number(1, 999), _say_xid, "the driver logs this Xid of the GPU", "`gpu-xid`"),
    _nvml(
        "gpu.N.lost", Nothing(), "gpu.{N}.lost", "every call about the GPU gives GPU_IS_LOST", "`gpu-lost`"
    ),
    _nvml(
        "gpu.N.gone",
        Nothing(),
        "gpu.{N}.gone",
        "NVML does not list the GPU; those behind it move up",
        "`gpu-count`",
    ),
    _nvml(
        "gpu.N.ecc_uncorrectable",
        Count(),
        "gpu.{N}.ecc",
        "uncorrectable memory errors since the last reset",
        "`gpu-ecc`",
    ),
    _nvml(
        "gpu.N.retired_pages",
        Words({"pending": "1", "ok": ""}),
        "gpu.{N}.retired_pending",
        "retired memory pages wait for a reset",
        "`gpu-ecc`",
    ),
    _action(
        "gpu.N.row_remap",
        Words({"failed": "failed", "pending": "pending", "ok": ""}),
        _row_remap,
        "a bad memory row could not be remapped, or waits for a reset",
        "`gpu-row-remap`",
    ),
    _nvml(
        "gpu.N.recovery_action",
        Words(
            {
                "reset": "1",
                "reboot": "2",
                "drain_p2p": "3",
                "drain_and_reset": "4",
                "unknown": "99",
                "none": "",
            }
        ),
        "gpu.{N}.recovery_action",
        "what the driver asks for",
        "`gpu-recovery`",
    ),
    _nvml(
        "gpu.N.throttle",
        Words({"hw_slowdown": "8", "sw_thermal": "32", "hw_thermal": "64", "power_brake": "128", "none": ""}),
        "gpu.{N}.throttle",
        "why the clocks are held down",
        "`gpu-throttle`",
    ),
    _nvml("gpu.N.pcie_width", Number(1, 16), "gpu.{N}.pcie_width", "PCIe lanes, of 16", "`gpu-pcie`"),
    _nvml(
        "gpu.N.pcie_generation",
        Number(1, 5),
        "gpu.{N}.pcie_generation",
        "PCIe generation, of 5; looked at on a busy GPU",
        "`gpu-pcie`",
    ),
    _nvml(
        "gpu.N.utilization",
        Number(0, 100),
        "gpu.{N}.utilization",
        "percent of the time with a kernel running",
        "`gpu-pcie`",
    ),
    _action(
        "gpu.N.process",
        Number(1, 1 << 22),
        _process,
        "one more process, of this id, is on the GPU, with 600 MiB",
        "`gpu-processes`",
    ),
    _nvml(
        "gpu.N.memory_used",
        Number(0, 40960),
        "gpu.{N}.memory_used_mib",
        "MiB of GPU memory in use by no process",
        "`gpu-memory`",
    ),
    _nvml("gpu.N.mig", Words({"on": "1", "off": ""}), "gpu.{N}.mig", "multi-instance mode", "`gpu-mig`"),
    _action(
        "gpu.N.fabric",
        Words({"failed": "failed", "not_started": "1", "in_progress": "2", "none": "0", "completed": ""}),
        _fabric,
        "the GPU's registration with the NVSwitch fabric",
        "`gpu-fabric`",
    ),
    _nvml(
        "nvlink.N.L",
        Words({"down": "0", "up": ""}),
        "gpu.{N}.link.{L}.up",
        "NVLink L of GPU N",
        "`nvlink-links`",
    ),
    *(
        _nvml(
            f"nvlink.N.L.{counter}",
            Count(),
            f"gpu.{{N}}.link.{{L}}.{counter}",
            f"{counter} errors of NVLink L of GPU N",
            "`nvlink-errors`",
        )
        for counter in ("recovery", "receive", "retry", "replay", "crc")
    ),
    _action(
        "nvswitch.sxid",
        Words({"fatal": "Fatal", "nonfatal": "Non-fatal"}),
        _say_switch_xid,
        "the driver logs an SXid of an NVSwitch",
        "`gpu-xid`",
    ),
    _nvml(
        "nvml.CALL",
        AnswerOfNvml(),
        "error.{CALL}",
        "what an NVML call answers, whatever the GPU; `nvml.nvmlInit` for the driver itself",
        "every `gpu-…` and `nvlink-…`",
    ),
    _nvml(
        "gpu.N.CALL",
        AnswerOfNvml(),
        "gpu.{N}.error.{CALL}",
        "what an NVML call answers for one GPU",
        "every `gpu-…` and `nvlink-…`",
    ),
    _action(
        "nic.DEVICE.state",
        _same(_NIC_STATES),
        _nic_state,
        "state and physical state of the port",
        "`nic-state`, `nic-affinity`",
    ),
    _file(
        "nic.DEVICE.rate",
        Number(1, 1600),
        f"{_IB}/rate",
        "Gb/s, of 400",
        "`nic-state`",
        text="{} Gb/sec (4X)",
    ),
    *(
        _file(
            f"nic.DEVICE.{counter}",
            Count(),
            f"{_IB}/counters/{counter}",
            f"the port's counter {counter}",
            "`nic-counters`",
        )
        for counter in ("link_downed", "symbol_error", "port_rcv_errors")
    ),
    _action("nic.DEVICE.gone", Nothing(), _nic_gone, "the adapter vanishes from sysfs", "`nic-present`"),
    _action(
        "lustre",
        Words({"unhealthy": "NOT HEALTHY", "absent": "", "healthy": "healthy"}),
        _lustre,
        "what the Lustre client says of itself",
        "`lustre`",
    ),
    _file(
        "lustre.import",
        _same({"DISCONN": "", "EVICTED": "", "FULL": ""}),
        "/proc/fs/lustre/osc/scratch-OST0000-osc/import",
        "the Lustre client's connection to one target",
        "`lustre`",
        text="import:\n    state: {}",
    ),
    *(
        _action(f"storage.{mode.value}", Nothing(), _nothing_in_files, does, "`paths`, `space`")
        for mode, does in (
            (Storage.HANG, "every access to `/storage` on this node hangs in the kernel"),
            (Storage.STALE, "every access to `/storage` on this node ends with ESTALE"),
            (Storage.IO_ERROR, "every access to `/storage` on this node ends with EIO"),
            (Storage.OK, "`/storage` works again"),
        )
    ),
    *(
        _file(
            f"memory.ecc_{kind}",
            Count(),
            f"/sys/devices/system/edac/mc/mc0/{file}",
            f"{kind} errors of the node's memory",
            "`edac`",
        )
        for kind, file in (("uncorrectable", "ue_count"), ("corrected", "ce_count"))
    ),
    _action(
        "kernel",
        _same(_KERNEL_LINES),
        _say_kernel,
        "the kernel logs this of itself",
        "`kernel-trouble`, `oom`",
    ),
)
