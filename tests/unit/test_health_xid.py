"""Xids: parsing, the policy, and that a repaired node is not blamed again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from health_world import CHECKS, run, status, told

from nvrx_slurm.health.config import parse_config
from nvrx_slurm.health.kernel_log import KernelLogFile, KernelRecord, parse
from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.health.xid import Severity, XidEvent, load_policy, parse_switch_xid, parse_xid
from nvrx_slurm.testing.health import FakeKernelLog, fake_node

OFF_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return fake_node(tmp_path)


def say(node: Node, text: str) -> None:
    assert isinstance(node.kernel_log, FakeKernelLog)
    node.kernel_log.say(text)


def xid(code: int, rest: str = "pid=1, name=python") -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {code}, {rest}"


def test_an_xid_is_parsed() -> None:
    assert parse_xid(OFF_BUS) == XidEvent(
        79, "0000:3b:00", "pid=1234, name=python, GPU has fallen off the bus."
    )
    assert parse_xid("NVRM: GPU at PCI:0000:3b:00: GPU-1") is None
    assert parse_xid("somebody says NVRM: Xid (PCI:0000:3b:00): 79, x") is None


def test_an_xid_off_the_bus_loses_the_node(node: Node) -> None:
    say(node, OFF_BUS)
    (result,) = run("gpu-xid", node)
    assert (result.status.value, result.scope) == ("fail", "gpu 0000:3b:00")
    assert result.evidence == "Xid 79 GPU has fallen off the bus"
    assert result.node_lost


def test_an_xid_that_comes_again_is_told_once(node: Node) -> None:
    for _ in range(40):
        say(node, xid(95))
    assert told("gpu-xid", node) == [("fail", "gpu 0000:3b:00", "Xid 95 Uncontained ECC error, 40 times")]


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 68, 92, 94, 121, 126])
def test_xids_of_the_application_never_drain(node: Node, code: int) -> None:
    say(node, xid(code))
    assert status("gpu-xid", node) == "ok"


@pytest.mark.parametrize("code", [48, 54, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158])
def test_xids_of_broken_hardware_fail(node: Node, code: int) -> None:
    say(node, xid(code))
    assert status("gpu-xid", node) == "fail"


@pytest.mark.parametrize("code", [144, 150, 162, 9999])
def test_xids_to_watch_and_xids_that_nobody_knows_are_warnings(node: Node, code: int) -> None:
    say(node, xid(code))
    assert status("gpu-xid", node) == "warn"


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", "fail"),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", "fail"),
        ("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", "ok"),
        ("something else", "warn"),
    ],
)
def test_xid_154_says_itself_what_it_means(node: Node, detail: str, expected: str) -> None:
    say(node, xid(154, detail))
    assert status("gpu-xid", node) == expected


def test_the_site_has_the_last_word(node: Node) -> None:
    say(node, OFF_BUS)
    assert status("gpu-xid", node, severity={79: Severity.IGNORE}) == "ok"
    say(node, xid(13))
    text = "checks: {gpu-xid: {severity: {79: monitor, 13: isolate}}}"
    settings = parse_config(text, "x", CHECKS).of(CHECKS["gpu-xid"])
    assert [r.status.value for r in CHECKS["gpu-xid"].run(node, settings)] == ["warn", "fail"]


def test_fatal_errors_of_switches_fail_and_others_warn(node: Node) -> None:
    say(node, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress")
    assert status("gpu-xid", node) == "warn"
    say(node, "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")
    assert [s for s, _, _ in told("gpu-xid", node)] == ["warn", "fail"]
    assert parse_switch_xid("nvidia-nvswitch3: SXid (PCI:x): 1, Fatal") is None


def test_a_repaired_node_is_not_blamed_for_what_is_still_in_the_log(node: Node) -> None:
    say(node, OFF_BUS)
    take_baseline(node).save(node.state)
    later = dataclasses.replace(node)
    assert status("gpu-xid", later) == "ok"
    say(later, OFF_BUS)
    assert status("gpu-xid", later) == "fail"


def test_a_baseline_of_another_boot_hides_nothing(node: Node) -> None:
    say(node, OFF_BUS)
    take_baseline(node).save(node.state)
    node.tree.write("/proc/sys/kernel/random/boot_id", "another boot")
    assert status("gpu-xid", dataclasses.replace(node)) == "fail"


def test_xids_from_before_the_job_are_not_the_jobs(node: Node) -> None:
    say(node, OFF_BUS)
    node.clock.advance(100)
    job = JobContext("1", started=node.clock.now() - 50)
    assert status("gpu-xid", dataclasses.replace(node, job=job)) == "ok"
    earlier = JobContext("1", started=node.clock.now() - 150)
    assert status("gpu-xid", dataclasses.replace(node, job=earlier)) == "fail"


def test_a_prolog_looks_at_what_an_idle_node_has_logged(node: Node) -> None:
    """The job begins after that, and newer Slurm tells a prolog when."""
    say(node, OFF_BUS)
    node.clock.advance(100)
    job = JobContext("1", started=node.clock.now())
    prolog = dataclasses.replace(node, job=job, stage=Stage.PROLOG)
    assert status("gpu-xid", prolog) == "fail"
    take_baseline(node).save(node.state)
    assert status("gpu-xid", dataclasses.replace(prolog)) == "ok"
    say(node, OFF_BUS)
    node.clock.advance(100)
    later = dataclasses.replace(prolog, job=JobContext("2", started=node.clock.now()))
    assert status("gpu-xid", later) == "fail"


def test_a_clock_that_jumps_hides_no_xid_of_the_job(node: Node) -> None:
    say(node, "NET: Registered")
    take_baseline(node).save(node.state)
    say(node, OFF_BUS)
    epilog = dataclasses.replace(
        node, stage=Stage.EPILOG, job=JobContext("1", started=node.clock.now() + 3600)
    )
    assert status("gpu-xid", epilog) == "fail"


def test_a_kernel_log_that_may_not_be_read_is_skipped(node: Node) -> None:
    assert isinstance(node.kernel_log, FakeKernelLog)
    node.kernel_log.unavailable = UnavailableError("cannot be read: Operation not permitted", "/dev/kmsg")
    assert status("gpu-xid", node) == "skip"


def test_every_xid_of_the_policy_names_its_sources() -> None:
    policy = load_policy()
    assert policy.version
    assert all(entry.sources for entry in policy.entries.values())


# --- the log itself ----------------------------------------------------------------------------------


def test_records_of_the_kernel_are_parsed_with_their_continuation_left_out() -> None:
    data = b"6,339,5140900,-;NET: Registered\n SUBSYSTEM=net\n DEVICE=+net\n4,340,5690716,-;udevd\n"
    assert parse([data]) == [
        KernelRecord(339, 5.1409, "NET: Registered"),
        KernelRecord(340, 5.690716, "udevd"),
    ]


def test_what_a_program_has_written_to_the_log_is_not_the_kernels() -> None:
    # 12 is LOG_USER | LOG_WARNING: the kernel sets that facility for what comes from user space.
    assert parse([b"12,341,5690716,-;" + OFF_BUS.encode() + b"\n"]) == []


def test_a_recorded_log_is_read_as_the_device_is(tmp_path: Path) -> None:
    (tmp_path / "kmsg").write_bytes(b"4,1,2,-;one\n" * 5000)
    assert len(KernelLogFile(str(tmp_path / "kmsg")).records()) == 5000
    with pytest.raises(UnavailableError, match="No such file"):
        KernelLogFile(str(tmp_path / "none")).records()
