"""``nvrx-health``: exit codes, formats, baseline, explain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from health_world import CHECKS
from test_imports import imported

from nvrx_slurm.cli.health import main
from nvrx_slurm.health.reasons import Reason, parse_reason, reason_for
from nvrx_slurm.health.report import HealthReport
from nvrx_slurm.health.result import Action, CheckResult, Status
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.text import lines, prometheus, table, write_prometheus

COMMAND = Path(sys.executable).parent / "nvrx-health"


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with a configuration of site scripts alone."""
    scripts = tmp_path / "checks.d"
    scripts.mkdir(mode=0o755)
    config = tmp_path / "health.yaml"
    config.write_text(f"state_dir: {tmp_path}/state\nchecks: {{site-scripts: {{directory: {scripts}}}}}\n")
    config.chmod(0o600)
    return tmp_path


def script(site: Path, name: str, body: str) -> None:
    file = site / "checks.d" / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def check(site: Path, *words: object) -> Result:
    return invoke("check", "--config", site / "health.yaml", "--only", "site-scripts", *words)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_exit_codes_are_those_of_nagios(site: Path, code: int, expected: int) -> None:
    script(site, "x", f"echo because; exit {code}")
    assert check(site).exit_code == expected


def test_piped_output_is_one_line_per_finding_the_worst_first(site: Path) -> None:
    script(site, "a", "echo fine")
    script(site, "b", "echo broken; exit 2")
    found = check(site, "--stage", "prolog").output.splitlines()
    assert found[0] == (
        f"FAIL site-scripts script b: broken [{site}/checks.d/b]; do: what the script's author says"
    )
    assert found[1] == f"OK site-scripts script a: fine [{site}/checks.d/a]"
    assert found[2].startswith("FAIL: ")
    assert "prolog: 1 fail, 1 ok in" in found[2]


def test_the_json_document_says_everything(site: Path) -> None:
    script(site, "b", "echo broken; exit 2")
    document = json.loads(check(site, "--json").output)
    assert (document["schema"], document["status"], document["stage"]) == ("nvrx.health.v1", "fail", "manual")
    (result,) = document["results"]
    assert (result["check"], result["scope"], result["status"]) == ("site-scripts", "script b", "fail")
    assert result["signal"] == f"{site}/checks.d/b"
    assert result["remedy"]
    assert set(document["durations"]) == {"site-scripts"}


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--stage", "lunch"),
        ("check", "--only", "nope"),
        ("check", "--budget", "never"),
        ("check", "--config", "/nowhere/health.yaml"),
        ("nope",),
        ("explain", "nope"),
    ],
)
def test_wrong_usage_is_unknown_and_never_a_bad_node(words: tuple[str, ...]) -> None:
    done = invoke(*words)
    assert done.exit_code == 3
    assert "Traceback" not in done.output


def test_a_broken_configuration_is_unknown_with_one_sentence(site: Path) -> None:
    (site / "health.yaml").write_text("checks: {gpu-cuont: off}")
    done = check(site)
    assert done.exit_code == 3
    assert done.output.count("\n") == 1
    assert "did you mean gpu-count?" in done.output


def test_the_whole_check_runs_here_without_a_traceback(site: Path) -> None:
    done = subprocess.run(
        [COMMAND, "check", "--config", site / "health.yaml"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode in (0, 1), done.stdout
    assert done.stderr == ""
    assert "itself failed" not in done.stdout


def test_a_baseline_is_taken_and_kept_private(site: Path) -> None:
    done = invoke("baseline", "--config", site / "health.yaml")
    assert done.exit_code == 0
    assert done.output.startswith(f"baseline in {site}/state: ")
    assert (site / "state" / "baseline.json").stat().st_mode & 0o077 == 0


def test_a_baseline_that_cannot_be_kept_is_told(site: Path) -> None:
    (site / "state").write_text("a file")
    done = invoke("baseline", "--config", site / "health.yaml")
    assert done.exit_code == 3
    assert "cannot be written" in done.output


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_explains_itself(name: str, site: Path) -> None:
    done = invoke("explain", name, "--config", site / "health.yaml")
    assert done.exit_code == 0
    for word in ("runs at", "needs", "time-out", "drains", "configuration, under checks:"):
        assert word in done.output
    assert CHECKS[name].summary in done.output
    assert CHECKS[name].reads, "the docstring tells what it reads"


def test_explain_shows_what_the_site_has_changed(site: Path) -> None:
    (site / "health.yaml").write_text("checks: {gpu-count: {expected: 8}, clock: off}")
    said = invoke("explain", "gpu-count", "--config", site / "health.yaml").output
    assert "expected: 8  [default: null]" in said
    assert "clock" in invoke("explain", "--config", site / "health.yaml").output


# --- formats -----------------------------------------------------------------------------------------

REPORT = HealthReport(
    host="n1",
    stage=Stage.PROLOG,
    boot_id="b",
    ts=1795982672.5,
    seconds=0.25,
    results=(
        CheckResult(Status.OK, "fine", "s", check="a"),
        CheckResult(Status.FAIL, 'bad\n"\x1b[31m', "s", 'gpu "3"', "mend", Action.RESET, check="b"),
        CheckResult(Status.SKIP, "no GPU", check="c"),
        CheckResult(Status.SKIP, "no GPU", check="d"),
    ),
    durations={"a": 0.1, "b": 0.2},
)


def test_what_a_signal_holds_cannot_break_a_line() -> None:
    found = lines(REPORT)
    assert len(found) == 4
    assert all(line.isprintable() for line in found)


def test_checks_that_are_skipped_for_the_same_reason_are_one_line() -> None:
    assert "SKIP c d: no GPU" in lines(REPORT)


def test_the_table_has_a_row_per_finding() -> None:
    assert table(REPORT).row_count == 3


def test_prometheus_gets_the_worst_of_every_check_and_scope(tmp_path: Path) -> None:
    text = prometheus(REPORT)
    assert 'nvrx_check_status{check="a",scope="node"} 0' in text
    assert 'nvrx_check_status{check="b",scope="gpu \\"3\\""} 2' in text
    assert 'nvrx_check_status{check="c",scope="node"} 3' in text
    assert 'nvrx_check_duration_seconds{check="a"} 0.1' in text
    assert 'nvrx_check_timestamp_seconds{stage="prolog"} 1795982672.500' in text
    write_prometheus(REPORT, tmp_path / "nvrx.prom")
    assert (tmp_path / "nvrx.prom").read_text() == text
    assert os.listdir(tmp_path) == ["nvrx.prom"]


def test_a_textfile_that_cannot_be_written_changes_no_verdict(site: Path) -> None:
    script(site, "a", "exit 0")
    done = check(site, "--prom", "/nowhere/x.prom")
    assert done.exit_code == 0
    assert "/nowhere/x.prom cannot be written: No such file or directory" in done.output


# --- reasons -----------------------------------------------------------------------------------------


def test_a_reason_can_be_taken_apart_again() -> None:
    result = CheckResult(
        Status.FAIL, "row remap failed", "s", "gpu 3", "replace", Action.ISOLATE, check="gpu-row-remap"
    )
    text = str(reason_for(result, 1795982672.9))
    assert text == "nvrx:gpu-row-remap:gpu-3:isolate 1795982672 row remap failed"
    assert parse_reason(text) == Reason(
        "gpu-row-remap", "gpu-3", Action.ISOLATE, 1795982672, "row remap failed"
    )


@pytest.mark.parametrize(
    "text", ["", "Prolog error", "nvrx:", "nvrx:a:b:dance 1 x", "NVRX:a:b:reset 1 x", "my nvrx:a:b:reset 1 x"]
)
def test_a_reason_of_somebody_else_is_not_ours(text: str) -> None:
    assert parse_reason(text) is None


def test_a_reason_holds_nothing_that_slurm_would_stumble_over() -> None:
    result = CheckResult(Status.FAIL, 'it\'s "bad"\n`x`' * 40, "s", "path /a b;c", "r", check="paths")
    text = str(reason_for(result, 1.0))
    assert len(text) <= 200
    assert text.isprintable()
    assert not set(text) & set("\"'`\n")
    assert parse_reason(text) is not None


# --- start-up ----------------------------------------------------------------------------------------


def test_a_run_of_the_checks_imports_neither_torch_nor_what_it_does_not_need(site: Path) -> None:
    script(site, "a", "exit 0")
    config = str(site / "health.yaml")
    found = imported(str(COMMAND), "check", "--only", "site-scripts", "--config", config)
    heavy = ("torch", "numpy", "grpc", "asyncio", "rich", "pynvml", "psutil")
    assert not {name for name in found if name.split(".")[0] in heavy}
