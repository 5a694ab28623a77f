"""Checks of file systems: mounts, paths that may hang, room."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from health_world import run, status, told

from nvrx_slurm.health.checks import paths as paths_check
from nvrx_slurm.health.checks.mounts import parse_mountinfo
from nvrx_slurm.health.checks.space import Room, SpaceSettings, _judge
from nvrx_slurm.health.isolation import Answer
from nvrx_slurm.health.node import JobContext, Node
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.testing.health import FakeTree, fake_node

MOUNTS = """22 1 0:20 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw,noatime - lustre 10.0.0.1@o2ib:/scratch rw,flock
31 22 0:41 / /home ro,noatime - nfs4 server:/home rw,vers=4.2
32 22 0:42 / /data\\040sets rw - tmpfs tmpfs rw
garbage
"""


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path / "root")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return fake_node(tmp_path)


# --- Lustre ------------------------------------------------------------------------------------------


def test_lustre_says_itself_whether_it_is_healthy(node: Node, tree: FakeTree) -> None:
    assert status("lustre", node) == "skip"
    tree.write("/sys/fs/lustre/health_check", "healthy\n")
    assert status("lustre", node) == "ok"
    tree.write("/sys/fs/lustre/health_check", "device scratch-MDT0000 reported unhealthy\nNOT HEALTHY\n")
    assert status("lustre", node) == "fail"
    tree.write("/sys/fs/lustre/health_check", "\n")
    assert status("lustre", node) == "warn", "it has said nothing"


def test_a_lustre_target_without_its_server_is_a_warning(node: Node, tree: FakeTree) -> None:
    tree.write("/sys/fs/lustre/health_check", "healthy\n")
    tree.write("/proc/fs/lustre/osc/scratch-OST0000-osc/import", "import:\n    state: FULL\n")
    tree.write("/proc/fs/lustre/osc/scratch-OST0001-osc/import", "import:\n    state: IDLE\n")
    assert status("lustre", node) == "ok"
    tree.write("/proc/fs/lustre/mdc/scratch-MDT0000-mdc/import", "import:\n    state: DISCONN\n")
    assert told("lustre", node) == [("warn", "node", "import is DISCONN")]


# --- mounts ------------------------------------------------------------------------------------------


def test_expected_mounts_are_compared_by_place_type_and_whether_they_can_be_written(
    node: Node, tree: FakeTree
) -> None:
    tree.write("/proc/self/mountinfo", MOUNTS)
    assert status("mounts", node) == "skip"
    assert status("mounts", node, expected={"/scratch/": "lustre", "/data sets": ""}) == "ok"
    assert status("mounts", node, expected={"/home": "nfs"}, read_only=("/home",)) == "ok"
    assert told("mounts", node, expected={"/scratch": "nfs", "/home": "nfs4", "/fast": ""}) == [
        ("fail", "path /scratch", "is lustre, not nfs"),
        ("fail", "path /home", "is read-only"),
        ("fail", "path /fast", "not mounted"),
    ]


def test_mounts_of_this_machine_are_understood() -> None:
    assert parse_mountinfo(Path("/proc/self/mountinfo").read_text())["/proc"][0] == "proc"


# --- paths -------------------------------------------------------------------------------------------


def test_paths_are_looked_at_listed_and_written(node: Node, tree: FakeTree) -> None:
    tree.write("/data/file", "x")
    assert status("paths", node) == "skip"
    for probe in ("stat", "list", "write"):
        assert status("paths", node, paths={"/data": probe}) == "ok"
    assert os.listdir(tree.at("/data")) == ["file"], "nothing is left behind"


def test_a_path_that_is_not_there_fails(node: Node) -> None:
    assert told("paths", node, paths={"/gone": "stat"}) == [
        ("fail", "path /gone", "stat: No such file or directory")
    ]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ESTALE, "fail"),
        (errno.EIO, "fail"),
        (errno.EROFS, "fail"),
        (errno.EACCES, "warn"),
        (errno.ENOSPC, "warn"),
        (errno.EDQUOT, "warn"),
    ],
)
def test_a_broken_file_system_fails_and_a_refusal_warns(
    node: Node, tree: FakeTree, monkeypatch: pytest.MonkeyPatch, code: int, expected: str
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    tree.write("/data/file", "x")
    monkeypatch.setattr(paths_check, "_write_and_read", refuse)
    (result,) = run("paths", node, paths={"/data": "write"})
    assert (result.status.value, result.evidence) == (expected, f"write: {os.strerror(code)}")


def test_data_that_comes_back_changed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverTheSame(bytes):
        def __ne__(self, other: object) -> bool:
            return True

        __eq__ = bytes.__eq__
        __hash__ = bytes.__hash__

    assert paths_check.try_path(tmp_path, "write") == paths_check.Tried(0)
    monkeypatch.setattr(paths_check.os, "urandom", NeverTheSame)
    assert paths_check.try_path(tmp_path, "write") == paths_check.Tried(errno.EIO, "write")


def test_a_path_that_hangs_fails_in_time_and_holds_up_no_other(
    node: Node, tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = paths_check.try_path

    def try_path(path: Path, probe: paths_check.Probe) -> paths_check.Tried:
        if path.name == "dead":
            signal.pause()
        return real(path, probe)

    monkeypatch.setattr(paths_check, "try_path", try_path)
    tree.write("/data/file", "x")
    began = time.monotonic()
    found = told("paths", node, paths={"/dead": "stat", "/data": "list"}, answer_s=4.0)
    assert found == [("fail", "path /dead", "no answer within 4 s")]
    assert time.monotonic() - began < 60.0


def test_a_path_whose_process_died_is_a_warning() -> None:
    result = paths_check._judge("/x", Answer(None, trouble="its process was killed by SIGKILL"))
    assert result is not None
    assert result.status.value == "warn"


# --- room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (Room(50.0, 50.0), []),
        (Room(9.0, 50.0), [("warn", "9.0 % of its space free")]),
        (Room(50.0, 0.5), [("fail", "0.5 % of its inodes free")]),
    ],
)
def test_little_room_warns_and_none_fails(room: Room, expected: list[tuple[str, str]]) -> None:
    found = _judge(room, "path /x", SpaceSettings())
    assert [(result.status.value, result.evidence) for result in found] == expected


def _step(tree: FakeTree, pid: int, name: str, uid: int, job: str) -> None:
    tree.write(f"/proc/{pid}/status", f"Name:\t{name}\nUmask:\t0022\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    tree.write(f"/proc/{pid}/cmdline", f"slurmstepd: [{job}.batch]\0" if job else "slurmstepd\0infinity\0")


@pytest.mark.parametrize(
    ("stage", "step", "expected"),
    [
        (Stage.PERIODIC, None, "fail"),
        (Stage.PERIODIC, ("slurmstepd", 0, "12"), "warn"),
        (Stage.EPILOG, ("slurmstepd", 0, "12"), "warn"),
        (Stage.PROLOG, ("slurmstepd", 0, "7"), "fail"),
        (Stage.PERIODIC, ("slurmstepd", 1001, "12"), "fail"),
        (Stage.PERIODIC, ("python3", 0, "12"), "fail"),
        (Stage.PERIODIC, ("slurmstepd", 0, ""), "fail"),
        (Stage.RESTART, ("slurmstepd", 0, "7"), "fail"),
    ],
    ids=["nobody", "a job", "another job", "its own", "a user's", "no step", "infinity", "inside the job"],
)
def test_what_a_running_job_fills_drains_no_node(
    node: Node, tree: FakeTree, stage: Stage, step: tuple[str, int, str] | None, expected: str
) -> None:
    """The job may fill /tmp and /dev/shm, and takes it along; what is left is found by the next hook."""
    tree.at("/tmp").mkdir()
    if step:
        _step(tree, 4711, *step)
    node = dataclasses.replace(node, stage=stage, job=JobContext("7"))
    assert status("space", node, paths=("/tmp",), warn_percent=100, fail_percent=100) == expected


def test_a_path_that_is_not_there_needs_no_room(node: Node, tree: FakeTree) -> None:
    tree.at("/tmp").mkdir()
    assert status("space", node, paths=("/tmp", "/nowhere"), warn_percent=0, fail_percent=0) == "ok"


# --- a process that no signal ends -------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a file system that hangs")
def test_a_hung_file_system_does_not_hang_the_whole_check(tmp_path: Path) -> None:
    """A FIFO stands for it: opening one blocks for ever, and the script that does is killed unwaited."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    scripts = tmp_path / "checks.d"
    scripts.mkdir(mode=0o755)
    script = scripts / "10-hang"
    script.write_text(f"#!/bin/sh\ntrap '' TERM INT HUP\ncat {fifo}\n")
    script.chmod(0o755)
    config = tmp_path / "health.yaml"
    config.write_text(f"checks: {{site-scripts: {{directory: {scripts}, answer_s: 1}}}}\n")
    config.chmod(0o600)
    tmp_path.chmod(0o755)
    began = time.monotonic()
    done = subprocess.run(
        [
            Path(sys.executable).parent / "nvrx-health",
            "check",
            "--only=site-scripts",
            f"--config={config}",
            f"--state-dir={tmp_path / 'state'}",
        ],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert time.monotonic() - began < 55.0
    assert done.returncode == 1
    assert "WARN site-scripts script 10-hang: did not end within 1 s" in done.stdout
