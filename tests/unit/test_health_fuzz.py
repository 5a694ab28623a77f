"""Whatever driver, kernel files and state files say: a clear result, no traceback, no failure by nonsense."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from health_world import CHECKS, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvrx_slurm.health.baseline import Baseline
from nvrx_slurm.health.checks.leftovers import parse_stat
from nvrx_slurm.health.checks.mounts import parse_mountinfo
from nvrx_slurm.health.config import ConfigError, parse_config
from nvrx_slurm.health.kernel_log import parse
from nvrx_slurm.health.node import JobContext, Node, ScontrolClock
from nvrx_slurm.health.nvml import NvmlCode
from nvrx_slurm.health.programs import Finished
from nvrx_slurm.health.reasons import parse_reason
from nvrx_slurm.health.result import Status
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.health.xid import parse_switch_xid, parse_xid
from nvrx_slurm.testing.health import FakeNvml, FakePrograms, FakeTree, fake_node

IN_PROCESS = [name for name in CHECKS if name not in ("paths", "space", "site-scripts", "node-service")]
"""Those that need no child process of their own."""
POSITIVE = {"gpu-lost": (NvmlCode.GPU_IS_LOST, NvmlCode.RESET_REQUIRED)}
"""Error codes that are a reading, and of which check."""
CALLS = [
    "count",
    "driver_version",
    "uuid",
    "pci_bus_id",
    "recovery_action",
    "uncorrected_ecc",
    "remapped_rows",
    "retired_pages_pending",
    "throttle_reasons",
    "pcie_link",
    "utilization",
    "processes",
    "mig_enabled",
    "memory",
    "fabric",
    "nvlink_active",
    "nvlink_errors",
]
SYSFS = [
    "/proc/meminfo",
    "/proc/self/mountinfo",
    "/proc/self/cgroup",
    "/proc/sys/kernel/random/boot_id",
    "/proc/1/stat",
    "/proc/fs/lustre/osc/a/import",
    "/sys/fs/lustre/health_check",
    "/sys/devices/system/edac/mc/mc0/ue_count",
    "/sys/devices/system/edac/mc/mc0/ce_count",
    "/sys/class/infiniband/mlx5_0/ports/1/state",
    "/sys/class/infiniband/mlx5_0/ports/1/phys_state",
    "/sys/class/infiniband/mlx5_0/ports/1/rate",
    "/sys/class/infiniband/mlx5_0/ports/1/counters/link_downed",
    "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error",
    "/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_errors",
    "/sys/bus/pci/devices/0000:1b:00.0/vendor",
]
# What a counter's garbage looks like; a plain number would be a reading.
GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(str.encode),
    st.sampled_from(
        [b"", b"\n", b"-1", b"nan", b"0x10", b"4: ", b"4: \0", b"7: X", b"9" * 40, b"(null)", b"\0" * 20]
    ),
).filter(lambda data: not data.strip().isdigit())


@contextlib.contextmanager
def healthy_node() -> Iterator[tuple[Node, FakeNvml]]:
    with tempfile.TemporaryDirectory() as folder:
        nvml = FakeNvml(2)
        FakeTree(Path(folder) / "root").add_port("mlx5_0")
        node = fake_node(Path(folder), nvml, job=JobContext("1", gpus=(0, 1), gpu_count=2))
        take_baseline(node).save(node.state)
        yield dataclasses.replace(node), nvml


def never_a_failure(name: str, node: Node) -> None:
    for result in run(name, node):
        assert result.status is not Status.FAIL, result
        assert "the check itself failed" not in result.evidence, result
        assert result.evidence


@pytest.mark.parametrize("code", [*NvmlCode, 31, 12345, -1])
def test_no_error_code_of_nvml_fails_a_node_by_itself(code: int) -> None:
    with healthy_node() as (node, nvml):
        for call in CALLS:
            nvml.errors = {call: code}
            for name in CHECKS:
                if name.startswith(("gpu-", "nvlink-", "nic-")) and code not in POSITIVE.get(name, ()):
                    never_a_failure(name, dataclasses.replace(node))


@pytest.mark.parametrize("path", SYSFS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=GARBAGE)
def test_garbage_in_a_kernel_file_fails_no_node(path: str, data: bytes) -> None:
    with healthy_node() as (node, _):
        node.tree.write(path, data)  # type: ignore[attr-defined]
        for name in IN_PROCESS:
            # Lustre says anything but healthy when it is not: that is a reading.
            if not (name == "lustre" and path.endswith("health_check")):
                never_a_failure(name, dataclasses.replace(node))


@pytest.mark.parametrize("path", SYSFS)
def test_a_directory_or_nothing_where_a_file_should_be_fails_no_node(path: str) -> None:
    with healthy_node() as (node, _):
        node.tree.at(path).unlink(missing_ok=True)
        for name in IN_PROCESS:
            never_a_failure(name, dataclasses.replace(node))
        node.tree.at(path).mkdir(parents=True)
        for name in IN_PROCESS:
            never_a_failure(name, dataclasses.replace(node))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.binary(max_size=300), st.sampled_from(["baseline", "strikes", "nvlink-errors"]), st.integers(0, 400)
)
def test_a_state_file_that_is_garbage_or_cut_off_fails_no_node(junk: bytes, name: str, cut: int) -> None:
    with healthy_node() as (node, _):
        run("nvlink-errors", node)
        assert node.state.path is not None
        file = node.state.path / f"{name}.json"
        whole = file.read_bytes() if file.exists() else b""
        for content in (junk, whole[:cut]):
            file.write_bytes(content)
            for check in IN_PROCESS:
                never_a_failure(check, dataclasses.replace(node))


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_a_kernel_log(data: bytes) -> None:
    for record in parse([data]):
        parse_xid(record.text)
        parse_switch_xid(record.text)


@settings(deadline=None)
@given(st.text(max_size=200))
def test_parsers_of_text_take_anything(text: str) -> None:
    parse_xid(text)
    parse_xid(f"NVRM: Xid (PCI:0000:3b:00): {text}")
    parse_switch_xid(text)
    parse_mountinfo(text)
    parse_stat(text)
    parse_reason(text)
    parse_reason(f"nvrx:{text}")


@settings(deadline=None)
@given(st.text(max_size=200))
def test_a_configuration_is_read_or_refused_with_one_line(text: str) -> None:
    for document in (text, f"checks: {{gpu-count: {text}}}"):
        said = ""
        try:
            parse_config(document, "x", CHECKS)
        except ConfigError as error:
            said = str(error)
        assert "\n" not in said


@settings(deadline=None)
@given(st.text(max_size=80))
def test_a_controllers_answer_is_a_time_or_unavailable(text: str) -> None:
    with healthy_node() as (node, _):
        controller = ScontrolClock(FakePrograms({"scontrol": Finished(0, text)}))
        never_a_failure("clock", dataclasses.replace(node, controller=controller))


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_JOB_UID"]), st.text()))
def test_the_environment_of_a_hook_may_hold_anything(environ: dict[str, str]) -> None:
    JobContext.from_environ(environ)


def test_a_baseline_of_a_node_without_anything_is_empty(tmp_path: Path) -> None:
    found = take_baseline(fake_node(tmp_path, stage=Stage.PROLOG))
    assert found == Baseline(boot_id=found.boot_id, taken=found.taken)
