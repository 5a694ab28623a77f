"""Where the agent keeps what its ranks need."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from nvrx_slurm.agent.private_places import (
    make_private,
    new_private_dir,
    private_places,
    ram_dir_for_checkpoints,
    remove_places,
    staging_place,
)


def test_a_place_that_is_gone_is_made_again_for_its_owner_alone(tmp_path: Path) -> None:
    for _ in range(2):
        make_private(tmp_path / "mine")
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o700


def test_what_others_can_reach_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(mode=0o750)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    (tmp_path / "file").touch(0o600)
    for name in ("open", "link", "file"):
        with pytest.raises(PermissionError, match=f"{name} is no directory of uid"):
            make_private(tmp_path / name)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="own is no directory of uid"):
        make_private(tmp_path / "own")
    remove_places([tmp_path / "own"])
    assert (tmp_path / "own").exists(), "not one's own"


def test_what_a_rank_has_put_in_its_place_is_removed_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    remove_places([tmp_path / name for name in ("file", "folder", "link", "none")])
    assert list(tmp_path.iterdir()) == []


def test_the_second_place_is_in_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert private_places(Path("/dev/shm/a")) == [Path("/dev/shm/a"), tmp_path / "a"]
    assert private_places(tmp_path / "a") == [tmp_path / "a"]
    make_private(tmp_path / "a")
    remove_places(private_places(Path("/nowhere/a")))
    assert list(tmp_path.iterdir()) == []


def test_what_a_former_agent_of_the_node_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    environ = {"NVRX_NODE_LOCAL_TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    left, other_node = new_private_dir(environ, "n1"), new_private_dir(environ, "n2")
    other_job = new_private_dir({**environ, "SLURM_JOB_ID": "8"}, "n1")
    (left / "cycle0-rank0.page").touch()
    mine = new_private_dir(environ, "n1")
    assert {mine, other_node, other_job} == set(tmp_path.iterdir())


def test_what_killed_agents_have_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    environ = {"NVRX_NODE_LOCAL_TMPDIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    long_ago = time.time() - 3600
    ours = f"nvrx-{os.geteuid()}-7-"

    def made(name: str, mode: int = 0o700) -> Path:
        place = tmp_path / name
        place.mkdir()
        (place / "file").touch()
        place.chmod(mode)
        os.utime(place, (long_ago, long_ago))
        return place

    left = made(f"{ours}left")
    held = made(f"{ours}held")
    kept = [made(f"{ours}shared", 0o755), made(f"nvrx-{os.geteuid() + 1}-7-other"), made("mine"), held]
    young = tmp_path / f"{ours}young"
    young.mkdir(mode=0o700)
    target = made("target")
    (tmp_path / f"{ours}link").symlink_to(target)
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        fresh = new_private_dir(environ)
    finally:
        os.close(lock)
    assert not left.exists()
    assert all((place / "file").exists() for place in [*kept, target])
    assert young.exists()
    os.utime(fresh, (long_ago, long_ago))
    assert new_private_dir(environ) != fresh
    assert fresh.exists(), "its agent lives"


def test_output_is_staged_only_where_a_local_disk_is_named(tmp_path: Path) -> None:
    assert staging_place(tmp_path, {"NVRX_NODE_LOCAL_TMPDIR": "/local"}) == tmp_path
    assert staging_place(tmp_path, {}) is None


def test_checkpoints_in_memory_stay_while_agents_follow_each_other_on_a_node() -> None:
    environ = {"SLURM_JOB_ID": f"ram{os.getpid()}", "NVRX_NODE_LOCAL_TMPDIR": ""}
    first = ram_dir_for_checkpoints(environ, "n1")
    assert first is not None
    try:
        assert stat.S_IMODE(first.stat().st_mode) == 0o700
        (first / "part").write_text("content")
        os.utime(first, (0, 0))
        remove_places([new_private_dir(environ, "n1")])  # it clears what killed agents have left
        again = ram_dir_for_checkpoints(environ, "n1")
        assert again == first
        assert (first / "part").read_text() == "content"
        other = ram_dir_for_checkpoints(environ, "n2")
        assert other not in (None, first)
        remove_places([other or first])
    finally:
        remove_places([first])
    assert not first.exists()


def test_a_directory_in_memory_that_others_can_read_is_not_used() -> None:
    environ = {"SLURM_JOB_ID": f"open{os.getpid()}"}
    place = ram_dir_for_checkpoints(environ, "n1")
    assert place is not None
    try:
        place.chmod(0o755)
        assert ram_dir_for_checkpoints(environ, "n1") is None
    finally:
        remove_places([place])
