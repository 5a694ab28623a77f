"""The benchmark of in-process restart runs, and what it measures are recoveries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "inprocess.py"


def test_one_case_makes_a_document() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--json", "--runs", "1", "--case", "exception_gloo"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["name"] == "inprocess"
    rows = {row["metric"]: row for row in document["rows"]}
    assert {row["who"] for row in document["rows"]} == {"ours"}
    assert (rows["recovered"]["p50"], rows["recovered"]["n"]) == (3, 3), done.stderr
    # Far below the time-out of the group, which is what it takes without an abort.
    assert 0 < rows["recovery"]["p90"] < 25
