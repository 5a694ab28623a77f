"""Whether a rank was killed for lack of memory is read from the kernel; here from files of our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.agent.oom import OomWatch

V1 = "25 20 0:30 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "26 20 0:31 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "24 20 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\ngarbage\n"


class Root:
    def __init__(self, path: Path, version: int, mounted: str = "/") -> None:
        self.path = path
        (path / "proc/self/ns").mkdir(parents=True)
        (path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
        self.mounts = path / "proc/self/mountinfo"
        self.mounts.write_text(OTHER + (V1 if version == 1 else V2).format(mounted=mounted))
        self.version = version
        base = "sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup"
        self.cgroups = path / base
        self.log = path / "dev/kmsg"
        self.log.parent.mkdir()
        self.log.write_text("6,1,1,-;booting\n6,2,2,-;Out of memory: Killed process 7 (old) total-vm:1kB\n")

    def rank(self, pid: int, cgroup: str = "/slurm/job_1/step_0") -> None:
        (self.path / f"proc/{pid}").mkdir()
        lines = {1: f"9:cpu,cpuacct:/\n4:memory:{cgroup}\n0::/\n", 2: f"0::{cgroup}\n"}
        (self.path / f"proc/{pid}/cgroup").write_text(lines[self.version])

    def count(self, kills: int, cgroup: str = "slurm/job_1/step_0") -> None:
        folder = self.cgroups / cgroup
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
            (folder / "memory.oom_control").write_text(text)
        else:
            text = f"low 0\nhigh 0\nmax 12\noom 3\noom_kill {kills}\noom_group_kill 0\n"
            (folder / "memory.events").write_text(text)

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(f"3,99,99,-;{text}\n")


@pytest.fixture(params=[1, 2], ids=["cgroup-v1", "cgroup-v2"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    made = Root(tmp_path, request.param)
    made.rank(7)
    made.rank(8)
    made.count(5)
    return made


@pytest.fixture
def watch(root: Root) -> Callable[[], OomWatch]:
    def begin() -> OomWatch:
        watching = OomWatch(root.path)
        watching.started([7, 8])
        return watching

    return begin


def test_without_a_new_kill_there_is_no_evidence(root: Root, watch: Callable[[], OomWatch]) -> None:
    assert watch().evidence(7) == ""


def test_a_new_kill_explains_one_death(root: Root, watch: Callable[[], OomWatch]) -> None:
    watching = watch()
    root.count(6)
    said = watching.evidence(7)
    assert said.startswith("the kernel has counted an out-of-memory kill in its cgroup /sys/fs/cgroup")
    assert said.endswith("/slurm/job_1/step_0")
    assert watching.evidence(8) == ""
    root.count(7)
    assert watching.evidence(8) != ""


def test_a_kill_of_some_time_ago_was_of_another_process(root: Root, watch: Callable[[], OomWatch]) -> None:
    watching = watch()
    root.count(6)
    watching.refresh()
    assert watching.evidence(7) != "", "it may have been this one"
    root.count(7)
    watching.refresh()
    watching.refresh()
    assert watching.evidence(8) == ""


def test_a_new_cycle_begins_at_what_has_been_counted(root: Root, watch: Callable[[], OomWatch]) -> None:
    watching = watch()
    root.count(6)
    watching.started([7, 8])
    assert watching.evidence(7) == ""


def test_the_kernel_log_names_the_process(root: Root, watch: Callable[[], OomWatch]) -> None:
    watching = watch()
    assert watching.evidence(7) == "", "the log before the start does not count"
    root.say("Memory cgroup out of memory: Killed process 7 (python) total-vm:123kB, anon-rss:99kB")
    assert watching.evidence(8) == ""
    assert watching.evidence(7) == "the kernel log says that process 7 was killed because memory ran out"


def test_the_log_of_another_pid_namespace_is_not_used(root: Root, watch: Callable[[], OomWatch]) -> None:
    link = root.path / "proc/self/ns/pid"
    link.unlink()
    link.symlink_to("pid:[4026532000]")
    watching = watch()
    root.say("Out of memory: Killed process 7 (python) total-vm:123kB")
    assert watching.evidence(7) == ""


@pytest.mark.parametrize("text", ["Killed process 7 (python)", "python[7]: Out of memory, killing 7"])
def test_a_kill_for_another_reason_is_no_evidence(
    root: Root, watch: Callable[[], OomWatch], text: str
) -> None:
    watching = watch()
    root.say(text)
    assert watching.evidence(7) == ""


@pytest.mark.parametrize("damage", ["no mounts", "no cgroup", "no log", "no count", "nonsense"])
def test_what_cannot_be_read_is_no_evidence(root: Root, watch: Callable[[], OomWatch], damage: str) -> None:
    match damage:
        case "no mounts":
            root.mounts.unlink()
        case "no cgroup":
            (root.path / "proc/7/cgroup").unlink()
        case "no log":
            root.log.unlink()
    watching = watch()
    files = [f for f in root.cgroups.rglob("memory.*") if f.is_file()]
    match damage:
        case "no count":
            for file in files:
                file.unlink()
        case "nonsense":
            for file in files:
                file.write_bytes(b"oom_kill many\n\xff\n")
    assert watching.evidence(7) == ""
    watching.refresh()
    watching.close()


def test_a_cgroup_below_a_mount_of_a_part_of_the_tree_is_found(tmp_path: Path) -> None:
    made = Root(tmp_path, 2, mounted="/slurm/job_1")
    made.rank(7, "/slurm/job_1/step_0")
    made.count(0, "step_0")
    watching = OomWatch(tmp_path)
    watching.started([7])
    made.count(1, "step_0")
    assert watching.evidence(7) != ""
