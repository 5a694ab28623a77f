"""Ranks' output on disk: raw per rank, and merged line by line in order of time."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.coordinator.rank_logs import RankLogs, last_lines
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.wire.messages import LogChunk, LogEnd, LogHello

NOW = 1_767_322_800.0


class Logs:
    """Logs in a folder, and the lines that were shown."""

    def __init__(self, path: Path, max_open_files: int = 256) -> None:
        self.path = path
        self.shown: list[tuple[int, bytes]] = []
        self.logs = RankLogs(
            RunDir(path), lambda _cycle, rank, text: self.shown.append((rank, text)), max_open_files
        )

    def say(self, rank: int, data: bytes, at: float = 0.0, node: str = "n1", cycle: int = 0) -> None:
        chunk = LogChunk(cycle=cycle, rank=rank, ts=NOW + at, data=data)
        self.logs.write(node, chunk, NOW + max(at, 10.0))

    def end(self, rank: int, cycle: int = 0) -> None:
        self.logs.write("n1", LogEnd(cycle=cycle, rank=rank), NOW + 10.0)

    def raw(self, rank: int, cycle: int = 0) -> bytes:
        return (self.path / f"cycles/{cycle}/rank_{rank}.log").read_bytes()

    def merged(self, cycle: int = 0) -> list[str]:
        """The merged lines without their times."""
        text = (self.path / f"cycles/{cycle}/merged.log").read_bytes().decode(errors="replace")
        stamp = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ")
        lines = text.split("\n")
        assert lines.pop() == ""
        assert all(stamp.match(line) for line in lines)
        return [stamp.sub("", line, count=1) for line in lines]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path)


def test_a_ranks_log_is_what_it_wrote_byte_by_byte(logs: Logs) -> None:
    pieces = [b"a\nb", b"", b"\x00\xff\r\n", "ü".encode()[:1], "ü".encode()[1:], b"\n\n", b"end"]
    for piece in pieces:
        logs.say(0, piece)
    logs.end(0)
    logs.logs.close()
    assert logs.raw(0) == b"".join(pieces)


def test_lines_are_put_together_from_pieces_of_each_rank(logs: Logs) -> None:
    logs.say(0, b"one ")
    logs.say(1, b"of the ot")
    logs.say(0, b"line\nand ")
    logs.say(1, b"her\n", node="n2")
    logs.say(0, b"half")
    logs.end(0)
    logs.logs.close()
    assert logs.shown == [(0, b"one line"), (1, b"of the other"), (0, b"and half")]
    assert logs.merged() == ["n1 rank 0: one line", "n2 rank 1: of the other", "n1 rank 0: and half"]


def test_the_end_of_a_line_comes_in_both_ways(logs: Logs) -> None:
    logs.say(0, b"a\r\nb\n\nc\rd\n")
    assert [text for _, text in logs.shown] == [b"a", b"b", b"", b"c\rd"]


def test_what_is_no_utf_8_is_kept_as_it_came(logs: Logs) -> None:
    logs.say(0, b"\xff\xfe\n")
    logs.logs.close()
    assert b"rank 0: \xff\xfe\n" in (logs.path / "cycles/0/merged.log").read_bytes()


def test_lines_of_several_nodes_are_merged_in_order_of_time(logs: Logs) -> None:
    for at, rank in ((0.3, 0), (0.1, 1), (0.2, 2), (0.1, 3)):
        logs.say(rank, f"at {at}\n".encode(), at)
    logs.logs.flush(NOW + 0.15)
    assert logs.merged() == ["n1 rank 1: at 0.1", "n1 rank 3: at 0.1"]
    logs.say(4, b"too late for its place\n", 0.05)
    assert logs.logs.waits
    logs.logs.close()
    assert logs.merged()[2:] == [
        "n1 rank 4: too late for its place",
        "n1 rank 2: at 0.2",
        "n1 rank 0: at 0.3",
    ]
    assert not logs.logs.waits


def test_a_clock_that_is_ahead_does_not_hold_lines_back(logs: Logs) -> None:
    chunk = LogChunk(cycle=0, rank=0, ts=NOW + 3600, data=b"from the future\n")
    logs.logs.write("n1", chunk, NOW)
    logs.logs.flush(NOW)
    assert logs.merged() == ["n1 rank 0: from the future"]


def test_a_line_without_an_end_is_broken_where_it_is_too_long(logs: Logs) -> None:
    for _ in range(5):
        logs.say(0, b"x" * 20_000)
    logs.end(0)
    assert [len(text) for _, text in logs.shown] == [80_000, 20_000]


def test_cycles_have_logs_of_their_own_also_when_output_comes_late(logs: Logs) -> None:
    logs.say(0, b"old, ", cycle=0)
    logs.say(0, b"new\n", cycle=1)
    logs.say(0, b"really\n", cycle=0)
    logs.logs.close()
    assert (logs.raw(0, 0), logs.raw(0, 1)) == (b"old, really\n", b"new\n")
    assert (logs.merged(0), logs.merged(1)) == (["n1 rank 0: old, really"], ["n1 rank 0: new"])


def test_an_end_without_a_beginning_and_a_greeting_write_nothing(logs: Logs) -> None:
    logs.end(0)
    logs.logs.write("n1", LogHello(node="n1"), NOW)
    logs.logs.close()
    assert list(logs.path.iterdir()) == []


@pytest.mark.parametrize(("cycle", "rank"), [(-1, 0), (0, -1)])
def test_numbers_below_0_name_no_file(logs: Logs, cycle: int, rank: int) -> None:
    logs.say(rank, b"evil\n", cycle=cycle)
    logs.logs.close()
    assert list(logs.path.rglob("*")) == []


def test_files_and_folders_are_their_owners_alone(logs: Logs) -> None:
    logs.say(0, b"secret\n")
    logs.logs.close()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in logs.path.rglob("*")}
    assert modes == {"cycles": 0o700, "0": 0o700, "rank_0.log": 0o600, "merged.log": 0o600}


def test_more_ranks_than_files_may_be_open(tmp_path: Path) -> None:
    logs = Logs(tmp_path, max_open_files=3)
    before = len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        for rank in range(8):
            logs.say(rank, f"{turn}\n".encode())
            assert len(os.listdir("/proc/self/fd")) <= before + 3
    logs.logs.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(logs.raw(rank) == b"0\n1\n2\n" for rank in range(8))


def test_cycles_that_are_over_hold_no_file_open(logs: Logs) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for cycle in range(20):
        for rank in range(4):
            logs.say(rank, b"line\nno end", cycle=cycle)
            logs.end(rank, cycle=cycle)
        logs.logs.flush(NOW + 100.0)
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        if cycle:
            logs.say(0, b"late\n", cycle=cycle - 1)
            logs.end(0, cycle=cycle - 1)
    logs.logs.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert sorted(logs.merged(3)) == sorted(
        [f"n1 rank {rank}: {text}" for rank in range(4) for text in ("line", "no end")] + ["n1 rank 0: late"]
    )


def test_a_link_in_a_files_place_is_not_followed(logs: Logs, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.touch()
    (tmp_path / "cycles" / "0").mkdir(parents=True)
    (tmp_path / "cycles" / "0" / "rank_0.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        logs.say(0, b"text\n")
    assert target.read_bytes() == b""


def test_lines_are_shown_and_memory_is_freed_where_nothing_can_be_written(logs: Logs) -> None:
    (logs.path / "cycles").touch()
    for number in range(3):
        with pytest.raises(OSError, match=r"exists|Not a directory"):
            logs.say(0, f"{number}\n".encode())
    assert [text for _, text in logs.shown] == [b"0", b"1", b"2"]
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        logs.logs.flush(NOW + 100)
    assert not logs.logs.waits


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=12) | st.just(b"\n")), max_size=30))
def test_no_byte_of_any_rank_is_lost_or_mixed_up(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, bytes]]
) -> None:
    logs = Logs(tmp_path_factory.mktemp("logs"))
    for rank, data in pieces:
        logs.say(rank, data)
    for rank in range(3):
        logs.end(rank)
    logs.logs.close()
    for rank in range(3):
        written = b"".join(data for of, data in pieces if of == rank)
        if written or any(of == rank for of, _ in pieces):
            assert logs.raw(rank) == written
        lines = written.split(b"\n")
        expected = lines[:-1] + ([lines[-1]] if lines[-1] else [])
        assert [text for of, text in logs.shown if of == rank] == [line.rstrip(b"\r") for line in expected]


# --- the end of a log --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\nc\n", ["b", "c"]),
        (b"a\nb\nc", ["b", "c"]),
        (b"x\n" * 100_000, ["x", "x"]),
        (b"\xff\nb\n", ["\N{REPLACEMENT CHARACTER}", "b"]),
    ],
)
def test_the_last_lines_of_a_log_are_found(tmp_path: Path, data: bytes, lines: list[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(data)
    assert last_lines(path, 2) == lines


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none", 5) == []
