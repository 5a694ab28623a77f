"""Checks of memory, clock, kernel, processes, services, device nodes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from health_world import run, status, told

from nvrx_slurm.health.checks.leftovers import parse_stat
from nvrx_slurm.health.node import JobContext, Node, ScontrolClock
from nvrx_slurm.health.programs import Finished
from nvrx_slurm.health.take_baseline import take_baseline
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.testing.health import FakeControllerClock, FakeKernelLog, FakePrograms, FakeTree, fake_node


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path / "root")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return fake_node(tmp_path)


def log_of(node: Node) -> FakeKernelLog:
    assert isinstance(node.kernel_log, FakeKernelLog)
    return node.kernel_log


# --- memory ------------------------------------------------------------------------------------------


def test_uncorrectable_memory_errors_fail_and_corrected_ones_warn(node: Node, tree: FakeTree) -> None:
    assert status("edac", node) == "skip"
    for number, (uncorrected, corrected) in enumerate([(0, 5), (0, 20_000), (1, 0)]):
        tree.write(f"/sys/devices/system/edac/mc/mc{number}/ue_count", f"{uncorrected}\n")
        tree.write(f"/sys/devices/system/edac/mc/mc{number}/ce_count", f"{corrected}\n")
    assert told("edac", node) == [
        ("warn", "memory mc1", "20000 corrected errors since boot"),
        ("fail", "memory mc2", "1 uncorrectable errors since boot"),
    ]


@pytest.mark.parametrize("garbage", ["", "none", "-", "1e9", "1_0", "\xb2", "9" * 30])
def test_an_error_counter_that_is_no_number_is_a_warning(node: Node, tree: FakeTree, garbage: str) -> None:
    tree.write("/sys/devices/system/edac/mc/mc0/ue_count", garbage)
    assert status("edac", node) == "warn"


def test_less_memory_than_configured_fails(node: Node) -> None:
    assert status("memory", node, total_gib=1000) == "ok"
    assert told("memory", node, total_gib=1500) == [("fail", "node", "1007.8 of 1500 GiB")]


def test_little_available_memory_is_a_warning(node: Node, tree: FakeTree) -> None:
    tree.write("/proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 49 kB\n")
    assert told("memory", node) == [("warn", "node", "4.9 % of memory available")]
    tree.write("/proc/meminfo", "MemTotal: lots\n")
    assert status("memory", node) == "warn"


# --- clock -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead_s", "expected"), [(0, "ok"), (0.9, "ok"), (-4, "ok"), (8, "warn"), (-8, "warn"), (62, "fail")]
)
def test_the_clock_is_compared_with_the_controllers(node: Node, ahead_s: float, expected: str) -> None:
    assert isinstance(node.controller, FakeControllerClock)
    node.controller.ahead_s = ahead_s
    assert status("clock", node) == expected


def test_the_controllers_time_is_read_from_scontrol() -> None:
    said = "Configuration data as of 2026-11-30T21:28:56\nAccountingStorageBackupHost = (null)\n"
    clock = ScontrolClock(FakePrograms({"scontrol": Finished(0, said)}))
    assert clock.now() == 1796074136.0


@pytest.mark.parametrize("said", ["", "slurm_load_ctl_conf error: Unable to contact slurm controller"])
def test_a_controller_that_cannot_be_asked_is_skipped(node: Node, said: str) -> None:
    broken = FakePrograms({"scontrol": Finished(1, "", said)})
    assert status("clock", dataclasses.replace(node, controller=ScontrolClock(broken))) == "skip"
    assert status("clock", dataclasses.replace(node, controller=ScontrolClock(FakePrograms()))) == "skip"


# --- kernel ------------------------------------------------------------------------------------------


def test_lockups_and_hung_tasks_are_found_in_the_kernel_log(node: Node) -> None:
    log = log_of(node)
    assert status("kernel-trouble", node) == "ok"
    log.say("INFO: task python3:4711 blocked for more than 122 seconds.")
    log.say("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4711]")
    assert [s for s, _, _ in told("kernel-trouble", node)] == ["warn", "warn"]
    log.say("watchdog: BUG: soft lockup - CPU#3 stuck for 45s! [python3:4711]")
    log.say("rcu: INFO: rcu_sched self-detected stall on CPU")
    assert [s for s, _, _ in told("kernel-trouble", node)] == ["fail", "warn"]


BROKEN_KERNEL = [
    "BUG: unable to handle page fault for address: ffffc90000000000",
    "Oops: 0000 [#1] PREEMPT SMP NOPTI",
    "Oops: Oops: 0002 [#3] SMP",
    "general protection fault, probably for non-canonical address 0xdead: 0000 [#1] SMP",
    "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12",
    "watchdog: CPU3: Watchdog detected hard LOCKUP on cpu 3",
    "watchdog: CPU 8 self-detected hard LOCKUP @ queued_spin_lock_slowpath",
]
FORGED = [
    *BROKEN_KERNEL,
    "Oops: ",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
    "watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [python3:4711]",
    "rcu: INFO: rcu_sched self-detected stall on CPU",
]


@pytest.mark.parametrize("text", BROKEN_KERNEL)
def test_a_kernel_that_has_crashed_fails_at_once(node: Node, text: str) -> None:
    log_of(node).say(text)
    assert status("kernel-trouble", node) == "fail"


@pytest.mark.parametrize(
    "message",
    [
        # {name}: 15 characters that a program may give itself; {path}: anything.
        "{name}[4711]: segfault at 0 ip 00007f sp 00007f error 4 in {path}[167ad8,7fbd66ab6000+156000]",
        "{name}: page allocation failure: order:5, mode:0x40dc0(GFP_KERNEL|__GFP_COMP|__GFP_ZERO)",
        "{name} invoked oom-killer: gfp_mask=0x140cca, order=0, oom_score_adj=0",
        "traps: {name}[4711] general protection fault ip:7f sp:7f error:0 in {path}[7f+1000]",
        "overlayfs: failed to resolve '{path}': -2",
        "process '{path}' launched '/bin/sh' with NULL argv: empty string added",
    ],
)
@pytest.mark.parametrize("words", FORGED)
def test_what_a_program_calls_itself_or_its_files_is_no_trouble_of_the_kernel(
    node: Node, words: str, message: str
) -> None:
    for _ in range(3):
        log_of(node).say(message.format(name=words[:15], path=words))
    assert (status("kernel-trouble", node), status("gpu-xid", node)) == ("ok", "ok")


def test_an_oops_fails_at_once(node: Node) -> None:
    log_of(node).say("BUG: unable to handle page fault for address: ffffc90000000000")
    assert status("kernel-trouble", node) == "fail"


def test_processes_killed_for_memory_are_a_warning(node: Node) -> None:
    log_of(node).say("Memory cgroup out of memory: Killed process 4711 (python3) total-vm:1kB, anon-rss:1kB")
    (result,) = run("oom", node)
    assert result.status.value == "warn"
    assert "python3 (4711), in a cgroup" in result.evidence


def test_without_the_kernel_log_the_own_cgroup_tells_of_memory(node: Node, tree: FakeTree) -> None:
    log_of(node).unavailable = UnavailableError("cannot be read: Operation not permitted", "/dev/kmsg")
    tree.write("/proc/self/cgroup", "0::/system.slice/job_1/step_0\n")
    events = "/sys/fs/cgroup/system.slice/job_1/step_0/memory.events"
    tree.write(events, "low 0\noom 0\noom_kill 0\n")
    assert status("oom", node) == "ok"
    tree.write(events, "low 0\noom 3\noom_kill 2\n")
    assert told("oom", node) == [("warn", "node", "oom_kill 2")]
    tree.write(events, "garbage")
    assert status("oom", node) == "skip"


# --- processes ---------------------------------------------------------------------------------------


def stat_line(pid: int, comm: str, state: str, started_s: float, parent: int = 1) -> str:
    zeros = " ".join(["0"] * 17)
    return f"{pid} ({comm}) {state} {parent} {zeros} {int(started_s * 100)} 0 0\n"


def test_old_processes_stuck_in_the_kernel_are_a_warning(node: Node, tree: FakeTree) -> None:
    old, young = node.clock.since_boot() - 400, node.clock.since_boot() - 10
    tree.write("/proc/10/stat", stat_line(10, "python3) D (", "D", old))
    tree.write("/proc/11/stat", stat_line(11, "ls", "D", young))
    tree.write("/proc/12/stat", stat_line(12, "kworker/0:1", "D", old, parent=2))
    tree.write("/proc/13/stat", "truncated (")
    assert told("leftovers", node) == [("warn", "node", "1 processes stuck in the kernel: python3) D ( (10)")]


def test_zombies_count_from_a_number_on(node: Node, tree: FakeTree) -> None:
    for pid in range(100, 111):
        tree.write(f"/proc/{pid}/stat", stat_line(pid, "rank", "Z", 0.0))
    assert status("leftovers", node) == "warn"
    assert status("leftovers", node, zombies=11) == "ok"


def test_the_stat_of_a_real_process_is_understood() -> None:
    process = parse_stat(Path(f"/proc/{os.getpid()}/stat").read_text())
    assert process is not None
    assert (process.pid, process.state) == (os.getpid(), "R")


# --- services, devices -------------------------------------------------------------------------------


def test_services_that_do_not_run_fail(node: Node) -> None:
    states = "active\ninactive\nactivating\n"
    node = dataclasses.replace(node, programs=FakePrograms({"systemctl": Finished(3, states)}))
    required = ("munge", "nvidia-fabricmanager", "dcgm")
    assert status("services", node) == "skip"
    assert told("services", node, required=required) == [
        ("fail", "service nvidia-fabricmanager", "inactive"),
        ("warn", "service dcgm", "activating"),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        Finished(1, "", "System has not been booted with systemd as init system"),
        Finished(0, "active"),
        Finished(0, "what ever"),
        UnavailableError("did not end within 2.5 s", "systemctl", expected=True),
    ],
)
def test_a_systemd_that_does_not_answer_is_a_warning(node: Node, answer: Finished | UnavailableError) -> None:
    node = dataclasses.replace(node, programs=FakePrograms({"systemctl": answer}))
    assert status("services", node, required=("munge", "sshd")) == "warn"


def test_missing_device_nodes_fail(node: Node, tree: FakeTree, tmp_path: Path) -> None:
    tree.write("/dev/nvidia0", "a file")
    (tree.at("/dev") / "null").symlink_to("/dev/null")
    assert status("devices", node) == "skip"
    assert status("devices", node, required=("/dev/null",)) == "ok"
    assert told("devices", node, required=("/dev/null", "/dev/nvidia0", "/dev/nvidia1")) == [
        ("fail", "device /dev/nvidia0", "is no device"),
        ("fail", "device /dev/nvidia1", "is not there"),
    ]


# --- what the job is, and windows --------------------------------------------------------------------


def test_the_kernel_log_counts_from_the_baseline_or_without_one_from_the_jobs_start(node: Node) -> None:
    log, clock = log_of(node), node.clock
    log.say("BUG: unable to handle page fault, of an earlier job")
    assert status("kernel-trouble", node) == "fail"
    clock.advance(10)  # type: ignore[attr-defined]
    of_job = dataclasses.replace(node, job=JobContext(started=clock.now()))
    assert status("kernel-trouble", of_job) == "ok"
    log.say("BUG: unable to handle page fault, of this job")
    assert status("kernel-trouble", of_job) == "fail"
    take_baseline(node).save(node.state)
    repaired = dataclasses.replace(of_job)
    assert status("kernel-trouble", repaired) == "ok"
    log.say("BUG: unable to handle page fault, after the repair")
    assert status("kernel-trouble", repaired) == "fail"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, JobContext()),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "5", "SLURM_JOB_GPUS": "0,1,5"},
            JobContext("7", 5, None, (0, 1, 5), 3),
        ),
        ({"SLURM_GPUS_ON_NODE": "4"}, JobContext(gpu_count=4)),
        ({"SLURM_JOB_GPUS": "x,y", "SLURM_JOB_UID": "-1", "SLURM_JOB_START_TIME": "\u0661"}, JobContext()),
        ({"SLURM_JOB_START_TIME": "1795982672"}, JobContext(started=1795982672)),
    ],
)
def test_the_job_is_read_from_slurms_environment(environ: dict[str, str], expected: JobContext) -> None:
    assert JobContext.from_environ(environ) == expected
