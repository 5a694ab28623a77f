"""Planted stragglers are named, in time, and nobody else is: with real ranks, agents and Coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "straggler_planted.py"


def test_one_of_each_kind_is_found_and_nobody_is_accused_without_a_cause() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) >= {"healthy", "throttled-node", "extra-work", "slow-loader", "all-slow", "fast-rank"}
    assert all(row["p50"] == row["n"] for row in rows.values()), done.stderr
