"""The file that a rank and its agent share: whose it may be, and what it must be."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from nvrx_slurm.wire import page
from nvrx_slurm.wire.page import PAGE_BYTES, HeartbeatPage
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, SectionTimeouts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank0.page"


def test_both_sides_see_the_same_page(path: Path) -> None:
    agent = HeartbeatPage.create(path)
    rank = HeartbeatPage.open(path)
    assert not agent.read().monitored
    rank.start_monitoring(1_000)
    assert agent.read().monitored
    assert agent.read().step is None
    rank.beat(7, 2_000)
    rank.beat(None, 3_000)
    reading = agent.read()
    assert (reading.heartbeats, reading.step, reading.last_heartbeat_ns) == (2, 7, 3_000)
    assert reading.last_sign_ns == 3_000
    agent.request_stop()
    assert rank.stop_requested
    rank.stop_monitoring()
    assert not agent.read().monitored


def test_a_page_is_its_owners_alone_and_takes_its_space_at_once(path: Path) -> None:
    HeartbeatPage.create(path).close()
    info = path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == PAGE_BYTES
    assert info.st_blocks * 512 >= PAGE_BYTES, "a full disk is noticed now, not by SIGBUS later"


def test_a_file_that_is_there_is_not_made_a_page(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        HeartbeatPage.create(path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("data", [b"", b"short", bytes(PAGE_BYTES - 1)])
def test_a_short_file_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"has {len(data)} bytes; a heartbeat page has {PAGE_BYTES}"):
        HeartbeatPage.open(path)


@pytest.mark.parametrize("data", [bytes(PAGE_BYTES), b"nvrxpag0" + bytes(PAGE_BYTES), b"x" * PAGE_BYTES])
def test_a_file_of_something_else_is_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is not a heartbeat page of this version"):
        HeartbeatPage.open(path)


def test_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    HeartbeatPage.create(tmp_path / "real").close()
    path.symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic links"):
        HeartbeatPage.open(path)


def test_another_users_page_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HeartbeatPage.create(path).close()
    monkeypatch.setattr(page.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match=f"belongs to uid {os.getuid()}"):
        HeartbeatPage.open(path)


def test_refusals_leave_no_descriptor_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    path.write_bytes(bytes(PAGE_BYTES))
    for _ in range(5):
        with pytest.raises(ValueError, match="not a heartbeat page"):
            HeartbeatPage.open(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_twice_is_closing(path: Path) -> None:
    opened = HeartbeatPage.create(path)
    opened.close()
    opened.close()


def test_a_shortened_page_is_no_new_sign_and_kills_nobody(path: Path) -> None:
    """A mapping would be SIGBUS to the reader."""
    agent, rank = HeartbeatPage.create(path), HeartbeatPage.open(path)
    agent.set_timeouts(HeartbeatTimeouts(subsequent=5), SectionTimeouts(section={"a": 1e300}))
    rank.start_monitoring(1_000)
    rank.beat(7, 2_000)
    rank.open_section(0, 2_500, True)
    before = agent.read(1)
    assert before.sections[0].timeout_ns == 10**18, "as long as possible"
    for size in (4096, 128, 100, 0):
        os.truncate(path, size)
        assert agent.read(1) == before
    agent.request_stop()
    assert agent.read(1) == before
    path.unlink()
    assert agent.read(1) == before


def test_a_full_place_is_named_and_nothing_is_left_in_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(page.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        HeartbeatPage.create(path)
    assert not path.exists()
