"""What ``nvrx-srun`` takes, and what it says about what it does not take."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nvrx_slurm.cli import srun_job
from nvrx_slurm.cli.srun import main
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.limits import Limits
from nvrx_slurm.coordinator.past import Past
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.wire.messages import ProgramKind

SCONTROL = """#!/bin/sh
case "$*" in
*"show job 7") echo 'JobId=7 JobName=x UserId=u(1) GroupId=u(1) JobState=RUNNING NodeList=n[1-3]' ;;
*"show job 8") echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1 ;;
*"show job 9") echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;
*"show node"*) echo "NodeName=n1 NodeAddr=$ADDRESS" ;;
esac
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``train.py``, inside job 7 of three nodes."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    (tmp_path / "train.py").touch()
    for name in list(os.environ):
        if name.startswith(("SLURM", "NVRX_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ADDRESS", "127.0.0.9")
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """Jobs that would have been run."""
    specs: list[JobSpec] = []

    def run_job(spec: JobSpec) -> int:
        specs.append(spec)
        return 75

    monkeypatch.setattr(srun_job, "run_job", run_job)
    return specs


def srun(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def refused(*arguments: str) -> str:
    """The sentence, whose line breaks are of the terminal's width."""
    done = srun(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


# --- what is refused ---------------------------------------------------------------------------------


def test_outside_of_an_allocation_the_two_ways_to_get_one_are_shown(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    said = refused("train.py")
    assert "not inside a Slurm allocation. Two ways to get one:" in said
    sbatch = "sbatch --no-kill --requeue --open-mode=append"
    assert f"{sbatch} -N 5 --wrap 'exec nvrx-srun --spares 1 train.py'" in said
    assert "salloc --no-kill -N 5 nvrx-srun --spares 1 train.py" in said
    said = refused("--dry-run", "--spares=2", "--max-restarts", "3", "train.py", "--spares", "7")
    typed = "nvrx-srun --dry-run --spares=2 --max-restarts 3 train.py --spares 7"
    assert f"-N 6 --wrap 'exec {typed}'" in said
    assert f"salloc --no-kill -N 6 {typed}" in said
    assert "nvrx-srun --spares 1 train.py --spares 2" in refused("train.py", "--spares", "2")


def test_an_argument_that_is_no_utf8_is_refused(here: Path, jobs: list[JobSpec]) -> None:
    assert r"args: 'a\udcff' is not UTF-8" in refused("train.py", os.fsdecode(b"a\xff"))
    assert jobs == []


@pytest.mark.parametrize(
    "option", ["--max-restarts", "--max-restarts-per-hour", "--ft-min-progress-iterations"]
)
def test_no_count_is_larger_than_what_can_be_sent_and_kept(
    here: Path, jobs: list[JobSpec], option: str
) -> None:
    said = refused(option, "9" * 30, "train.py").replace("'", "")
    assert f"{'9' * 30} is more than 2147483647" in said
    assert jobs == []


def test_a_task_of_srun_is_refused_because_it_would_start_the_job_once_per_task(
    here: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "3")
    said = refused("train.py")
    assert (
        "task of job step 7.3, but nvrx-srun starts srun itself: call it without srun, in the batch" in said
    )
    assert refused("--dry-run", "train.py") == said
    assert jobs == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (
            ["--nproc-per-node", "many", "train.py"],
            "'many': a number from 1 to 250, auto, gpu or cpu is accepted",
        ),
        (["--nproc-per-node", "0", "train.py"], "'0': a number from 1 to 250, auto, gpu or cpu is accepted"),
        (["--nproc-per-node", "²", "train.py"], "'²': a number from 1 to 250, auto, gpu or cpu is accepted"),
        (["--spares", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--spares", "some", "train.py"], "'some' is not a valid integer"),
        (["--spares", "3", "train.py"], "--spares: 3 of 3 nodes leave none to train on"),
        (
            ["--nnodes", "4:2", "train.py"],
            "--nnodes '4:2': MIN:MAX or one number is accepted, 0 < MIN <= MAX",
        ),
        (["--nnodes", "0:2", "train.py"], "MIN:MAX or one number is accepted"),
        (["--nnodes", "²", "train.py"], "MIN:MAX or one number is accepted"),
        (["--nnodes", "1:2:3", "train.py"], "MIN:MAX or one number is accepted"),
        (["--nnodes", "4:8", "train.py"], "--nnodes 4:8: this job has only 3 nodes"),
        (
            ["--nnodes", "2", "train.py"],
            "--nnodes 2: this job has 3 nodes; --nnodes 2:3 keeps the rest as spares",
        ),
        (["--nnodes", "1:2", "train.py"], "--nnodes 1:2: this job has 3 nodes; --nnodes 1:3 keeps the rest"),
        (["--nnodes", "1:3", "--spares", "1", "train.py"], "leaves 2 of 3 nodes as spares, --spares says 1"),
        (["--nnodes", "2:2", "--spares", "1", "train.py"], "--nnodes 2:2: this job has 3 nodes"),
        (["--ft-segment", "2", "train.py"], "--ft-segment 2: the 3 nodes that train are no multiple of 2"),
        (["--ft-segment", "0", "train.py"], "0 is not in the range x>=1"),
        (["--replacement-group-size", "0", "train.py"], "0 is not in the range x>=1"),
        (["--rejoin-timeout", "soon", "train.py"], "'soon' is not a duration"),
        (["--max-restarts", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--workers-stop-timeout", "soon", "train.py"], "'soon' is not a duration; accepted: 90s, 5m, 1.5h"),
        (["--workers-stop-timeout", "none", "train.py"], "'none' is not a duration"),
        (["--heartbeat-timeout", "0", "train.py"], "a duration above 0 is needed, or none"),
        (["--initial-heartbeat-timeout", "x", "train.py"], "accepted: 90s, 5m, 1.5h, none"),
        (["--ft-max-no-progress-cycles", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--ft-min-progress-iterations", "0", "train.py"], "0 is not in the range x>=1"),
        (["--ft-no-restart-exit-code", "75", "train.py"], "1 to 255 but 1, 2, 75 is accepted"),
        (["--ft-no-restart-exit-code", "0", "train.py"], "0 is not in the range 1<=x<=255"),
        (["--max-restarts-per-hour", "0", "train.py"], "0 is not in the range x>=1"),
        (["--exclude-after", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--time-limit-margin", "-1", "train.py"], "accepted: 90s, 5m, 1.5h"),
        (["--warm-start", "maybe", "train.py"], "'maybe' is not one of 'on', 'off'"),
        (["--no-such-option", "train.py"], "No such option '--no-such-option'"),
        (["missing.py"], "SCRIPT: missing.py is not a file"),
        (["."], "SCRIPT: . is not a file"),
        (["--no-python", "no-such-program"], "SCRIPT: no-such-program is not an executable"),
        (["--module", "--no-python", "x"], "--module and --no-python exclude each other"),
        (["-m", "pakage.train"], "finds no module pakage.train in "),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_is_accepted(
    here: Path, arguments: list[str], says: str
) -> None:
    said = refused(*arguments)
    assert says.replace("'", "") in said.replace("'", "")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("8", "cannot find out the nodes of job 8: `scontrol -o show job 8`: slurm_load_jobs error: Unable"),
        ("9", "cannot find out the nodes of job 9: Slurm does not know job 9"),
        ("10", "cannot find out the nodes of job 10: Slurm does not know job 10"),
    ],
)
def test_slurm_that_does_not_tell_the_nodes_is_quoted(
    here: Path, monkeypatch: pytest.MonkeyPatch, job: str, says: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", job)
    assert says in refused("train.py")


def test_a_machine_without_slurm_says_so(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "scontrol is not installed or not on PATH" in refused("train.py")


def test_a_run_directory_in_use_or_out_of_reach_is_named(here: Path) -> None:
    lock = RunDir(here / "run").claim()
    assert "run is in use by another nvrx-srun" in refused("--run-dir", "run", "train.py")
    os.close(lock)
    assert "train.py/run: Not a directory" in refused("--run-dir", "train.py/run", "train.py")


def test_a_journal_of_a_newer_version_is_refused(here: Path) -> None:
    directory = RunDir(here / "run")
    os.close(directory.claim())
    directory.journal.write_text('{"v":99,"ts":1,"job":"7","attempt":0,"cycle":0,"event":"x"}\n')
    assert "journal version 99 is newer than 1: upgrade nvrx-slurm" in refused("--run-dir", "run", "train.py")


def test_a_host_that_no_node_can_reach_is_said(
    here: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADDRESS", "no-such-node.invalid")
    done = srun("train.py")
    assert done.exit_code == 1
    assert "no address of this host leads to the job's nodes" in done.output


# --- what is made of it ------------------------------------------------------------------------------


def test_a_dry_run_prints_the_exact_line_and_touches_nothing(here: Path) -> None:
    done = srun("--dry-run", "--srun-arg", "--exclusive", "--srun-arg=--mem=0", "train.py")
    assert done.exit_code == 0
    line = shlex.split(done.output)
    assert line[:2] == ["srun", "--no-kill"]
    assert line[line.index("-w") + 1] == "n[1-3]"
    assert line[-3:] == ["--exclusive", "--mem=0", str(Path(sys.prefix) / "bin" / "nvrx-agent")]
    assert sorted(path.name for path in here.iterdir()) == ["bin", "train.py"]


def test_without_options_every_node_trains_and_the_defaults_hold(here: Path, jobs: list[JobSpec]) -> None:
    assert srun("train.py").exit_code == 75, "the job's own code"
    (spec,) = jobs
    assert (spec.job_id, spec.restart_count, spec.address) == ("7", 0, "127.0.0.1")
    assert (spec.policy.nodes, spec.policy.active_nodes) == (("n1", "n2", "n3"), 3)
    assert (spec.policy.max_restarts, spec.policy.first_cycle) == (10, 0)
    assert spec.welcome.nproc_per_node == "auto"
    assert spec.welcome.warm_start
    assert spec.welcome.stop_timeout_s == 15.0
    assert spec.policy.stop_timeout_s > spec.welcome.stop_timeout_s
    assert spec.monitoring.heartbeat.initial == 3600.0
    assert spec.monitoring.heartbeat.subsequent == 2700.0
    assert spec.policy.limits == Limits(
        max_no_progress_cycles=3,
        min_progress_iterations=1,
        no_restart_code=93,
        max_restarts_per_hour=None,
        exclude_after=3,
    )
    assert (spec.policy.past, spec.policy.has_iteration_file, spec.iteration_file) == (Past(), False, None)
    assert (spec.ends, spec.time_limit_margin_s) == (None, 120.0)
    assert spec.run_dir.path == here / "nvrx" / "7"
    assert stat.S_IMODE(spec.run_dir.path.stat().st_mode) == 0o700


def test_bounds_reach_the_job(here: Path, jobs: list[JobSpec]) -> None:
    (here / "ft.yaml").write_text(
        "fault_tolerance: {max_no_progress_cycles: 7, min_progress_iterations: 9, "
        "checkpoint_iteration_file: latest}"
    )
    srun(
        *("--ft-cfg-path", "ft.yaml", "--ft-max-no-progress-cycles", "5", "--ft-no-restart-exit-code", "42"),
        *("--max-restarts-per-hour", "6", "--exclude-after", "0", "--time-limit-margin", "0", "train.py"),
    )
    (spec,) = jobs
    assert spec.policy.limits == Limits(
        max_no_progress_cycles=5,
        min_progress_iterations=9,
        no_restart_code=42,
        max_restarts_per_hour=6,
        exclude_after=0,
    )
    assert spec.policy.has_iteration_file
    assert spec.iteration_file == here / "latest"
    assert spec.time_limit_margin_s == 0.0


def test_options_reach_the_job(here: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    srun(
        *("--nproc-per-node", "4", "--spares", "1", "--max-restarts", "3", "--heartbeat-timeout", "90s"),
        *("--initial-heartbeat-timeout", "none", "--workers-stop-timeout", "1m", "--warm-start", "off"),
        *("--run-dir", "elsewhere", "train.py"),
    )
    (spec,) = jobs
    assert (spec.host, spec.fence) == ("n1", "7.2.0")
    assert (spec.policy.nodes, spec.policy.active_nodes) == (("n1", "n2", "n3"), 2)
    assert spec.policy.last_choice == "n1", "the batch host gets ranks when no other is left"
    assert spec.policy.max_restarts == spec.welcome.max_restarts == 3
    assert spec.welcome.nproc_per_node == "4"
    assert (spec.monitoring.heartbeat.initial, spec.monitoring.heartbeat.subsequent) == (None, 90.0)
    assert spec.welcome.stop_timeout_s == 60.0
    assert not spec.welcome.warm_start
    assert spec.run_dir.path == here / "elsewhere"


@pytest.mark.parametrize(
    ("options", "active"),
    [
        (["--nnodes", "3"], 3),
        (["--nnodes", "2:3"], 2),
        (["--nnodes", "2:8"], 2),
        (["--nnodes", "2", "--spares", "1"], 2),
        (["--nnodes", "2:3", "--spares", "1"], 2),
        (["--nnodes", "3:3", "--spares", "0"], 3),
    ],
)
def test_nnodes_is_another_way_to_say_how_many_are_spares(
    here: Path, jobs: list[JobSpec], options: list[str], active: int
) -> None:
    srun(*options, "train.py")
    assert jobs[0].policy.active_nodes == active


def test_placement_options_reach_machine_and_agents(here: Path, jobs: list[JobSpec]) -> None:
    srun(
        *("--nnodes", "2:3", "--ft-segment", "2", "--replacement-group-size", "3"),
        *("--rejoin-timeout", "5m", "--srun-arg=--mem=0", "train.py"),
    )
    policy = jobs[0].policy
    assert (policy.segment, policy.group_size, policy.rejoin_timeout_s) == (2, 3, 300.0)
    assert jobs[0].welcome.segment == 2
    assert jobs[0].rejoin_argv is not None
    argv = list(jobs[0].rejoin_argv("n2"))
    assert argv[argv.index("-N") + 1] == "1"
    assert argv[argv.index("-w") + 1] == "n2"
    assert {"--overlap", "--mem=0"} <= set(argv)
    srun("--rejoin-timeout", "0", "train.py")
    assert jobs[1].policy.rejoin_timeout_s == 0.0


@pytest.mark.parametrize(
    ("options", "spelt_as_elsewhere"),
    [
        (["--nproc-per-node", "2"], ["--nproc_per_node", "2"]),
        (["--max-restarts", "2"], ["--max_restarts", "2"]),
        (["--heartbeat-timeout", "90"], ["--ft-rank-heartbeat-timeout", "90"]),
        (["--initial-heartbeat-timeout", "90"], ["--ft-initial-rank-heartbeat-timeout", "90"]),
        (["--max-no-progress-cycles", "5"], ["--ft-max-no-progress-cycles", "5"]),
        (["--min-progress-iterations", "5"], ["--ft-min-progress-iterations", "5"]),
        (["--no-restart-exit-code", "5"], ["--ft-no-restart-exit-code", "5"]),
        (["--checkpoint-iteration-file", "it"], ["--ft-checkpoint-iteration-file", "it"]),
    ],
)
def test_options_have_the_names_that_people_know(
    here: Path, jobs: list[JobSpec], options: list[str], spelt_as_elsewhere: list[str]
) -> None:
    srun(*options, "train.py")
    srun(*spelt_as_elsewhere, "train.py")
    assert jobs[0].policy == jobs[1].policy
    assert jobs[0].welcome == jobs[1].welcome
    assert jobs[0].monitoring == jobs[1].monitoring


@pytest.mark.parametrize("arguments", [["--spares", "2", "-h"], ["--", "x"], ["-m", "--dry-run"]])
def test_what_comes_after_the_script_belongs_to_it(
    here: Path, jobs: list[JobSpec], arguments: list[str]
) -> None:
    srun("train.py", *arguments)
    srun("--", "train.py", *arguments)
    for spec in jobs:
        program = spec.welcome.program
        assert (program.kind, program.target) == (ProgramKind.SCRIPT, str(here / "train.py"))
        assert program.args == arguments
        assert program.cwd == str(here)


def test_a_module_and_a_program_can_be_run_too(here: Path, jobs: list[JobSpec]) -> None:
    (here / "package").mkdir()
    srun("--module", "package.train", "x")
    srun("--no-python", "env", "x")
    programs = [spec.welcome.program for spec in jobs]
    assert [(program.kind, program.target) for program in programs] == [
        (ProgramKind.MODULE, "package.train"),
        (ProgramKind.EXECUTABLE, "/usr/bin/env"),
    ]


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"NVRX_RUN_DIR": "from_env"}, "from_env"),
        ({"SLURM_SUBMIT_DIR": "submitted"}, "submitted/nvrx/7"),
        ({"NVRX_RUN_DIR": "", "SLURM_SUBMIT_DIR": ""}, "nvrx/7"),
    ],
)
def test_the_run_directory_is_where_the_contract_says(
    here: Path,
    jobs: list[JobSpec],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    folder: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    srun("train.py")
    assert jobs[0].run_dir.path == here / folder


def test_the_agents_do_not_see_what_is_stale(
    here: Path, jobs: list[JobSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NNODES", "3")
    monkeypatch.setenv("SLURM_STEP_ID", "4294967290")  # salloc's interactive step
    monkeypatch.setenv("MINE", "1")
    srun("train.py")
    environment = jobs[0].step_environ
    assert environment["MINE"] == "1"
    assert environment["SLURM_JOB_ID"] == "7"
    assert not {"SLURM_NNODES", "SLURM_STEP_ID"} & set(environment)


def test_help_names_every_option_and_every_exit_code() -> None:
    done = srun("-h")
    assert done.exit_code == 0
    for option in main.params:
        if option.name not in ("script", "args"):
            assert option.opts[0] in done.output
    assert "Exit codes: 0 all ranks succeeded, or one shut the workload down; 1" in done.output
