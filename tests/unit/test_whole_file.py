"""A file is replaced as a whole, whoever is killed or interferes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from nvrx_slurm.whole_file import replace_file, replace_link, replacing, temporary_file


def _draft_of(target: Path) -> Path:
    with temporary_file(target) as draft:
        return draft


def test_a_file_is_replaced_with_the_mode_that_is_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "state"
    target.write_text("old")
    old_mask = os.umask(0o077)
    try:
        replace_file(target, b"new")
        assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"new", 0o600)
        replace_file(target, b"newer", mode=0o644)
    finally:
        os.umask(old_mask)
    assert (target.read_bytes(), target.stat().st_mode & 0o777) == (b"newer", 0o644)
    assert os.listdir(tmp_path) == ["state"]


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "state"
    target.write_text("old")

    def fail() -> None:
        with replacing(target) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["state"]


def test_what_a_killed_writer_left_is_used_up_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "state"
    _draft_of(target).write_text("left by a killed writer, longer than what comes now")
    replace_file(target, b"new")
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["state"]


def test_a_link_where_the_draft_will_be_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "state"
    _draft_of(target).symlink_to(victim)
    replace_file(target, b"new")
    assert (victim.read_text(), target.read_text(), target.is_symlink()) == ("mine", "new", False)


def test_threads_do_not_write_into_one_draft(tmp_path: Path) -> None:
    target = tmp_path / "state"
    texts = [bytes([letter]) * 100_000 for letter in b"abcdefgh"]
    threads = [threading.Thread(target=replace_file, args=(target, text)) for text in texts for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() in texts
    assert os.listdir(tmp_path) == ["state"]


def test_a_link_is_turned_at_one_stroke(tmp_path: Path) -> None:
    link = tmp_path / "current"
    replace_link(link, Path("one"))
    replace_link(link, Path("two"))
    assert os.readlink(link) == "two"
    assert os.listdir(tmp_path) == ["current"]
