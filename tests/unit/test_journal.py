"""The journal: written line by line, read back whatever happened to the writer."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm import journal
from nvrx_slurm.journal import (
    FaultDetected,
    FaultKind,
    JobEnded,
    JournalError,
    JournalFollower,
    JournalVersionError,
    JournalWriter,
    Progress,
    Record,
    decode_line,
    read_journal,
    writer,
)
from nvrx_slurm.journal.events import AnyEvent, Event

ENVELOPE = {"v": 1, "ts": 5.0, "job": "7", "attempt": 0, "cycle": 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def write(path: Path, *events: AnyEvent) -> list[Record]:
    journal = JournalWriter(path, "7", 1)
    records = [journal.append(3, event) for event in events]
    journal.close()
    return records


def test_a_line_is_the_contract(path: Path) -> None:
    write(path, FaultDetected(kind=FaultKind.EXIT, node="n1", rank=3, exit=1, detector="child"))
    line = json.loads(path.read_text())
    assert line.pop("ts") > 1e9
    assert line == {
        "v": 1,
        "job": "7",
        "attempt": 1,
        "cycle": 3,
        "event": "fault_detected",
        "kind": "exit",
        "node": "n1",
        "detector": "child",
        "rank": 3,
        "exit": 1,
    }


def test_every_event_has_the_name_of_its_class() -> None:
    for kind in Event.__subclasses__():
        words = "".join(f"_{char.lower()}" if char.isupper() else char for char in kind.__name__)
        assert kind.__struct_config__.tag == words.lstrip("_")
        assert kind.__name__ in journal.__all__


def test_what_was_written_is_read_back(path: Path) -> None:
    assert write(path, Progress(step=1), Progress(step=2)) == read_journal(path)


def test_times_never_go_back_even_if_the_clock_does(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JournalWriter(path, "7", 0)
    for _ in range(50):
        log.append(0, Progress(step=1))
        monkeypatch.setattr(writer.time, "time", lambda: 0.0)
    times = [record.ts for record in read_journal(path)]
    assert times == sorted(times)
    assert times[0] > 1e9


@pytest.mark.parametrize("torn", [b"", b'{"v":1,"ts":9', b"\n\n"])
def test_times_go_on_when_another_host_whose_clock_is_behind_continues(
    path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    (first,) = write(path, Progress(step=1))
    with path.open("ab") as file:
        file.write(torn)
    monkeypatch.setattr(writer.time, "time", lambda: first.ts - 3600)
    (second,) = write(path, Progress(step=2))
    assert second.ts >= first.ts
    assert [record.event for record in read_journal(path)] == [Progress(step=1), Progress(step=2)]


def test_the_file_is_its_owners_alone_and_is_appended_to(path: Path) -> None:
    write(path, Progress(step=1))
    write(path, Progress(step=2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [record.event for record in read_journal(path)] == [Progress(step=1), Progress(step=2)]


@pytest.mark.parametrize("torn", [b"{", b'{"v":1,"ts":1', b"\xff\xfe", b"\x00" * 100])
def test_a_torn_last_line_costs_that_line_alone(path: Path, torn: bytes) -> None:
    write(path, Progress(step=1))
    with path.open("ab") as file:
        file.write(torn)
    assert len(read_journal(path)) == 1
    write(path, Progress(step=2))
    follower = JournalFollower(path)
    assert [record.event for record in follower.read()] == [Progress(step=1), Progress(step=2)]
    assert follower.torn == 1


def test_a_line_that_a_full_disk_has_torn_costs_that_line_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = JournalWriter(path, "7", 0)
    real = os.write
    monkeypatch.setattr(writer.os, "write", lambda fd, data: real(fd, data[:20]))
    with pytest.raises(OSError, match="only 20 of"):
        log.append(0, Progress(step=1))
    monkeypatch.setattr(writer.os, "write", real)
    log.append(0, Progress(step=2))
    log.append(0, Progress(step=3))
    assert [record.event for record in read_journal(path)] == [Progress(step=2), Progress(step=3)]


def test_a_failed_write_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    log = JournalWriter(path, "7", 0)
    monkeypatch.setattr(writer.os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(0, Progress(step=1))


def test_verdicts_and_the_end_are_on_the_disk_when_they_are_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(writer.os, "fsync", synced.append)
    log = JournalWriter(path, "7", 0)
    log.append(0, Progress(step=1))
    assert synced == []
    log.append(0, JobEnded(code=0, why="done"))
    assert len(synced) == 1


# --- reading -----------------------------------------------------------------------------------------


def line(**fields: object) -> bytes:
    return json.dumps({**ENVELOPE, **fields}).encode()


def test_events_and_fields_of_later_versions_are_passed_over() -> None:
    assert decode_line(line(event="weather_changed", sky="grey")) is None
    record = decode_line(line(event="progress", step=4, mood="good"))
    assert record is not None
    assert record.event == Progress(step=4)


def test_a_journal_of_a_newer_format_is_refused(path: Path) -> None:
    newer = line(v=2, event="progress", step=4)
    with pytest.raises(JournalVersionError, match="version 2 is newer than 1: upgrade nvrx-slurm"):
        decode_line(newer)
    path.write_bytes(newer + b"\n")
    with pytest.raises(JournalVersionError):
        read_journal(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"not json",
        line(event="progress"),
        line(event="progress", step="four"),
        line(event="progress", step=4, cycle="2"),
        line(event="progress", step=4, cycle=-1),
        line(event="progress", step=4, cycle=2**60),
        line(event="progress", step=4, attempt=-1),
        line(event="progress", step=4, ts=-1.0),
        line(event="progress", step=4, ts=1e15),
        line(event="progress", step=4, ts=1e308),
        line(event="fault_detected", node="n1", detector="child", kind="mood"),
    ],
)
def test_what_is_no_journal_line_is_refused(text: bytes) -> None:
    with pytest.raises(JournalError, match="not a journal line"):
        decode_line(text)


def test_a_follower_takes_whole_lines_only(path: Path) -> None:
    (record,) = write(path, Progress(step=1))
    follower = JournalFollower(path)
    assert list(follower.read()) == [record]
    later = record.to_line()
    with path.open("ab") as file:
        file.write(later[:30])
        file.flush()
        assert list(follower.read()) == []
        file.write(later[30:])
        file.flush()
        assert list(follower.read()) == [record]
    assert follower.torn == 0


def test_empty_lines_are_not_torn_ones(path: Path) -> None:
    path.write_bytes(b"\n\n  \n")
    follower = JournalFollower(path)
    assert list(follower.read()) == []
    assert follower.torn == 0


def test_a_journal_that_is_not_there_is_an_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_journal(path)


text = st.text(max_size=20)
number = st.integers(-(2**53), 2**53)
count = st.integers(0, 2**53 - 1)
events = st.one_of(
    st.builds(Progress, step=number),
    st.builds(JobEnded, code=number, why=text),
    st.builds(
        FaultDetected,
        kind=st.sampled_from(FaultKind),
        node=text,
        detector=text,
        rank=st.none() | number,
        exit=st.none() | number,
        signal=st.none() | text,
        detail=text,
    ),
    st.builds(journal.CycleStarted, world_size=number, nodes=st.lists(text), spares=st.lists(text)),
    st.builds(journal.Verdict, action=st.sampled_from(journal.VerdictAction), rule=text, why=text),
)


@given(events, text, count, count)
def test_any_record_survives_its_line(event: AnyEvent, job: str, attempt: int, cycle: int) -> None:
    record = Record(ts=1.5, job=job, attempt=attempt, cycle=cycle, event=event)
    assert record.to_line().count(b"\n") == 1
    assert decode_line(record.to_line()) == record


@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    with contextlib.suppress(JournalError):
        decode_line(data)
