"""The command ``nvrx-report``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_journals import START, Writer, three_faults, write

PYTHON = [sys.executable, "-c", "from nvrx_slurm.cli.report import main; main(prog_name='nvrx-report')"]
ENVIRON = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent", "TZ": "UTC"}


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    argv = [*PYTHON, *map(str, arguments)]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=250, cwd=cwd, env=ENVIRON, check=False
    )


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    write(three_faults(), tmp_path / "journal.jsonl")
    return tmp_path


def test_the_report_of_a_finished_job_ends_with_its_summary(finished: Path) -> None:
    done = run(finished)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "job 4711 finished: code 0, all 8 ranks exited with 0"
    assert done.stdout.splitlines()[-1] == "finished: 3 faults, median 6.1 s lost each"


def test_json_prints_one_document(finished: Path) -> None:
    done = run(finished, "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["schema"] == "nvrx.report.v1"
    assert [(c["cause"]["rank"], c["cause"]["node"]) for c in found["cycles"][:3]] == [
        (3, "n2"),
        (5, "n3"),
        (None, "n2"),
    ]


def test_a_job_that_failed_is_still_a_report_that_was_printed(tmp_path: Path) -> None:
    write(three_faults()[:-1], tmp_path / "journal.jsonl")
    assert run(tmp_path).returncode == 0


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_there_under_both_names(option: str) -> None:
    done = run(option)
    assert done.returncode == 0
    assert "RUN_DIR|JOBID" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nonexistent/run"], "nvrx-report: /nonexistent/run does not exist: give the run directory"),
        (["4711"], "nvrx-report: no journal of job 4711 in nvrx/4711; Slurm does not tell"),
        ([], "Missing argument 'RUN_DIR|JOBID'"),
        (["--colour", "x"], "No such option"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    line = b'{"v":9,"ts":1.0,"job":"1","attempt":0,"cycle":0,"event":"x"}\n'
    (tmp_path / "journal.jsonl").write_bytes(line)
    done = run(tmp_path)
    assert done.returncode == 2
    assert "journal version 9 is newer" in done.stderr


def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    done = run(tmp_path, "--follow")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("journal.jsonl cannot be read: Is a directory\n")


def test_help_and_report_do_not_import_torch(finished: Path) -> None:
    for arguments in (["--help"], [str(finished)]):
        argv = [sys.executable, "-X", "importtime", *PYTHON[1:], *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=ENVIRON, check=True)
        assert "torch" not in done.stderr
        assert "grpc" not in done.stderr


def test_help_does_not_even_import_rich() -> None:
    argv = [sys.executable, "-X", "importtime", *PYTHON[1:], "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=ENVIRON, check=True)
    assert "rich" not in done.stderr


def test_a_reader_that_goes_away_is_no_error(finished: Path) -> None:
    for option in ("--full", "--json"):
        process = subprocess.Popen(
            [*PYTHON, str(finished), option],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRON,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=250) == 0
        assert process.stderr.read() == b""
        process.stderr.close()


# --- following -----------------------------------------------------------------------------------------


def following(path: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PYTHON, str(path), "--follow", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
    )


def test_following_waits_for_the_journal_and_prints_lines_then_the_report(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    process = following(path.parent)
    assert process.stderr is not None
    assert process.stdout is not None
    assert "waiting for the first event" in process.stderr.readline()
    path.parent.mkdir()
    records = three_faults(ended_at=time.time())
    write(records[:-1], path)
    first = process.stdout.readline()
    assert "attempt 0 on n1" in first
    with path.open("ab") as file:
        file.write(records[-1].to_line())
    rest = process.stdout.read()
    assert (process.wait(timeout=250), process.stderr.read()) == (0, "")
    lines = rest.splitlines()
    blank = lines.index("")
    assert "ended" in lines[blank - 1]
    assert blank >= 22
    assert lines[blank + 1] == "job 4711 finished: code 0, all 8 ranks exited with 0"
    assert lines[-1] == "finished: 3 faults, median 6.1 s lost each"


def test_ctrl_c_ends_following_with_the_report_so_far(tmp_path: Path) -> None:
    w = Writer()
    w.job_started(time.time() - START)
    write(w.records, tmp_path / "journal.jsonl")
    process = following(tmp_path)
    assert process.stdout is not None
    assert "attempt 0" in process.stdout.readline()
    assert process.stderr is not None
    os.kill(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert (process.wait(timeout=250), process.stderr.read()) == (0, "")
    assert "job 4711 is running (starting)" in rest


def test_following_with_json_prints_the_document_alone(finished: Path) -> None:
    process = following(finished, "--json")
    out, _ = process.communicate(timeout=250)
    assert json.loads(out)["state"] == "finished"


def test_on_a_terminal_the_report_is_drawn_live_and_left_there(finished: Path) -> None:
    import pty

    parent, child = pty.openpty()
    environ = {**ENVIRON, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen([*PYTHON, str(finished), "--follow"], stdout=child, stderr=child, env=environ)
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert process.wait(timeout=250) == 0
    assert b"finished: 3 faults, median 6.1 s lost each" in shown
