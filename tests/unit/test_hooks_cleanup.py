"""Cleaning up after a job: its user's processes and files in /dev/shm, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.hooks.cleanup import LeftFile, Leftovers, LeftProcess, clean, find_leftovers

UID, OTHER = 61_501, 61_502
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as an epilog has it")

_PLAIN = "echo 1; exec sleep 600"
_DEAF = f"trap '' TERM; {_PLAIN}"


class People:
    """Starts processes of two users, and ends what is left of them."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, uid: int, program: str = _PLAIN) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", program], stdout=subprocess.PIPE, user=uid, group=uid, cwd="/"
        )
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def people() -> Iterator[People]:
    people = People()
    yield people
    people.end()


@pytest.fixture
def shm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory where all users can write, and reach it: as /dev/shm."""
    directory = Path("/dev/shm") / f"nvrx-test-{os.getpid()}"
    directory.mkdir()
    directory.chmod(0o1777)
    yield directory
    subprocess.run(["rm", "-rf", directory], check=True)


def _file(path: Path, uid: int) -> Path:
    path.write_text("x")
    os.chown(path, uid, uid)
    return path


def test_the_users_processes_are_ended_and_others_go_on(people: People, shm: Path) -> None:
    mine, deaf, other = people.start(UID), people.start(UID, _DEAF), people.start(OTHER)
    left = find_leftovers(UID, shm=shm)
    assert {process.pid for process in left.processes} == {mine.pid, deaf.pid}
    assert clean(left, UID) == ""
    assert mine.wait(100) == -signal.SIGTERM
    assert deaf.wait(100) == -signal.SIGKILL
    assert other.poll() is None


def test_the_users_files_are_removed_and_others_stay(shm: Path) -> None:
    mine, other = _file(shm / "mine", UID), _file(shm / "other", OTHER)
    tree = shm / "tree"
    tree.mkdir()
    os.chown(tree, UID, UID)
    _file(tree / "inner", UID)
    (shm / "link").symlink_to(other)
    os.lchown(shm / "link", UID, UID)
    left = find_leftovers(UID, shm=shm)
    assert [Path(file.path).name for file in left.files] == ["link", "mine", "tree"]
    assert clean(left, UID) == ""
    assert sorted(path.name for path in shm.iterdir()) == ["other"]
    assert not mine.exists()


ODD_NAME = os.fsdecode(b"\xff\nnvrx-health: node n9 drained \x1b[31m")


def test_a_file_may_have_any_name(shm: Path) -> None:
    path = _file(shm / ODD_NAME, UID)
    assert clean(find_leftovers(UID, shm=shm), UID) == ""
    assert not path.exists()
    other = _file(shm / ODD_NAME, OTHER)
    said = clean(find_leftovers(OTHER, shm=shm), UID)
    assert said == f"still there: 1 files: {shm}/  nvrx-health: node n9 drained  [31m"
    assert other.exists()


def test_what_came_after_the_question_belongs_to_somebody_else(people: People, shm: Path) -> None:
    path = _file(shm / "segment", UID)
    left = find_leftovers(UID, shm=shm)
    path.rename(shm / "old")
    fresh = _file(shm / "segment", UID)
    newcomer = people.start(UID)
    clean(left, UID)
    assert fresh.exists()
    assert newcomer.poll() is None


def test_a_process_id_that_has_a_new_owner_is_left_alone(people: People) -> None:
    process = people.start(UID)
    clean(Leftovers((LeftProcess(process.pid, 1, "sleep"),)), UID)
    assert process.poll() is None


def test_the_kernel_refuses_what_is_not_the_users(people: People, shm: Path) -> None:
    """Should the list be wrong: the work is done with the user's own rights."""
    process, path = people.start(OTHER), _file(shm / "other", OTHER)
    (found,) = find_leftovers(OTHER, shm=shm).processes
    status = path.stat()
    wrong = Leftovers((found,), (LeftFile(str(path), status.st_dev, status.st_ino),))
    assert clean(wrong, UID).startswith("still there: 1 processes: ")
    assert process.poll() is None
    assert path.exists()


def test_a_user_who_left_nothing_has_no_leftovers(shm: Path) -> None:
    assert not find_leftovers(UID, shm=shm)
