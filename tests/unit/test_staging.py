"""Output that waits for the Coordinator: in order, nothing lost, bounded, and no file that anybody finds."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.agent import staging
from nvrx_slurm.agent.output import OutputPump
from nvrx_slurm.agent.staging import MEMORY_MESSAGES, StagedQueue
from nvrx_slurm.wire.messages import LogChunk, LogEnd, LogMessage

T = TypeVar("T")
MIB = 1024 * 1024


def chunk(number: int, size: int = 8) -> LogChunk:
    return LogChunk(cycle=0, rank=0, ts=float(number), data=b"%0*d" % (size, number))


def run(coroutine: Coroutine[object, object, T]) -> T:
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def rest_of(queue: StagedQueue) -> list[LogMessage]:
    queue.finish()
    found = []
    while (message := await queue.get()) is not None:
        found.append(message)
    return found


@pytest.mark.parametrize("staged_bytes", [0, 4000, MIB])
@given(turns=st.lists(st.integers(0, 400), max_size=8))
def test_messages_come_out_as_they_went_in_whatever_is_full(
    staged_bytes: int, turns: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """By turns so many are put in, and so many taken out."""
    place = tmp_path_factory.getbasetemp()

    async def play() -> None:
        queue = StagedQueue(place, staged_bytes)
        put = taken = 0
        for turn, count in enumerate(turns):
            if turn % 2 == 0:
                for _ in range(count):
                    queue.put(chunk(put))
                    put += 1
            else:
                for _ in range(min(count, put - taken)):
                    assert await queue.get() == chunk(taken)
                    taken += 1
        assert await rest_of(queue) == [chunk(number) for number in range(taken, put)]
        queue.close()

    run(play())


def test_it_is_full_when_memory_and_file_are_and_has_room_when_much_has_gone(tmp_path: Path) -> None:
    async def play() -> None:
        queue = StagedQueue(tmp_path, staged_bytes=10 * 1000)
        put = 0
        while not queue.is_full:
            queue.put(chunk(put, size=900))
            put += 1
        assert MEMORY_MESSAGES + 5 < put < MEMORY_MESSAGES + 12
        assert not queue.has_room
        taken = 0
        while not queue.has_room:
            assert await queue.get() == chunk(taken, size=900)
            taken += 1
        assert put - taken < MEMORY_MESSAGES
        queue.close()

    run(play())


def test_nobody_finds_a_staged_file_by_its_name(tmp_path: Path) -> None:
    def opened() -> list[Path]:
        return [
            fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(str(tmp_path))
        ]

    async def play() -> None:
        queue = StagedQueue(tmp_path)
        for number in range(MEMORY_MESSAGES + 1):
            queue.put(chunk(number))
        (fd,) = opened()
        assert os.fstat(int(fd.name)).st_mode & 0o777 == 0o600
        assert list(tmp_path.iterdir()) == []
        queue.close()
        assert opened() == []

    run(play())


def test_without_unnamed_files_it_has_a_name_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging.os, "O_TMPFILE", os.O_DIRECTORY | os.O_CREAT, raising=False)
    fd = staging._open_unnamed(tmp_path)
    os.write(fd, b"x")
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_gone_leaves_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        queue = StagedQueue(tmp_path / "gone")
        for number in range(MEMORY_MESSAGES + 1):
            queue.put(chunk(number))
        assert queue.is_full
        assert len(await rest_of(queue)) == MEMORY_MESSAGES + 1

    run(play())
    assert caplog.text.count("output cannot be staged in") == 1


def written(pump: OutputPump, total: int) -> threading.Thread:
    """Have a thread write so many bytes into a pipe of ``pump`` and close it, as a rank does."""
    reader, writer = os.pipe()
    pump.add(reader, 0, 0, 0)

    def write() -> None:
        with os.fdopen(writer, "wb") as pipe:
            for number in range(total // 16):
                pipe.write(b"%015d\n" % number)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


async def ended(thread: threading.Thread, timeout_s: float) -> bool:
    await asyncio.get_running_loop().run_in_executor(None, thread.join, timeout_s)
    return not thread.is_alive()


def test_w18_a_rank_does_not_wait_for_a_coordinator_that_takes_nothing_and_nothing_is_lost(
    tmp_path: Path,
) -> None:
    """Twice what memory holds; its last line is there although nobody has read while it lived."""
    total = 32 * MIB

    async def play() -> None:
        pump = OutputPump("n1", staging=tmp_path)
        thread = written(pump, total)
        assert await ended(thread, 50)
        pump.finish()
        data, last = [], None
        async for message in pump.messages():
            if isinstance(message, LogChunk):
                data.append(message.data)
            last = message
        text = b"".join(data)
        assert len(text) == total
        assert text.splitlines() == [b"%015d" % number for number in range(total // 16)]
        assert last == LogEnd(cycle=0, rank=0)
        pump.close()

    run(play())


def test_without_a_local_disk_a_rank_waits_when_memory_is_full_and_then_goes_on(tmp_path: Path) -> None:
    total = 32 * MIB

    async def play() -> None:
        pump = OutputPump("n1")
        thread = written(pump, total)
        messages = pump.messages()
        await anext(messages)
        taken = 0
        assert not await ended(thread, 2.0)
        pump.finish()
        async for message in messages:
            taken += len(message.data) if isinstance(message, LogChunk) else 0
        assert taken == total
        assert await ended(thread, 10)
        pump.close()

    run(play())
