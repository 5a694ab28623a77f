"""Faults at random points of in-process restart: nothing hangs or is left, no rank ends without reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 300.0


@pytest.mark.timeout(PATIENCE_S + 30)
def test_faults_at_random_points_end_in_a_restart_or_a_documented_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CLONE / "benchmarks" / "inprocess_chaos.py", "--faults", "8", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = {row["metric"]: row["p50"] for row in json.loads(done.stdout)["rows"]}
    assert counts["broken_promises"] == 0
    assert counts["faults"] >= 8
