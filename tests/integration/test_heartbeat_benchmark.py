"""The benchmark of hang detection runs, and what it finds stays within what is promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "heartbeat.py"


def test_a_heartbeat_costs_the_rank_and_the_agent_next_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--json"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"name", "machine", "date", "rows"}
    found = {row["metric"]: row["p50"] for row in document["rows"]}
    assert found["send_heartbeat"] <= 1
    assert found["start_section_and_end_section"] <= 2
    assert found["cpu"] <= 1
    assert found["resident_memory"] <= 100
