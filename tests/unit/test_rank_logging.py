"""Log records that say whose they are; works with nothing of ours around."""

from __future__ import annotations

import io
import logging
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvrx_slurm.fault_tolerance import RankFilter, RankFormatter, rank_handler

RANK = {"RANK": "5", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2", "SLURMD_NODENAME": "n3"}


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("train", logging.INFO, __file__, 1, "step %d", (7,), None)
    made.__dict__.update(extra)
    return made


def test_every_record_says_node_rank_local_rank_and_cycle() -> None:
    line = RankFormatter(environ=RANK).format(record())
    assert line.endswith(" INFO [n3 rank 5/1 cycle 2] train: step 7")


def test_without_a_launcher_what_is_not_known_is_a_dash() -> None:
    here = socket.gethostname().partition(".")[0]
    line = RankFormatter("%(node)s %(rank)s %(local_rank)s %(cycle)s %(message)s", {}).format(record())
    assert line == f"{here} - - - step 7"


def test_a_filter_passes_all_and_leaves_what_a_record_has() -> None:
    marked = record(rank="mine")
    assert RankFilter(RANK).filter(marked)
    assert (marked.__dict__["rank"], marked.__dict__["cycle"]) == ("mine", "2")


def test_a_handler_of_the_program_writes_stamped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    logger = logging.Logger("train")
    logger.addHandler(rank_handler(stream))
    logger.warning("loss is %s", "nan")
    assert stream.getvalue().endswith("WARNING [n3 rank 5/1 cycle 2] train: loss is nan\n")


def test_a_stamp_costs_next_to_nothing() -> None:
    stamp = RankFilter(RANK)
    best = min(_seconds(stamp, 1000) for _ in range(20))
    assert best / 1000 < 20e-6


def _seconds(stamp: RankFilter, count: int) -> float:
    records = [record() for _ in range(count)]
    began = time.perf_counter()
    for each in records:
        stamp.filter(each)
    return time.perf_counter() - began


def test_the_example_of_the_document_does_what_it_says() -> None:
    (example,) = (block for block in python_blocks() if "rank_handler" in block)
    done = subprocess.run(
        [sys.executable, "-c", example],
        env={**os.environ, **RANK},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stderr.endswith(" INFO [n3 rank 5/1 cycle 2] train: loss 0.250\n"), done.stderr


def python_blocks() -> list[str]:
    document = Path(__file__).resolve().parents[2] / "docs" / "ranks.md"
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.S | re.M)


def test_it_needs_no_torch_and_no_grpc() -> None:
    script = (
        "import logging, sys; from nvrx_slurm.fault_tolerance import rank_handler\n"
        "logging.basicConfig(handlers=[rank_handler()]); logging.error('x')\n"
        "sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("root: x\n")
