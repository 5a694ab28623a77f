"""Fetching and writing Flight Recorder traces; the servers here are a few lines each."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nvrx_slurm.agent.flight_recorder import (
    NoTraceError,
    Trace,
    fetch_trace,
    prefix_environment,
    recorder_environment,
    write_trace,
)

EMPTY = b'{"pg_config":{},"version":"2.10"}'
FULL = b'{"entries":[{"record_id":0}],"version":"2.10"}'


def answer(status: str, body: bytes = b"", length: int | None = None) -> bytes:
    head = f"HTTP/1.1 {status}\r\nKeep-Alive: timeout=1\r\nContent-Length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


NOT_FOUND = answer("404 Not Found", b"no such handler")


def fetch(path: Path, answers: Mapping[str, bytes] | None, timeout_s: float = 5.0) -> Trace:
    """Ask a server that gives ``answers`` by handler; None: one that is silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        if answers is None:
            await reader.read()
        else:
            writer.write(answers[request.split()[1].removeprefix("/handler/")])
        writer.close()

    async def run() -> Trace:
        async with await asyncio.start_unix_server(serve, path):
            return await fetch_trace(3, 77, path, timeout_s)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("nccl", "others", "kept"),
    [
        (answer("200 OK", FULL), NOT_FOUND, FULL),
        (NOT_FOUND, answer("200 OK", FULL), FULL),
        (answer("200 OK", EMPTY), answer("200 OK", FULL), FULL),
        (NOT_FOUND, answer("200 OK", EMPTY), EMPTY),
    ],
)
def test_the_recorder_that_has_entries_is_taken(
    tmp_path: Path, nccl: bytes, others: bytes, kept: bytes
) -> None:
    trace = fetch(tmp_path / "s", {"dump_nccl_trace_json": nccl, "fr_trace_json": others})
    assert (trace.rank, trace.pid, trace.data) == (3, 77, kept)
    assert abs(trace.time - time.time()) < 60


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (NOT_FOUND, "it knows no Flight Recorder"),
        (answer("500 Internal Server Error"), "it answered 'http/1.1 500"),
        (answer("200 OK", FULL, length=10**12), "it answered 'http/1.1 200"),
        (answer("200 OK", FULL, length=len(FULL) + 1), "the answer is cut off"),
        (b"nonsense", "the answer is cut off"),
        (b"\r\n\r\n", "it answered"),
    ],
)
def test_what_is_no_trace_is_not_kept_and_the_reason_is(tmp_path: Path, said: bytes, why: str) -> None:
    with pytest.raises(NoTraceError, match=why):
        fetch(tmp_path / "s", {"dump_nccl_trace_json": said, "fr_trace_json": said})


def test_a_rank_that_does_not_answer_costs_no_more_than_the_time_given(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(NoTraceError, match=r"did not answer within 0\.2 s"):
        fetch(tmp_path / "s", None, 0.2)
    assert time.monotonic() - began < 30


def test_a_rank_without_a_server_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(NoTraceError, match="it has no RankMonitorClient"):
        asyncio.run(fetch_trace(0, 1, tmp_path / "nothing", 1.0))


def test_a_trace_and_its_manifest_are_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cycles" / "2" / "flight_recorder"
    write_trace(folder, Trace(3, 77, 1700000000.5, FULL), "n1", "123", 2)
    assert (folder / "rank_3").read_bytes() == FULL
    manifest = json.loads((folder / "rank_3.manifest.json").read_text())
    expected = {"rank": 3, "node": "n1", "job": "123", "cycle": 2, "pid": 77, "time": 1700000000.5}
    assert expected.items() <= manifest.items()
    assert sorted(path.name for path in folder.iterdir()) == ["rank_3", "rank_3.manifest.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_the_user_has_set_for_the_recorder_is_kept() -> None:
    assert recorder_environment({}) == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        assert "TORCH_FR_BUFFER_SIZE" not in recorder_environment({name: "0"})
    assert recorder_environment({"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    prefix = prefix_environment({}, "/run", 4)
    assert prefix == {"TORCH_FR_DUMP_TEMP_FILE": "/run/cycles/4/nccl_trace_rank_"}
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert prefix_environment({name: "/mine"}, "/run", 4) == {}
