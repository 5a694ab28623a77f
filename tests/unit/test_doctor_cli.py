"""The command ``nvrx-doctor``."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvrx_slurm.cli.doctor import World, main
from nvrx_slurm.doctor.machine import Machine
from nvrx_slurm.slurm import ScontrolDiagnosis
from nvrx_slurm.testing.slurm_commands import FakeSlurmCommands

CLONE = Path(__file__).resolve().parent.parent.parent
DATA = Path(__file__).parent / "data" / "doctor"
TEMPLATE = str(CLONE / "sbatch_templates" / "train_gpt.sbatch")
PYTHON = [sys.executable, "-c", "from nvrx_slurm.cli.doctor import main; main(prog_name='nvrx-doctor')"]
ENVIRON = {"PATH": "/nonexistent", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}
MACHINE = Machine(
    host="n1",
    python=(3, 12, 1),
    cgroup_version=2,
    shm_bytes=512 << 30,
    torch="2.13.0",
    nccl="2.27.7",
    py_spy="/opt/bin/py-spy",
    ptrace_scope=1,
    open_files=1048576,
    locked_memory=float("inf"),
    processes=float("inf"),
    infiniband=False,
    gpu_driver=None,
)


def golden(name: str, version: str = "22.05") -> str:
    return (DATA / version / f"{name}.txt").read_text()


def site(version: str, **jobs: str) -> FakeSlurmCommands:
    """Return a site whose jobs are ``job_ID=captured name``."""
    answers: dict[str, str | Exception] = {
        "scontrol ping": "Slurmctld(primary) at ctl is UP\n",
        "scontrol show config": golden("config", version),
        "sinfo": golden("nodes_unavail"),
    }
    shown = {f"scontrol -o show job {key.removeprefix('job_')}": golden(name) for key, name in jobs.items()}
    return FakeSlurmCommands({**answers, **shown})


def run(*arguments: str, commands: FakeSlurmCommands | None = None) -> Result:
    fake = commands or site("25.11")
    world = World(
        client=lambda: ScontrolDiagnosis({}, fake), machine=lambda: MACHINE, now=lambda: 1796046767.0
    )
    # On a terminal of any width the tables are made for 80 columns at least.
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, arguments, obj=world)


NO_SLURM = FakeSlurmCommands({"scontrol": FileNotFoundError("scontrol")})


# --- check -----------------------------------------------------------------------------------------------


def test_without_a_command_it_checks() -> None:
    done = run("--longest-step", "1m")
    assert done.exit_code == 0, done.output
    assert done.output == run("check", "--longest-step", "1m").output
    assert done.output.splitlines()[-1] == "37 ok"


def test_the_tables_are_readable_at_80_columns_and_piped() -> None:
    done = run(commands=site("22.05"))
    assert max(map(len, done.output.splitlines())) <= 80
    assert "\x1b" not in done.output
    for words in ("S9   ok     SlurmdTimeout", "→ slurm.conf: UnkillableStepTimeout=180", "heartbeat "):
        assert words in done.output


def test_a_broken_order_is_a_problem_and_exit_code_1() -> None:
    done = run("--longest-step", "20m", "--json")
    assert done.exit_code == 1
    found = json.loads(done.output)
    assert (found["schema"], found["command"], found["code"]) == ("nvrx.doctor.v1", "check", 1)
    assert [f["rule"] for f in found["findings"] if f["status"] == "problem"] == ["T1"]
    assert found["counts"] == {"ok": 36, "warn": 0, "problem": 1, "unknown": 0}
    assert found["timeouts"][0]["smallest_first"][0] == {
        "name": "longest step",
        "seconds": 1200.0,
        "known": True,
        "from": "--longest-step",
    }


@pytest.mark.parametrize("option", ["--heartbeat-timeout=5m", "--ft-rank-heartbeat-timeout=5m"])
def test_the_job_s_options_are_spelt_as_nvrx_srun_spells_them(option: str) -> None:
    found = json.loads(run(option, "--workers-stop-timeout", "40s", "--json").output)
    assert [f["rule"] for f in found["findings"] if f["status"] == "warn"] == ["T2", "T9"]


def test_no_limit_is_no_number_in_the_document() -> None:
    found = json.loads(run("--heartbeat-timeout", "none", "--json").output)
    heartbeat = next(r for r in found["timeouts"][0]["smallest_first"] if r["name"] == "heartbeat")
    assert (heartbeat["seconds"], heartbeat["known"]) == (None, True)


def test_a_slurm_that_cannot_be_asked_is_a_third_answer_and_never_0() -> None:
    done = run("--json", commands=NO_SLURM)
    assert done.exit_code == 1
    found = json.loads(done.output)
    unknown = [f["rule"] for f in found["findings"] if f["status"] == "unknown"]
    assert unknown == ["S1", "T1", "T7", "T9", "T10"]
    assert found["counts"]["problem"] == 0
    assert "not installed" in run(commands=NO_SLURM).output


# --- lint ------------------------------------------------------------------------------------------------


def test_our_template_has_nothing_to_complain_about() -> None:
    done = run("lint", TEMPLATE, commands=NO_SLURM)
    assert (done.exit_code, done.output) == (0, f"{TEMPLATE}: nothing to complain about\n")


def test_findings_are_shown_by_line_with_what_to_do(tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH -N4 --no-requeue\nnvrx-srun --spares 4 train.py | tee log\n")
    done = run("lint", str(script))
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert f"{script.name}:2: problem L6 --requeue: --no-requeue" in text
    assert f"{script.name}:3: problem L18 --spares" in text
    assert "→ #SBATCH --no-kill" in text
    found = json.loads(run("lint", str(script), "--json").output)
    assert {f["rule"]: f["line"] for f in found["findings"] if f["line"]} == {"L6": 2, "L16": 3, "L18": 3}
    assert found["findings"][-1]["text"] == "nvrx-srun --spares 4 train.py | tee log"


def test_a_finding_s_place_is_never_broken_into_two_lines(tmp_path: Path) -> None:
    script = tmp_path / ("a-long-name-" * 12 + ".sbatch")
    script.write_text(Path(TEMPLATE).read_text().replace("--open-mode=append", "--open-mode=truncate"))
    done = run("lint", str(script))
    assert done.output.splitlines()[0] == f"{script}:12: problem L7 --open-mode: truncate"


def test_warnings_alone_are_exit_code_0(tmp_path: Path) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(Path(TEMPLATE).read_text().replace("#SBATCH --requeue", "#"))
    done = run("lint", str(script))
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "1 warning")


# --- why -------------------------------------------------------------------------------------------------


def test_a_held_job_is_explained_with_the_command_that_releases_it() -> None:
    done = run("why", "17", commands=site("22.05", job_17="job_held_user"))
    assert done.exit_code == 1
    assert done.output.splitlines()[0] == "job 17 (train, user) is held: JobHeldUser"
    assert "→ the owner can: scontrol release 17" in done.output


def test_a_job_that_only_waits_is_exit_code_0() -> None:
    done = run("why", "15", "--json", commands=site("22.05", job_15="job_priority"))
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found["jobs"][0]["headline"] == "job 15 (train, user) waits: Priority"
    assert found["jobs"][0]["journal"] == []
    assert [f["rule"] for f in found["findings"]] == ["W2", "W3"]


def test_each_element_of_an_array_is_explained() -> None:
    done = run("why", "41", commands=site("22.05", job_41="job_array"))
    assert "job 41_0 " in done.output
    assert "job 41_[1-3%1] " in done.output


def test_a_running_job_tells_what_its_journal_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "nvrx" / "13"
    run_dir.mkdir(parents=True)
    record = {"v": 1, "ts": 1.0, "job": "13", "attempt": 0, "cycle": 0, "event": "verdict"}
    record |= {"action": "restart", "rule": "fault", "why": "rank 3"}
    (run_dir / "journal.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.chdir(tmp_path)
    done = run("why", "13", commands=site("22.05", job_13="job_running"))
    assert done.exit_code == 0
    assert "its journal, nvrx/13/journal.jsonl:" in done.output


def test_a_job_that_slurm_could_not_be_asked_about_is_a_third_answer() -> None:
    done = run("why", "17", "--json", commands=NO_SLURM)
    assert done.exit_code == 1
    assert [f["status"] for f in json.loads(done.output)["findings"]] == ["unknown"]
    assert "nothing is known" in run("why", "17", commands=NO_SLURM).output


def test_control_characters_of_a_stranger_s_job_do_not_reach_the_terminal() -> None:
    fake = site("22.05")
    evil = golden("job_held_user").replace("JobName=train", "JobName=\x1b]0;x\x07")
    fake.answers["scontrol -o show job 17"] = evil
    assert "\x1b" not in run("why", "17", commands=fake).output


# --- all of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lint", "/nonexistent/x.sbatch"], "nvrx-doctor: /nonexistent/x.sbatch: No such file or directory"),
        (["lint"], "Missing argument 'FILE'"),
        (["why", "n1"], "nvrx-doctor: 'n1' is no job id; accepted: 41, 41_2 (of an array)"),
        (["why", "9999"], "nvrx-doctor: Slurm does not know job 9999 (any more)"),
        (["check", "--heartbeat-timeout", "5x"], "is not a duration; accepted: 90s, 5m, 1.5h"),
        (["--no-such"], "No such option"),
        (["cure"], "No such command"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["check", "-h"], ["lint", "-h"], ["why", "-h"]])
def test_help_is_there_under_both_names(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 0


@pytest.mark.parametrize("arguments", [["--help"], ["check"], ["lint", TEMPLATE], ["why", "17"]])
def test_no_command_imports_torch(arguments: list[str]) -> None:
    argv = [sys.executable, "-X", "importtime", *PYTHON[1:], *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, env=ENVIRON, check=False)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "nvrx_slurm" in imported
    assert not {"torch", "grpc"} & imported
    if arguments == ["--help"]:
        assert "rich" not in imported


def test_help_takes_a_moment_only() -> None:
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    # Processor time, and the best of three: other tests run on this machine, too.
    took = []
    for _ in range(3):
        before = used()
        subprocess.run([*PYTHON, "--help"], capture_output=True, timeout=250, env=ENVIRON, check=True)
        took.append(used() - before)
    assert min(took) < 0.3


def test_every_rule_is_documented() -> None:
    from nvrx_slurm.doctor.lint_directives import DIRECTIVES
    from nvrx_slurm.doctor.lint_launch import LAUNCH
    from nvrx_slurm.doctor.machine import MACHINE as MACHINE_RULES
    from nvrx_slurm.doctor.site import CONFIG, SITE
    from nvrx_slurm.doctor.why import WHY

    groups = [*SITE.rules, *CONFIG.rules, *MACHINE_RULES.rules, *DIRECTIVES.rules, *LAUNCH.rules, *WHY.rules]
    numbers = [rule.number for rule in groups] + [f"T{number}" for number in range(1, 13)]
    assert len(set(numbers)) == len(numbers)
    documented = [
        line.split("|")[1].strip()
        for line in (CLONE / "docs" / "doctor.md").read_text().splitlines()
        if line.startswith("| ") and line[2] in "SMTLW" and line[3].isdecimal()
    ]
    assert documented == sorted(documented, key=lambda number: ("SMTLW".index(number[0]), int(number[1:])))
    assert set(documented) == set(numbers)
