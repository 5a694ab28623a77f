"""Dumps that the installed torch writes, of a real stall: gloo, where torch never dumps by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.attribution.flight_recorder import CulpritClass, analyze_directory, read_dump

WORLD = 4
LAST_CALL = {0: 5, 1: 5, 2: 4, 3: 5}
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of which one does not take part in the fifth collective."""
    meeting = tmp_path_factory.mktemp("gloo") / "meeting"
    script = Path(__file__).parent / "gloo_rank.py"
    environ = {
        **os.environ,
        "TORCH_FR_BUFFER_SIZE": "200",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [
        subprocess.Popen([*argv, str(rank), str(WORLD), str(meeting)], text=True, env=environ, **pipes)
        for rank in range(WORLD)
    ]
    try:
        for process in started:
            hear(process, "calls 5")
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.communicate()


def hear(process: subprocess.Popen[str], word: str) -> None:
    """Wait for a line that begins with ``word``."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    pytest.fail(f"a rank ended before it said {word!r}")


@pytest.mark.timeout(PATIENCE_S + 30)
@pytest.mark.parametrize("suffix", [".json", ".pickle"])
def test_the_rank_that_never_called_is_named(
    ranks: list[subprocess.Popen[str]], tmp_path: Path, suffix: str
) -> None:
    (tmp_path / "dumps").mkdir()
    paths = [tmp_path / "dumps" / f"trace_rank{rank}{suffix}" for rank in range(WORLD)]
    # A rank says that it calls a moment before it does, and its recorder learns of an end a moment later: ask
    # again until they have seen both.
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for process, path in zip(ranks, paths, strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            hear(process, "dumped")
        traces = {rank: read_dump(path) for rank, path in enumerate(paths)}
        groups = {rank: list(trace.groups.values()) for rank, trace in traces.items()}
        launched = {rank: max(state.enqueued for state in states) for rank, states in groups.items()}
        completed = {max(state.completed for state in states) for states in groups.values()}
        if launched == LAST_CALL and completed == {4}:
            break
    report = analyze_directory(tmp_path / "dumps", world_size=WORLD)
    assert [(culprit.rank, culprit.kind) for culprit in report.culprits] == [(2, CulpritClass.HOST_LAG)]
    assert report.victims == (0, 1, 3)
