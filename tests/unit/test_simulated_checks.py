"""Every check on simulated hardware: how it tells well from ill, and what it says when it can't tell."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from health_world import CHECKS
from simulated_node import SimulatedNode

from nvrx_slurm.health.stage import Stage

HANGS_S = 0.3
OF_NVML = {
    "gpu-count": "nvmlDeviceGetCount",
    "gpu-driver": "nvmlSystemGetDriverVersion",
    "gpu-ecc": "nvmlDeviceGetTotalEccErrors",
    "gpu-fabric": "nvmlDeviceGetGpuFabricInfo",
    "gpu-lost": "nvmlDeviceGetMemoryInfo",
    "gpu-memory": "nvmlDeviceGetMemoryInfo",
    "gpu-mig": "nvmlDeviceGetMigMode",
    "gpu-pcie": "nvmlDeviceGetCurrPcieLinkWidth",
    "gpu-processes": "nvmlDeviceGetComputeRunningProcesses",
    "gpu-recovery": "nvmlDeviceGetFieldValues",
    "gpu-row-remap": "nvmlDeviceGetRemappedRows",
    "gpu-throttle": "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nic-affinity": "nvmlDeviceGetCount",
    "nvlink-errors": "nvmlDeviceGetNvLinkState",
    "nvlink-links": "nvmlDeviceGetNvLinkState",
}
"""The call without which the check can't do."""
PORT = "/sys/class/infiniband/mlx5_1/ports/1"
OF_FILES = {
    "edac": "/sys/devices/system/edac/mc/mc0/ue_count",
    "gpu-xid": "/dev/kmsg",
    "kernel-trouble": "/dev/kmsg",
    "lustre": "/sys/fs/lustre/health_check",
    "memory": "/proc/meminfo",
    "nic-counters": f"{PORT}/counters/link_downed",
    "nic-state": f"{PORT}/state",
    "oom": "/dev/kmsg",
}
"""The file without which the check can't do."""
SETTINGS: dict[str, dict[str, object]] = {"gpu-mig": {"enabled": False}}
FAULTS = [
    ("gpu-xid", ["gpu.1.xid=79"], "fail", "gpu 0000:22:00", "Xid 79 GPU has fallen off the bus"),
    ("gpu-xid", ["gpu.1.xid=999"], "warn", "gpu 0000:22:00", "Xid 999"),
    ("gpu-xid", ["gpu.1.xid=13", "gpu.0.xid=43"], "ok", "node", "no Xid to act on"),
    ("gpu-xid", ["nvswitch.sxid=fatal"], "fail", "nvswitch 0000:c4:00.0", "SXid 20034"),
    ("gpu-xid", ["nvswitch.sxid=nonfatal"], "warn", "nvswitch 0000:c4:00.0", "SXid 20034"),
    ("gpu-lost", ["gpu.1.lost"], "fail", "gpu 1", "fallen off the bus"),
    ("gpu-lost", ["gpu.1.nvmlDeviceGetMemoryInfo=RESET_REQUIRED"], "fail", "gpu 1", "must be reset"),
    ("gpu-lost", ["gpu.1.nvmlDeviceGetHandleByIndex=GPU_IS_LOST"], "fail", "gpu 1", "fallen off the bus"),
    ("gpu-count", ["gpu.0.gone"], "fail", "node", "of the baseline is gone"),
    ("gpu-count", ["gpu.0.lost"], "ok", "node", "2 GPUs, 1 of which can't be read: see gpu-lost"),
    ("gpu-count", ["gpu.0.gone", "gpu.1.lost"], "fail", "node", "1 of GPU-"),
    ("gpu-driver", ["nvml.nvmlInit=LIB_RM_VERSION_MISMATCH"], "fail", "node", "of different versions"),
    ("gpu-driver", ["nvml.nvmlInit=DRIVER_NOT_LOADED"], "warn", "node", "NVML_ERROR_DRIVER_NOT_LOADED"),
    ("gpu-ecc", ["gpu.1.ecc_uncorrectable+=2"], "fail", "gpu 1", "2 uncorrectable memory errors"),
    ("gpu-ecc", ["gpu.0.retired_pages=pending"], "fail", "gpu 0", "retired memory pages wait for a reset"),
    ("gpu-ecc", ["nvml.nvmlDeviceGetTotalEccErrors=NOT_SUPPORTED"], "skip", "node", "does not tell"),
    ("gpu-row-remap", ["gpu.1.row_remap=failed"], "fail", "gpu 1", "row remap failed"),
    ("gpu-row-remap", ["gpu.1.row_remap=pending"], "fail", "gpu 1", "a row remap waits for a reset"),
    ("gpu-recovery", ["gpu.1.recovery_action=reboot"], "fail", "gpu 1", "the driver asks for node reboot"),
    ("gpu-recovery", ["gpu.1.recovery_action=unknown"], "warn", "gpu 1", "unknown recovery action 99"),
    ("gpu-throttle", ["gpu.0.throttle=hw_thermal"], "warn", "gpu 0", "hw thermal slowdown"),
    ("gpu-pcie", ["gpu.0.pcie_width=8"], "fail", "gpu 0", "x8 of x16 lanes"),
    ("gpu-pcie", ["gpu.0.pcie_generation=3"], "ok", "node", "none to complain about"),
    (
        "gpu-pcie",
        ["gpu.0.pcie_generation=3", "gpu.0.utilization=90"],
        "warn",
        "gpu 0",
        "generation 3 of 5 under load",
    ),
    ("gpu-processes", ["gpu.1.process=4242", "gpu.1.process=4243"], "fail", "gpu 1", "? (4242), ? (4243)"),
    ("gpu-memory", ["gpu.1.memory_used=2000"], "fail", "gpu 1", "2000 MiB in use by no process"),
    ("gpu-memory", ["gpu.1.process=4242"], "ok", "node", "none to complain about"),
    ("gpu-mig", ["gpu.0.mig=on"], "fail", "gpu 0", "MIG is on"),
    ("gpu-fabric", ["gpu.0.fabric=in_progress"], "fail", "gpu 0", "fabric registration is in progress"),
    ("gpu-fabric", ["gpu.0.fabric=failed"], "fail", "gpu 0", "NVML_ERROR_UNKNOWN"),
    ("gpu-fabric", ["gpu.0.fabric=none"], "ok", "node", "none to complain about"),
    ("nvlink-links", ["nvlink.1.2=down"], "fail", "gpu 1", "NVLink 2 down"),
    ("nvlink-links", ["gpu.0.nvmlDeviceGetNvLinkState=TIMEOUT"], "warn", "gpu 0", "can't be read"),
    ("nic-state", ["nic.mlx5_1.state=DOWN"], "fail", "nic mlx5_1/1", "DOWN, Polling"),
    ("nic-state", ["nic.mlx5_1.rate=200"], "fail", "nic mlx5_1/1", "200 of 400 Gb/s"),
    ("nic-counters", ["nic.mlx5_1.link_downed+=1"], "fail", "nic mlx5_1/1", "link_downed +1"),
    ("nic-counters", ["nic.mlx5_1.symbol_error=100"], "warn", "nic mlx5_1/1", "symbol_error +100"),
    ("nic-counters", ["nic.mlx5_1.port_rcv_errors=99"], "ok", "node", "2 ports without new errors"),
    ("nic-present", ["nic.mlx5_1.gone"], "fail", "nic mlx5_1/1", "has vanished"),
    ("nic-affinity", ["nic.mlx5_0.state=DOWN"], "warn", "gpu 0", "no adapter near it is up: mlx5_0"),
    ("lustre", ["lustre=unhealthy"], "fail", "node", "NOT HEALTHY"),
    ("lustre", ["lustre.import=EVICTED"], "warn", "node", "import is EVICTED"),
    ("lustre", ["lustre=absent"], "skip", "node", "there is no Lustre client"),
    ("edac", ["memory.ecc_uncorrectable+=1"], "fail", "memory mc0", "1 uncorrectable errors"),
    ("edac", ["memory.ecc_corrected=20000"], "warn", "memory mc0", "20000 corrected errors"),
    ("kernel-trouble", ["kernel=oops"], "fail", "node", "BUG: unable to handle page fault"),
    ("kernel-trouble", ["kernel=hard_lockup"], "fail", "node", "hard LOCKUP"),
    ("kernel-trouble", ["kernel=soft_lockup"], "warn", "node", "1 lockups"),
    ("kernel-trouble", ["kernel=soft_lockup"] * 3, "fail", "node", "3 lockups"),
    ("kernel-trouble", ["kernel=hung_task"], "warn", "node", "1 hung tasks"),
    ("oom", ["kernel=oom_kill"], "warn", "node", "1 processes killed for memory, last: python"),
]


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    found = SimulatedNode(tmp_path)
    found.baseline()
    return found


def told(node: SimulatedNode, name: str, **settings: object) -> list[tuple[str, str, str]]:
    settings = {**SETTINGS.get(name, {}), **settings}
    return [(r.status.value, r.scope, r.evidence) for r in node.check(name, Stage.PROLOG, **settings)]


@pytest.mark.parametrize("name", [*OF_NVML, *OF_FILES, "nic-present"])
def test_healthy_hardware_is_ok(node: SimulatedNode, name: str) -> None:
    assert [status for status, _, _ in told(node, name)] == ["ok"]


@pytest.mark.parametrize(
    ("name", "faults", "status", "scope", "evidence"), FAULTS, ids=lambda value: str(value)[:40]
)
def test_a_fault_is_told_by_its_check_with_its_place_until_it_is_healed(
    node: SimulatedNode, name: str, faults: list[str], status: str, scope: str, evidence: str
) -> None:
    node.inject(*faults)
    found = told(node, name)
    assert {(said, where) for said, where, _ in found} == {(status, scope)}, found
    assert all(evidence in why for _, _, why in found), found
    node.hardware.heal()
    assert [said for said, _, _ in told(node, name)] == ["ok"]


@pytest.mark.parametrize(("name", "call"), OF_NVML.items())
def test_a_call_of_the_driver_that_hangs_is_a_warning_after_the_time_out(
    node: SimulatedNode, name: str, call: str
) -> None:
    node.inject(f"nvml.{call}=hang")
    assert told(node, name, timeout_s=HANGS_S) == [("warn", "node", f"timed out after {HANGS_S} s")]


@pytest.mark.parametrize(("name", "call"), OF_NVML.items())
def test_a_call_of_the_driver_that_fails_is_a_warning(node: SimulatedNode, name: str, call: str) -> None:
    node.inject(f"nvml.{call}=IRQ_ISSUE")
    assert {status for status, _, _ in told(node, name)} == {"warn"}
    assert "NVML_ERROR_IRQ_ISSUE" in told(node, name)[0][2]


@pytest.mark.parametrize("name", OF_NVML)
@pytest.mark.parametrize("damage", ["cut off", "garbage", "empty", "too long", "a directory"])
def test_a_damaged_driver_is_a_warning(node: SimulatedNode, name: str, damage: str) -> None:
    state = node.hardware.nvml_state
    whole = state.read_bytes()
    contents = {
        "cut off": whole[:-2],
        "garbage": b"\xff\0" * 300,
        "empty": b"",
        "too long": whole.replace(b"end\n", b"x 1\n" * 20_000 + b"end\n"),
    }
    state.unlink()
    if damage in contents:
        state.write_bytes(contents[damage])
    else:
        state.mkdir()
    assert [(status, scope) for status, scope, _ in told(node, name)] == [("warn", "node")]


@pytest.mark.parametrize("name", OF_NVML)
def test_without_a_driver_gpus_that_were_there_are_missed_and_all_else_is_skipped_or_warned_of(
    node: SimulatedNode, name: str
) -> None:
    node.hardware.nvml_state.unlink()
    ((status, scope, evidence),) = told(node, name)
    assert (status, scope) == ("warn", "node")
    assert "NVML_ERROR_DRIVER_NOT_LOADED" in evidence


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, path in OF_FILES.items() if path != "/dev/kmsg"]
)
def test_a_kernel_file_that_blocks_its_reader_is_a_warning_after_the_time_out(
    node: SimulatedNode, name: str, path: str
) -> None:
    """The kernel log is opened without blocking."""
    node.hardware.at(path).unlink()
    os.mkfifo(node.hardware.at(path))
    assert told(node, name, timeout_s=HANGS_S) == [("warn", "node", f"timed out after {HANGS_S} s")]


@pytest.mark.parametrize(("name", "path"), OF_FILES.items())
def test_a_kernel_file_that_cannot_be_read_is_a_warning_or_skipped(
    node: SimulatedNode, name: str, path: str
) -> None:
    node.hardware.at(path).unlink()
    node.hardware.at(path).mkdir()
    found = told(node, name)
    assert {status for status, _, _ in found} <= {"warn", "skip"}, found


@pytest.mark.parametrize("name", ["edac", "nic-counters", "nic-state", "memory"])
@pytest.mark.parametrize("garbage", ["", "abc", "-", "9" * 60, "\0", "1_000", "4: "])
def test_garbage_in_a_counter_is_a_warning_and_no_other_port_is_hidden(
    node: SimulatedNode, name: str, garbage: str
) -> None:
    node.hardware.write(OF_FILES[name], garbage)
    node.inject("nic.mlx5_0.link_downed+=1", "nic.mlx5_0.state=DOWN")
    found = told(node, name)
    assert "warn" in {status for status, _, _ in found}, found
    assert ("nic mlx5_0/1" in {scope for _, scope, _ in found}) == name.startswith("nic-")


def test_what_one_gpu_does_not_tell_hides_nothing_of_the_other(node: SimulatedNode) -> None:
    node.inject("gpu.0.nvmlDeviceGetRemappedRows=UNKNOWN", "gpu.1.row_remap=failed")
    assert [(status, scope) for status, scope, _ in told(node, "gpu-row-remap")] == [
        ("warn", "gpu 0"),
        ("fail", "gpu 1"),
    ]


@pytest.mark.parametrize("counter", ["recovery", "receive", "retry", "replay", "crc"])
def test_an_nvlink_whose_errors_keep_coming_fails(node: SimulatedNode, counter: str) -> None:
    if counter in ("replay", "crc"):
        # As before NVLink 5.
        for field in (208, 215, 295):
            node.hardware.set_nvml(f"field.{field}", "3")
    thresholds: dict[str, object] = {"window": 4, "flagged": 2, "interval_s": 0}
    seen = []
    for _ in range(4):
        seen.append(told(node, "nvlink-errors", **thresholds)[0][0])
        node.inject(f"nvlink.1.2.{counter}+=1")
    assert seen == ["ok", "ok", "ok", "fail"]


def test_in_the_kernel_log_only_what_came_after_the_baseline_counts(node: SimulatedNode) -> None:
    node.inject("gpu.1.xid=79")
    assert told(node, "gpu-xid")[0][0] == "fail"
    node.baseline()
    assert told(node, "gpu-xid")[0][0] == "ok"
    node.hardware.heal()
    node.inject("gpu.0.xid=79")
    assert told(node, "gpu-xid")[0][0] == "fail"


def test_every_check_that_reads_the_driver_is_among_these() -> None:
    assert {name for name, check in CHECKS.items() if "NVML" in check.needs} - {"gpu-probe"} == set(OF_NVML)
