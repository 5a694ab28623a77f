"""The checkpoint-iteration file: what it may hold, and that it makes nobody wait."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.coordinator import iteration_file
from nvrx_slurm.coordinator.iteration_file import IterationFile, IterationFileError, read_iteration


@pytest.mark.parametrize(
    ("text", "iteration"), [("0", 0), ("1200\n", 1200), ("  7 ", 7), (str(2**63 - 1), 2**63 - 1)]
)
def test_it_holds_one_integer(tmp_path: Path, text: str, iteration: int) -> None:
    path = tmp_path / "latest"
    path.write_text(text)
    assert read_iteration(path) == iteration


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "release", "1 2", "٣", "9" * 64, f"{2**63}", "1" + " " * 99]
)
def test_anything_else_is_refused_with_a_reason(tmp_path: Path, text: str) -> None:
    path = tmp_path / "latest"
    path.write_text(text)
    with pytest.raises(IterationFileError, match="one integer of 0 or more is accepted"):
        read_iteration(path)


def test_a_file_that_is_not_there_or_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(IterationFileError, match="No such file"):
        read_iteration(tmp_path / "latest")
    with pytest.raises(IterationFileError, match="not a regular file"):
        read_iteration(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(IterationFileError, match="not a regular file"):
        read_iteration(tmp_path / "pipe")


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A file system that answers when the event is set."""
    goes_on = threading.Event()

    def read(path: Path) -> int:
        goes_on.wait(100)
        return read_iteration(path)

    monkeypatch.setattr(iteration_file, "read_iteration", read)
    yield goes_on
    goes_on.set()


def test_w16_a_file_system_that_hangs_holds_one_reader_and_nobody_else(
    tmp_path: Path, hanging: threading.Event
) -> None:
    path = tmp_path / "latest"
    path.write_text("40")

    async def scene() -> int:
        file = IterationFile(path, timeout_s=0.05)
        with pytest.raises(IterationFileError, match="could not be read in"):
            await file.read()
        with pytest.raises(IterationFileError, match="still hangs"):
            await file.read()
        hanging.set()
        assert file._reader is not None
        file._reader.join(100)
        return await file.read()

    assert asyncio.run(scene()) == 40


def test_the_interpreter_does_not_wait_for_a_reader_that_hangs(
    tmp_path: Path, hanging: threading.Event
) -> None:
    async def scene() -> None:
        file = IterationFile(tmp_path / "latest", timeout_s=0.01)
        with pytest.raises(IterationFileError):
            await file.read()
        assert file._reader is not None
        assert file._reader.daemon

    asyncio.run(scene())
    assert not hanging.is_set()
