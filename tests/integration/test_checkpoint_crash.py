"""Killed at any moment: the newest committed checkpoint is there to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 400.0


@pytest.mark.timeout(PATIENCE_S + 30)
def test_killing_rank_and_worker_at_random_moments_loses_no_committed_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, CLONE / "benchmarks" / "checkpoint_crash.py", "--kills", "6", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    )
    counts = {row["metric"]: row["p50"] for row in json.loads(done.stdout)["rows"]}
    assert counts["committed_steps_lost_or_torn"] == 0
    assert sum(count for metric, count in counts.items() if metric.startswith("kills_of")) == 6
    assert any(metric.endswith("_rank") for metric in counts)
    assert any(metric.endswith("_worker") for metric in counts)
    assert list(tmp_path.iterdir()) == []
