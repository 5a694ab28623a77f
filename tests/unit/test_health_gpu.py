"""Checks of GPUs and NVLinks: ok, warn, fail, skip, and what can't be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from health_world import failed, run, status, told

from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.nvml import (
    FabricState,
    GpuMemory,
    NvLinkCounter,
    NvmlCode,
    NvmlError,
    PcieLink,
    RecoveryAction,
    RemappedRows,
    Throttle,
)
from nvrx_slurm.health.result import Action
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.testing.health import FakeClock, FakeNvml, fake_node

MIB = 1 << 20
GPU_CHECKS = [
    "gpu-count",
    "gpu-driver",
    "gpu-ecc",
    "gpu-fabric",
    "gpu-lost",
    "gpu-memory",
    "gpu-pcie",
    "gpu-processes",
    "gpu-recovery",
    "gpu-row-remap",
    "gpu-throttle",
    "nvlink-errors",
    "nvlink-links",
]


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml(8)


@pytest.fixture
def node(tmp_path: Path, nvml: FakeNvml) -> Node:
    return fake_node(tmp_path, nvml)


def with_baseline(node: Node) -> Node:
    """The same node, later."""
    take_baseline(node).save(node.state)
    return dataclasses.replace(node)


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_healthy_node_is_ok(name: str, node: Node) -> None:
    assert status(name, node) == "ok"
    assert status(name, with_baseline(node)) == "ok"


@pytest.mark.parametrize("name", [*GPU_CHECKS, "gpu-mig"])
def test_a_node_without_a_driver_is_skipped_with_the_reason(name: str, tmp_path: Path) -> None:
    (result,) = run(name, fake_node(tmp_path), **({"enabled": True} if name == "gpu-mig" else {}))
    assert result.status.value == "skip"
    assert "no NVIDIA driver library" in result.evidence


@pytest.mark.parametrize("name", [n for n in GPU_CHECKS if n != "gpu-driver"])
def test_a_driver_that_does_not_answer_is_a_warning(name: str, tmp_path: Path) -> None:
    assert status(name, fake_node(tmp_path, NvmlError(NvmlCode.UNKNOWN))) == "warn"


# --- count -------------------------------------------------------------------------------------------


def test_fewer_gpus_than_configured_fail(node: Node) -> None:
    (result,) = run("gpu-count", node, expected=9)
    assert (result.status.value, result.evidence) == ("fail", "8 GPUs where 9 are expected")
    assert result.node_lost
    assert result.remedy


def test_inside_a_job_only_the_jobs_gpus_are_expected(tmp_path: Path, nvml: FakeNvml) -> None:
    job = JobContext(job_id="1", gpu_count=4)
    nvml.gpus = nvml.gpus[:4]
    node = fake_node(tmp_path, nvml, Stage.RESTART, job=job)
    assert status("gpu-count", node, expected=8) == "ok"
    nvml.gpus.pop()
    assert status("gpu-count", node, expected=8) == "fail"


def test_gpus_that_are_expected_but_have_no_driver_are_a_warning(tmp_path: Path) -> None:
    assert status("gpu-count", fake_node(tmp_path), expected=8) == "warn"


def test_mig_instances_are_not_counted_as_gpus(tmp_path: Path) -> None:
    nvml = FakeNvml(1)
    nvml.gpus[0].mig_enabled = True
    node = fake_node(tmp_path, nvml, Stage.RESTART, job=JobContext(gpu_count=7))
    assert status("gpu-count", node) == "ok"


def test_a_gpu_on_the_bus_that_the_driver_does_not_list_is_a_warning(node: Node) -> None:
    for number in range(9):
        node.tree.write(f"/sys/bus/pci/devices/0000:{number:02x}:00.0/vendor", "0x10de\n")
        node.tree.write(f"/sys/bus/pci/devices/0000:{number:02x}:00.0/class", "0x030200\n")
    assert told("gpu-count", node) == [("warn", "node", "the PCI bus shows 9 GPUs, NVML 8")]


def test_w15_a_gpu_that_vanished_since_the_baseline_fails(node: Node, nvml: FakeNvml) -> None:
    later = with_baseline(node)
    del nvml.gpus[3]
    (result,) = run("gpu-count", later)
    assert (result.status.value, result.evidence) == ("fail", "GPU-3 of the baseline is gone")
    assert result.node_lost


# --- driver, bus, recovery ---------------------------------------------------------------------------


def test_a_library_of_another_version_than_the_driver_fails(tmp_path: Path) -> None:
    node = fake_node(tmp_path, NvmlError(NvmlCode.LIB_RM_VERSION_MISMATCH))
    (result,) = run("gpu-driver", node)
    assert result.status.value == "fail"
    assert "LIB_RM_VERSION_MISMATCH" in result.signal


def test_a_driver_other_than_the_configured_is_a_warning(node: Node) -> None:
    assert status("gpu-driver", node, expected="580.") == "ok"
    assert status("gpu-driver", node, expected="570.") == "warn"


@pytest.mark.parametrize(
    ("code", "action"), [(NvmlCode.GPU_IS_LOST, Action.REBOOT), (NvmlCode.RESET_REQUIRED, Action.RESET)]
)
def test_a_gpu_off_the_bus_fails_once_and_names_the_gpu(
    node: Node, nvml: FakeNvml, code: NvmlCode, action: Action
) -> None:
    calls = ("uuid", "memory", "recovery_action", "uncorrected_ecc", "remapped_rows", "pcie_link")
    nvml.errors = {(call, 3): code for call in (*calls, "throttle_reasons", "fabric", "nvlink_active")}
    (result,) = run("gpu-lost", node)
    assert (result.status.value, result.scope, result.action) == ("fail", "gpu 3", action)
    assert result.node_lost
    for name in ("gpu-recovery", "gpu-ecc", "gpu-row-remap", "gpu-pcie", "gpu-throttle", "gpu-fabric"):
        assert told(name, node) == [("skip", "gpu 3", "can't be read: see gpu-lost")]


@pytest.mark.parametrize("action", [a for a in RecoveryAction if a is not RecoveryAction.NONE])
def test_every_recovery_action_that_the_driver_asks_for_fails(
    node: Node, nvml: FakeNvml, action: RecoveryAction
) -> None:
    nvml.gpus[5].recovery_action = action
    (result,) = run("gpu-recovery", node)
    assert (result.status.value, result.scope) == ("fail", "gpu 5")
    assert action.name.replace("_", " ").lower() in result.evidence
    assert result.action is not Action.NONE


def test_a_recovery_action_that_nobody_knows_is_a_warning(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[5].recovery_action = 4711
    assert status("gpu-recovery", node) == "warn"


@pytest.mark.parametrize("driver", ["565.57.01", "535.183.06", "", "garbage"])
def test_w15_an_old_driver_skips_the_recovery_action_and_no_other_check(tmp_path: Path, driver: str) -> None:
    nvml = FakeNvml(2, driver=driver)
    nvml.gpus[0].recovery_action = RecoveryAction.GPU_RESET
    nvml.gpus[1].uncorrected_ecc = 1
    node = fake_node(tmp_path, nvml)
    assert status("gpu-recovery", node) == "skip"
    assert nvml.asked["recovery_action"] == 0
    assert status("gpu-ecc", node) == "fail"


# --- memory errors -----------------------------------------------------------------------------------


def test_uncorrectable_errors_count_from_the_baseline_of_this_boot(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[2].uncorrected_ecc = 3
    assert told("gpu-ecc", node) == [("fail", "gpu 2", "3 uncorrectable memory errors")]
    later = with_baseline(node)
    assert status("gpu-ecc", later) == "ok"
    nvml.gpus[2].uncorrected_ecc = 4
    assert told("gpu-ecc", later) == [("fail", "gpu 2", "1 uncorrectable memory errors")]
    later.tree.write("/proc/sys/kernel/random/boot_id", "another boot")
    assert told("gpu-ecc", dataclasses.replace(later)) == [("fail", "gpu 2", "4 uncorrectable memory errors")]


def test_retired_pages_that_wait_for_a_reset_fail(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[0].retired_pages_pending = True
    assert told("gpu-ecc", node) == [("fail", "gpu 0", "retired memory pages wait for a reset")]


def test_a_gpu_without_ecc_is_skipped(node: Node, nvml: FakeNvml) -> None:
    nvml.errors = {"uncorrected_ecc": NvmlCode.NOT_SUPPORTED}
    assert status("gpu-ecc", node) == "skip"


def test_a_failed_row_remap_fails_and_the_gpu_is_to_be_replaced(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[3].remapped_rows = RemappedRows(0, 9, pending=True, failure=True)
    (result,) = run("gpu-row-remap", node)
    assert (result.evidence, result.scope, result.action) == ("row remap failed", "gpu 3", Action.ISOLATE)


def test_a_pending_row_remap_fails_between_jobs_and_warns_inside_one(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[3].remapped_rows = RemappedRows(0, 1, pending=True, failure=False)
    assert status("gpu-row-remap", dataclasses.replace(node, stage=Stage.PROLOG)) == "fail"
    assert status("gpu-row-remap", dataclasses.replace(node, stage=Stage.RESTART)) == "warn"


# --- clocks, PCIe, MIG, fabric -----------------------------------------------------------------------


@pytest.mark.parametrize("reason", list(Throttle))
def test_a_gpu_slowed_down_by_heat_or_power_is_a_warning_or_as_configured(
    node: Node, nvml: FakeNvml, reason: Throttle
) -> None:
    nvml.gpus[1].throttle_reasons = reason | 0x1
    assert status("gpu-throttle", node) == "warn"
    assert status("gpu-throttle", node, severity="fail") == "fail"


@pytest.mark.parametrize("reasons", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100])
def test_an_idle_or_capped_gpu_is_not_throttled(node: Node, nvml: FakeNvml, reasons: int) -> None:
    nvml.gpus[1].throttle_reasons = reasons
    assert status("gpu-throttle", node) == "ok"


def test_fewer_pcie_lanes_fail(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[6].pcie_link = PcieLink(5, 5, 8, 16)
    assert told("gpu-pcie", node) == [("fail", "gpu 6", "x8 of x16 lanes")]


def test_a_slower_pcie_link_is_a_warning_under_load_only(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[6].pcie_link = PcieLink(1, 5, 16, 16)
    assert status("gpu-pcie", node) == "ok"
    nvml.gpus[6].utilization = 99
    assert told("gpu-pcie", node) == [("warn", "gpu 6", "generation 1 of 5 under load")]


def test_mig_is_compared_with_what_is_configured(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[1].mig_enabled = True
    assert status("gpu-mig", node) == "skip"
    assert told("gpu-mig", node, enabled=False) == [("fail", "gpu 1", "MIG is on")]
    assert len(failed(run("gpu-mig", node, enabled=True))) == 7


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (FabricState(0, 0), "ok"),
        (FabricState(1, 0), "fail"),
        (FabricState(2, 0), "fail"),
        (FabricState(3, 0), "ok"),
        (FabricState(3, 999), "fail"),
        (FabricState(77, 0), "ok"),
    ],
)
def test_a_fabric_registration_that_has_not_succeeded_fails(
    node: Node, nvml: FakeNvml, fabric: FabricState, expected: str
) -> None:
    nvml.gpus[4].fabric = fabric
    assert status("gpu-fabric", node) == expected


# --- leftovers of jobs -------------------------------------------------------------------------------


def test_a_process_on_the_jobs_gpu_fails_and_is_named(tmp_path: Path, nvml: FakeNvml) -> None:
    nvml.gpus[2].processes = [4711]
    nvml.gpus[7].processes = [4712]
    node = fake_node(tmp_path, nvml, Stage.PROLOG, job=JobContext(gpus=(0, 1, 2, 3)))
    node.tree.write("/proc/4711/comm", "python3\n")
    assert told("gpu-processes", node) == [("fail", "gpu 2", "processes of no job: python3 (4711)")]


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_8/step_0/user/task_0\n", "ok"),
        ("5:devices:/slurm/uid_1000/job_8/step_batch\n1:name=systemd:/\n", "ok"),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", "fail"),
        ("0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0\n", "fail"),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "fail"),
    ],
    ids=["another job", "another job, version 1", "its own job", "a job that has ended", "a login session"],
)
def test_jobs_that_share_a_gpu_are_no_leftovers_of_each_other(
    tmp_path: Path, nvml: FakeNvml, cgroup: str, expected: str
) -> None:
    nvml.gpus[2].processes = [4711]
    node = fake_node(tmp_path, nvml, Stage.EPILOG, job=JobContext("7", gpus=(2,)))
    node.tree.write("/proc/4711/cgroup", cgroup)
    node.tree.write("/proc/80/status", "Name:\tslurmstepd\nUid:\t0\t0\t0\t0\n")
    node.tree.write("/proc/80/cmdline", "slurmstepd: [8.0]")
    assert status("gpu-processes", node) == expected


def test_where_there_are_no_control_groups_the_parents_tell_whose_a_process_is(
    tmp_path: Path, nvml: FakeNvml
) -> None:
    """A job without GPUs is told of none, so all are looked at."""
    nvml.gpus[2].processes = [4711]
    node = fake_node(tmp_path, nvml, Stage.PROLOG, job=JobContext("7"))
    node.tree.write("/proc/4711/cgroup", "0::/system.slice/slurmd.service\n")
    node.tree.write("/proc/4711/status", "Name:\tpython3\nPPid:\t90\nUid:\t5\t5\t5\t5\n")
    assert status("gpu-processes", node) == "fail"
    node.tree.write("/proc/90/status", "Name:\tbash\nPPid:\t80\nUid:\t5\t5\t5\t5\n")
    node.tree.write("/proc/80/status", "Name:\tslurmstepd\nPPid:\t1\nUid:\t0\t0\t0\t0\n")
    node.tree.write("/proc/80/cmdline", "slurmstepd: [8.0]")
    assert status("gpu-processes", node) == "ok"


def test_daemons_that_belong_on_a_gpu_are_no_leftovers(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[2].processes = [1]
    node.tree.write("/proc/1/comm", "nvidia-cuda-mps-server\n")
    assert status("gpu-processes", node) == "ok"


def test_memory_that_no_process_holds_fails(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[2].memory = GpuMemory(80 << 30, 600 * MIB)
    assert told("gpu-memory", node) == [("fail", "gpu 2", "600 MiB in use by no process")]
    assert status("gpu-memory", node, left_mib=600) == "ok"
    assert status("gpu-memory", with_baseline(node)) == "ok"
    nvml.gpus[2].processes = [1]
    assert status("gpu-memory", node) == "ok"


# --- NVLink ------------------------------------------------------------------------------------------


def test_a_link_that_went_down_since_the_baseline_fails(node: Node, nvml: FakeNvml) -> None:
    later = with_baseline(node)
    nvml.gpus[0].links[4] = False
    assert told("nvlink-links", later) == [("fail", "gpu 0", "NVLink 4 down")]


def test_fewer_links_than_configured_fail(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[0].links[4] = False
    assert told("nvlink-links", node, expected=18) == [("fail", "gpu 0", "17 of 18 NVLinks active")]


def test_fewer_links_than_the_neighbours_are_only_a_warning(node: Node, nvml: FakeNvml) -> None:
    nvml.gpus[0].links[4] = False
    assert told("nvlink-links", node)[-1] == ("warn", "gpu 0", "17 NVLinks active, 18 on another GPU")


def test_a_link_that_cannot_be_read_is_a_warning(
    node: Node, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = with_baseline(node)
    real = nvml.nvlink_active

    def unreadable(gpu: int, link: int) -> bool:
        if (gpu, link) == (1, 7):
            raise NvmlError(NvmlCode.UNKNOWN)
        return real(gpu, link)

    monkeypatch.setattr(nvml, "nvlink_active", unreadable)
    assert told("nvlink-links", later) == [("warn", "gpu 1", "link 7 can't be read: NVML_ERROR_UNKNOWN")]


def test_gpus_without_nvlink_are_skipped(node: Node, nvml: FakeNvml) -> None:
    for gpu in nvml.gpus:
        gpu.links = {}
    assert status("nvlink-links", node) == "skip"
    assert status("nvlink-errors", node) == "skip"


def sample(node: Node, nvml: FakeNvml, errors: int) -> str:
    """A minute later, with so many errors on link 5 of GPU 2."""
    assert isinstance(node.clock, FakeClock)
    node.clock.advance(60)
    nvml.gpus[2].link_errors[5] = {NvLinkCounter.RECOVERY: errors, NvLinkCounter.REPLAY: 0}
    return status("nvlink-errors", dataclasses.replace(node))


def test_errors_in_more_than_half_of_the_window_fail_and_fade_again(node: Node, nvml: FakeNvml) -> None:
    assert [sample(node, nvml, n) for n in range(16)] == ["ok"] * 16
    assert sample(node, nvml, 16) == "fail"
    # 30 quiet samples push the flagged ones out of the window, the oldest first.
    quiet = [sample(node, nvml, 16) for _ in range(30)]
    assert quiet[0] == "fail"
    assert quiet[-1] == "ok"


def test_few_errors_however_large_do_not_fail(node: Node, nvml: FakeNvml) -> None:
    assert {sample(node, nvml, 10**9 * (n // 10)) for n in range(60)} == {"ok"}


def test_counters_that_begin_anew_are_no_errors(node: Node, nvml: FakeNvml) -> None:
    assert {sample(node, nvml, 1000 - n) for n in range(40)} == {"ok"}


def test_samples_that_come_too_soon_do_not_fill_the_window(node: Node, nvml: FakeNvml) -> None:
    sample(node, nvml, 0)
    nvml.asked.clear()
    for errors in range(40):
        nvml.gpus[2].link_errors[5] = {NvLinkCounter.RECOVERY: errors}
        assert status("nvlink-errors", dataclasses.replace(node)) == "ok"
    assert nvml.asked["nvlink_errors"] == 0


def test_a_boot_forgets_the_window(node: Node, nvml: FakeNvml) -> None:
    for errors in range(17):
        last = sample(node, nvml, errors)
    assert last == "fail"
    node.tree.write("/proc/sys/kernel/random/boot_id", "another boot")
    assert sample(node, nvml, 100) == "ok"


def test_w15_every_gpu_is_asked_once_by_every_check(node: Node, nvml: FakeNvml) -> None:
    """Not once per rank and GPU: N checks of N ranks would be N² questions."""
    for name in ("gpu-recovery", "gpu-ecc", "gpu-row-remap", "gpu-throttle", "gpu-pcie", "gpu-fabric"):
        run(name, node)
    once = ("recovery_action", "uncorrected_ecc", "remapped_rows", "throttle_reasons", "pcie_link", "fabric")
    assert [nvml.asked[call] for call in once] == [8] * len(once)
