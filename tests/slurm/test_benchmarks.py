"""Every benchmark runs: quickly, to the end, with a document that other tools can read, leaving nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.devcluster.state import BASE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
QUICK_S = 150.0

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="a dev cluster needs root"),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="Slurm is not installed: run bin/nvrx-test"),
]


def test_the_quick_recovery_benchmark_ends_in_time_with_our_recovery_in_it() -> None:
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "recovery.py"), "--quick", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as benchmark:
        out, err = benchmark.communicate(timeout=QUICK_S + 60)

    assert benchmark.returncode == 0, err
    document = json.loads(out)
    assert list(document) == ["name", "machine", "date", "rows"]
    assert document["name"] == "recovery"
    for row in document["rows"]:
        assert list(row) == ["case", "who", "metric", "unit", "p50", "p90", "n"]
        assert 0 <= row["p50"] <= row["p90"]
        assert row["n"] >= 1
    ours = {row["metric"]: row for row in document["rows"] if row["who"] == "ours"}
    assert (ours["recovered"]["p50"], ours["recovered"]["n"]) == (1, 1), err
    assert set(ours) >= {"total", "detect", "stop", "form", "start", "import", "rendezvous", "load"}
    assert ours["total"]["p50"] < QUICK_S
    assert not (BASE / f"bench-{benchmark.pid}").exists()


def test_the_quick_hooks_benchmark_tells_what_a_prolog_takes_beside_the_floor() -> None:
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "hooks.py"), "--quick", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as benchmark:
        out, err = benchmark.communicate(timeout=240)

    assert benchmark.returncode == 0, err
    rows = {(row["case"], row["who"], row["metric"]): row for row in json.loads(out)["rows"]}
    runs = (("prolog", "floor"), ("prolog", "ours"), ("hook", "ours"))
    assert set(rows) == {(*run, what) for run in runs for what in ("time", "time_p99", "cpu")}
    floor, checks, hook = (rows[(*run, "cpu")]["p50"] for run in runs)
    assert floor < checks < hook < 2.0
    assert not (BASE / f"hooks{benchmark.pid}").exists()


def test_a_short_soak_finds_nothing_that_leaks_and_the_loss_curve_as_it_should_be() -> None:
    with subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "soak.py"), "--quick", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as benchmark:
        out, err = benchmark.communicate(timeout=280)

    assert benchmark.returncode == 0, err
    rows = {(row["case"], row["metric"]): row for row in json.loads(out)["rows"]}
    recovered = rows["all", "recovered"]
    assert recovered["p50"] == recovered["n"] > 1
    assert not (BASE / f"soak-{benchmark.pid}").exists()
