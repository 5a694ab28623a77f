"""The example of in-process restart goes through five faults, and its loss curve does not show them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Long enough a time for a step on a busy machine; should it not be, there is one restart more.
OPTIONS = [
    *("--layers", "1", "--heads", "2", "--width", "16", "--batch", "2", "--block", "16"),
    *("--steps", "16", "--ckpt-every", "5", "--soft-timeout", "3"),
]
FAULTS = ("3:1:exception", "6:0:hang", "8:0:exception", "11:1:hang", "14:1:exception")

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent / "benchmarks")]
from bench.ports import free_port  # noqa: E402
from gpt.losses import read_losses  # noqa: E402

# One after the other in the same processes: torch is imported once, and a wrapper is called twice.
PROGRAM = """
import json, sys
import train_inprocess
for argv in json.loads(sys.argv[1]):
    train_inprocess.main(argv)
"""


def train(*runs: list[str]) -> list[str]:
    """Return the output of each rank."""
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"PYTHONPATH": str(EXAMPLES), "TORCH_CPP_LOG_LEVEL": "error"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(runs)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return said


def test_five_faults_leave_no_trace_in_the_loss_curve(tmp_path: Path) -> None:
    faults = [word for fault in FAULTS for word in ("--fault", fault)]
    said = train(
        [*OPTIONS, "--out", str(tmp_path / "undisturbed")],
        [*OPTIONS, "--out", str(tmp_path / "disturbed"), *faults],
    )
    assert "".join(said).count("on purpose, before step") == len(FAULTS)
    undisturbed = read_losses(tmp_path / "undisturbed/loss.jsonl")
    assert sorted(undisturbed) == list(range(1, 17))
    # To the last bit: read_losses also compares the steps that were done again.
    assert read_losses(tmp_path / "disturbed/loss.jsonl") == undisturbed
