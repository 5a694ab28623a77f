"""A benchmark that is ended from outside takes everything down that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MARK = "BENCHMARK_UNDER_TEST"


def of_benchmark(mark: str) -> list[psutil.Process]:
    """Every process that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("arguments", "grown_up"),
    [
        (["heartbeat.py", "--quick"], 10),  # local_job, its agent's processes, and 8 ranks
        (["scale.py", "--nodes", "16"], 3),  # the Coordinator and all agents in one process
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_sigterm_leaves_neither_process_nor_directory(
    tmp_path: Path, arguments: list[str], grown_up: int, early: bool
) -> None:
    mark = uuid.uuid4().hex
    benchmark = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / arguments[0]), *arguments[1:]],
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        number = 2 if early else grown_up
        assert within(200, lambda: len(of_benchmark(mark)) >= number)
        assert list(tmp_path.iterdir()) != []
        for _ in range(3):  # those after the first change nothing
            benchmark.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        said = benchmark.communicate(timeout=200)[1]
        # Python's own end, when all is done, is open to signals again.
        assert benchmark.returncode in (1, -signal.SIGTERM), said
        assert "Aborted!" in said
        assert "…" in said, "progress was shown"
        assert "Traceback" not in said
        assert within(100, lambda: of_benchmark(mark) == []), of_benchmark(mark)
        assert list(tmp_path.iterdir()) == []
    finally:
        for process in of_benchmark(mark):
            process.kill()
        benchmark.wait(10)
