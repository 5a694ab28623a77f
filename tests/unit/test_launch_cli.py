"""What ``nvrx-launch`` takes: torchrun's and ft_launcher's options, their variables, their file."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from nvrx_slurm.cli.launch import main
from nvrx_slurm.cli.launch_flags import FOREIGN_FLAGS
from nvrx_slurm.launch import job as launch_job
from nvrx_slurm.launch.job import Launch
from nvrx_slurm.launch.rendezvous import Hosting
from nvrx_slurm.wire.messages import ProgramKind

FT_LAUNCHER = (
    "--ft-segment",
    "--ft-workload-check-interval",
    "--ft-initial-rank-heartbeat-timeout",
    "--ft-rank-heartbeat-timeout",
    "--ft-rank-section-timeouts",
    "--ft-rank-out-of-section-timeout",
    "--ft-node-health-check-interval",
    "--ft-node-health-check-endpoint",
    "--ft-safety-factor",
    "--ft-rank-termination-signal",
    "--ft-log-level",
    "--ft-restart-check-interval",
    "--ft-restart-policy",
    "--ft-enable-nic-monitor",
    "--ft-enable-nic-healthcheck",
    "--ft-pci-topo-file",
    "--ft-link-down-path-template",
    "--ft-link-state-path-template",
    "--ft-enable-dist-storage-healthcheck",
    "--ft-storage-health-check-path",
    "--ft-skip-section-response",
    "--ft-rdzv-impl",
    "--ft-numa-bind-strict",
    "--ft-gpu-memory-reclaim-timeout",
    "--ft-gpu-memory-tolerance-mb",
    "--ft-gpu-memory-poll-interval",
    "--ft-check-remaining-processes",
    "--ft-install-exception-hook",
    "--ft-max-no-progress-cycles",
    "--ft-min-progress-iterations",
    "--ft-checkpoint-iteration-file",
    "--ft-no-restart-exit-code",
    "--ft-cycle-info-dir",
    "--ft-per-cycle-applog-prefix",
    "--ft-nvrx-logfile",
    "--ft-enable-log-server",
    "--ft-log-server-port",
    "--ft-log-aggregator-count",
    "--ft-log-leaf-max-queue-chunks",
    "--ft-log-server-log-prefix",
    "--ft-log-server-graceful-shutdown-timeout",
    "--ft-attribution-endpoint",
    "--ft-attribution-startup-timeout",
    "--ft-attribution-llm-api-key-file",
    "--ft-attribution-llm-base-url",
    "--ft-attribution-llm-model",
    "--ft-attribution-analysis-backend",
    "--ft-attribution-stop-action",
    "--ft-attribution-log-level",
    "--ft-attribution-export-url",
    "--ft-ignore-missing-cfg",
    "--ft-cfg-path",
    "--term-timeout",
    "--workers-stop-timeout",
)
FT_LAUNCHER_VARIABLES = (
    "PER_CYCLE_APPLOG_PREFIX",
    "NVRX_LOGFILE",
    "ENABLE_LOG_SERVER",
    "LOG_SERVER_PORT",
    "LOG_AGGREGATOR_COUNT",
    "LOG_LEAF_MAX_QUEUE_CHUNKS",
    "LOG_SERVER_LOG_PREFIX",
    "LOG_SERVER_GRACEFUL_SHUTDOWN_TIMEOUT",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``train.py``, and an environment that says nothing."""
    (tmp_path / "train.py").touch()
    for name in list(os.environ):
        if name.startswith(("SLURM", "NVRX_", "PET_", "TORCH", "OMP_", "CUDA", "PYTHON_EXEC", "GROUP_RANK")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def launches(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What would have been run."""
    seen: list[Launch] = []

    def run_launch(launch: Launch) -> int:
        seen.append(launch)
        return 75

    monkeypatch.setattr(launch_job, "run_launch", run_launch)
    return seen


def launch(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(main, arguments, env=variables, catch_exceptions=False)


def refused(*arguments: str, **variables: str) -> str:
    done = launch(*arguments, **variables)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.output.split())


def known_names() -> set[str]:
    """With dashes; the command takes underscores for them."""
    return {name for param in main.params for name in param.opts}


def variables() -> set[str]:
    found = [param.envvar for param in main.params]
    return {name for name in found if isinstance(name, str)}


# --- completeness ------------------------------------------------------------------------------------


def test_every_option_of_torchrun_is_known_in_both_spellings() -> None:
    run = pytest.importorskip("torch.distributed.run")
    actions = [action for action in run.get_args_parser()._actions if action.option_strings]
    assert len(actions) > 25
    for action in actions:
        for name in action.option_strings:
            assert name.replace("_", "-") in known_names() | {"--help", "-h"}, name


def test_every_variable_of_torchrun_is_known() -> None:
    run = pytest.importorskip("torch.distributed.run")
    util = pytest.importorskip("torch.distributed.argparse_util")
    for action in run.get_args_parser()._actions:
        if isinstance(action, util.env | util.check_env):
            assert f"PET_{action.dest.upper()}" in variables()


@pytest.mark.parametrize("name", FT_LAUNCHER)
def test_every_option_of_ft_launcher_is_known(name: str) -> None:
    assert name in known_names()


def test_every_variable_of_ft_launcher_is_known() -> None:
    assert {f"PET_FT_{name}" for name in FT_LAUNCHER_VARIABLES} <= variables()
    assert {"PET_TERM_TIMEOUT", "PET_WORKERS_STOP_TIMEOUT"} <= variables()


def test_no_option_is_there_twice() -> None:
    names = [name for param in main.params if isinstance(param, click.Option) for name in param.opts]
    assert len(names) == len(set(names))


# --- options that do nothing, or can't ---------------------------------------------------------------


@pytest.mark.parametrize("flag", [f for f in FOREIGN_FLAGS if f.accepted is None], ids=lambda f: f.name)
def test_an_option_without_meaning_is_accepted_with_one_note(launches: list[Launch], flag: object) -> None:
    name, is_flag, why = flag.name, flag.is_flag, flag.why  # type: ignore[attr-defined]
    done = launch(name.replace("-", "_").replace("__", "--", 1), *([] if is_flag else ["7"]), "train.py")
    assert done.exit_code == 75, done.output
    assert done.output.count(f"nvrx-launch: note: {name} has no effect: {why}") == 1
    assert "note" not in launch("train.py").output


@pytest.mark.parametrize("flag", [f for f in FOREIGN_FLAGS if f.accepted is not None], ids=lambda f: f.name)
def test_an_option_that_cannot_be_obeyed_is_refused_with_the_reason(here: Path, flag: object) -> None:
    name, why = flag.name, flag.why  # type: ignore[attr-defined]
    assert f"{name} cannot be used: {why}" in refused(name, "something", "train.py")


@pytest.mark.parametrize("flag", [f for f in FOREIGN_FLAGS if f.from_environment], ids=lambda f: f.name)
def test_their_variables_count_too(launches: list[Launch], flag: object) -> None:
    name, accepted = flag.name, flag.accepted  # type: ignore[attr-defined]
    said = launch("train.py", **{f"PET_{name[2:].replace('-', '_').upper()}": "7"}).output
    assert f"{name} has no effect" in said if accepted is None else f"{name} cannot be used" in said


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument 'SCRIPT'"),
        (["--nnodes", "0", "train.py"], "--nnodes '0': MIN:MAX or one number is accepted, 0 < MIN <= MAX"),
        (["--nnodes", "3:2", "train.py"], "--nnodes '3:2': MIN:MAX or one number"),
        (["--nnodes", "1:2:3", "train.py"], "--nnodes '1:2:3': MIN:MAX or one number"),
        (
            ["--nproc-per-node", "xpu", "train.py"],
            "'xpu': a number from 1 to 250, auto, gpu or cpu",
        ),
        (["--max-restarts", "-1", "train.py"], "-1 is not in the range x>=0"),
        (["--max-restarts", "x", "train.py"], "'x' is not a valid integer"),
        (["--rdzv-backend", "etcd", "train.py"], "--rdzv-backend: 'etcd': c10d and static are accepted"),
        (["--rdzv-backend", "c10d", "train.py"], "--rdzv-endpoint is missing"),
        (["--rdzv-endpoint", "h:x", "train.py"], "--rdzv-endpoint: 'h:x': host, host:port or [IPv6]:port"),
        (["--rdzv-endpoint", "h:99999", "train.py"], "host, host:port or [IPv6]:port is accepted"),
        (["--rdzv-endpoint", "h:0", "--nnodes", "2", "train.py"], "port 0 is a free one"),
        (["--rdzv-conf", "join_timeout", "train.py"], "--rdzv-conf: 'join_timeout': key=value,key=value"),
        (["--rdzv-conf", "join=3", "train.py"], "unknown key 'join'; accepted: close_timeout, is_host"),
        (
            ["--rdzv-conf", "join_timeout=soon", "train.py"],
            "join_timeout: 'soon': seconds above 0",
        ),
        (
            ["--rdzv-conf", "replacement_group_size=0", "train.py"],
            "replacement_group_size: '0'",
        ),
        (
            ["--ft-segment", "2", "--nnodes", "3", "train.py"],
            "--ft-segment 2: 3 nodes that train",
        ),
        (["--rdzv-conf", "is_host=maybe", "train.py"], "is_host: 'maybe': 1, true, yes, 0, false, no"),
        (["--standalone", "--nnodes", "2", "train.py"], "--standalone is for one node"),
        (
            ["--signals-to-handle", "SIGKILL", "train.py"],
            "'SIGKILL': names of signals that a program",
        ),
        (["--signals-to-handle", "TERM", "train.py"], "'TERM': names of signals"),
        (
            ["--redirects", "1", "train.py"],
            "--redirects: '1': 0, 3 or LOCAL_RANK:3,LOCAL_RANK:0,…",
        ),
        (["--tee", "0:2", "train.py"], "standard output and error are one log here"),
        (["--tee", "a:3", "train.py"], "--tee: 'a:3': 0, 3 or LOCAL_RANK:3"),
        (["--local-ranks-filter", "0,x", "train.py"], "--local-ranks-filter: '0,x': local ranks separated"),
        (["--term-timeout", "never", "train.py"], "'never' is not a duration; accepted: 90s, 5m, 1.5h"),
        (["--start-method", "clone", "train.py"], "accepted: spawn, fork, forkserver"),
        (["-m", "--no-python", "x"], "--module and --no-python exclude each other"),
        (["missing.py"], "SCRIPT: missing.py is not a file"),
        (["--no-such-option", "train.py"], "No such option '--no-such-option'"),
        (["--ft-cfg-path", "none.yaml", "train.py"], "none.yaml: cannot be read: No such file or directory"),
        (["--ft-rank-heartbeat-timeout", "x", "train.py"], "accepted: 90s, 5m, 1.5h, none"),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_is_accepted(
    here: Path, arguments: list[str], says: str
) -> None:
    assert says.replace("'", "") in refused(*arguments).replace("'", "")


def test_a_bad_variable_is_refused_like_a_bad_option(here: Path) -> None:
    assert "--max-restarts: many is not a valid" in refused("train.py", PET_MAX_RESTARTS="many").replace(
        "'", ""
    )
    assert "--nnodes '0'" in refused("train.py", PET_NNODES="0")
    said = refused("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="soon")
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT: 'soon' is not a duration" in said


@pytest.mark.parametrize("arguments", [("train.py", "NO"), ("--role", "NO", "train.py")])
def test_what_is_no_utf8_cannot_be_told_to_the_nodes_and_is_refused(
    here: Path, arguments: tuple[str, ...]
) -> None:
    said = refused(*(word.replace("NO", os.fsdecode(b"a\xff")) for word in arguments))
    assert "'a\\udcff' is not UTF-8" in said
    assert "local_addr: 'a\\udcff' is not" in refused("train.py", PET_LOCAL_ADDR=os.fsdecode(b"a\xff"))


def test_fewer_gpus_than_ranks_cannot_be_one_for_each(here: Path) -> None:
    said = refused("--virtual-local-rank", "--nproc-per-node", "2", "train.py", CUDA_VISIBLE_DEVICES="3")
    assert "2 ranks, but CUDA_VISIBLE_DEVICES is '3': each needs a GPU" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fault_tolerance: {rank_heartbeat_timout: 3}", "unknown key 'rank_heartbeat_timout'; accepted:"),
        (
            "fault_tolerance: {rank_heartbeat_timeout: soon}",
            "rank_heartbeat_timeout: 'soon': accepted: ",
        ),
        ("fault_tolerance: {safety_factor: null}", "safety_factor: None: accepted: a number of 1 or more"),
        ("other: 1", "there is no mapping 'fault_tolerance'"),
        ("fault_tolerance: [", "not YAML"),
    ],
)
def test_a_file_with_an_error_is_refused_and_never_replaced_by_defaults(
    here: Path, text: str, says: str
) -> None:
    (here / "ft.yaml").write_text(text)
    said = refused("--ft-cfg-path", "ft.yaml", "train.py")
    assert "ft.yaml: " in said
    assert says in said


# --- what is made of it ------------------------------------------------------------------------------


def test_without_options_one_rank_runs_on_this_node_and_nothing_is_restarted(launches: list[Launch]) -> None:
    assert launch("train.py", "--x").exit_code == 75, "the job's own code"
    (seen,) = launches
    assert (seen.min_nodes, seen.max_nodes, seen.nproc_per_node, seen.max_restarts) == (1, 1, "1", 0)
    assert (seen.rendezvous.host, seen.rendezvous.port) == ("127.0.0.1", 0)
    assert seen.rendezvous.hosting is Hosting.HERE
    assert (seen.workers_stop_timeout_s, seen.term_timeout_s) == (15.0, 1800.0)
    assert seen.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    assert seen.program.args == ["--x"]
    assert seen.fault_tolerance.rank_heartbeat_timeout == 2700.0, "hangs are found by default"
    assert seen.run_dir.path == Path.cwd() / "nvrx" / seen.rendezvous.run_id


def test_every_standalone_job_has_an_id_of_its_own_whatever_else_was_given(launches: list[Launch]) -> None:
    for _ in range(2):
        launch("--standalone", "--rdzv-id", "x", "--rdzv-endpoint", "h:7", "train.py")
    ids = [seen.rendezvous.run_id for seen in launches]
    assert len({*ids, "x"}) == 3
    assert [seen.rendezvous.port for seen in launches] == [0, 0]


@pytest.mark.parametrize(
    ("options", "host", "port", "hosting", "place"),
    [
        (["--rdzv-endpoint", "h"], "h", 29400, Hosting.WHERE_THE_ENDPOINT_IS, None),
        (["--rdzv-endpoint", "h:7", "--rdzv-backend", "c10d"], "h", 7, Hosting.WHERE_THE_ENDPOINT_IS, None),
        (["--rdzv-endpoint", "[::1]:7"], "::1", 7, Hosting.WHERE_THE_ENDPOINT_IS, None),
        (["--rdzv-endpoint", "h", "--rdzv-conf", "is_host=1"], "h", 29400, Hosting.HERE, None),
        (["--rdzv-endpoint", "h", "--rdzv-conf", "is_host=false"], "h", 29400, Hosting.ELSEWHERE, None),
        (["--node-rank", "0", "--master-addr", "h"], "h", 29500, Hosting.HERE, 0),
        (["--node-rank", "1", "--master-addr", "h", "--master-port", "7"], "h", 7, Hosting.ELSEWHERE, 1),
        (["--node-rank", "1", "--rdzv-endpoint", "h:7"], "h", 7, Hosting.ELSEWHERE, 1),
    ],
)
def test_nodes_meet_where_torchrun_would_have_them_meet(
    launches: list[Launch], options: list[str], host: str, port: int, hosting: Hosting, place: int | None
) -> None:
    launch("--nnodes", "2", *options, "train.py")
    meeting = launches[0].rendezvous
    assert (meeting.host, meeting.port, meeting.hosting, meeting.place) == (host, port, hosting, place)


def test_within_srun_nodes_stand_in_its_order(launches: list[Launch]) -> None:
    launch("--nnodes", "2", "--rdzv-endpoint", "h", "train.py", SLURM_PROCID="3")
    assert launches[0].rendezvous.place == 3


def test_rdzv_conf_says_how_long_to_wait_and_what_it_cannot_say(launches: list[Launch]) -> None:
    conf = "join_timeout=900,store_connect_wait_seconds=7,last_call_timeout=0.5,use_libuv=1"
    said = launch("--rdzv-endpoint", "h", "--rdzv-conf", conf, "train.py").output
    meeting = launches[0].rendezvous.conf
    assert (meeting.join_timeout_s, meeting.connect_wait_s) == (900.0, 7.0)
    assert "--rdzv-conf last_call_timeout: a node that is slow to stop keeps its place" in said
    assert "--rdzv-conf use_libuv: " in said
    launch("--rdzv-endpoint", "h", "--rdzv-conf", "timeout=60", "train.py")
    assert launches[1].rendezvous.conf.join_timeout_s == 60.0


@pytest.mark.parametrize(
    ("options", "variables", "stop", "term"),
    [
        ([], {}, 15.0, 1800.0),
        (["--shutdown-timeout", "40"], {}, 40.0, 40.0),
        (["--shutdown-timeout", "40", "--term-timeout", "5m"], {}, 40.0, 300.0),
        (["--workers-stop-timeout", "3"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 3.0, 50.0),
        ([], {"PET_SHUTDOWN_TIMEOUT": "60", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 60.0, 60.0),
    ],
)
def test_ranks_have_the_grace_that_was_said(
    launches: list[Launch], options: list[str], variables: dict[str, str], stop: float, term: float
) -> None:
    launch(*options, "train.py", **variables)
    assert (launches[0].workers_stop_timeout_s, launches[0].term_timeout_s) == (stop, term)


def test_an_option_wins_over_its_variable_and_spellings_are_one(launches: list[Launch]) -> None:
    launch("train.py", PET_NNODES="1:4", PET_NPROC_PER_NODE="2", PET_RDZV_ENDPOINT="h:7", PET_RDZV_ID="x")
    launch(
        *("--nnodes=1:4", "--nproc_per_node=2", "--rdzv_endpoint=h:7", "--rdzv_id", "x", "train.py"),
        PET_RDZV_ID="y",
    )
    one, other = (dataclasses.replace(seen, environ={}) for seen in launches)
    assert one == other
    assert one.rendezvous.run_id == "x"


def test_a_flags_variable_is_a_number(launches: list[Launch]) -> None:
    launch("os", PET_MODULE="1")
    launch("train.py", PET_MODULE="0", PET_VIRTUAL_LOCAL_RANK="1")
    assert [seen.program.kind for seen in launches] == [ProgramKind.MODULE, ProgramKind.SCRIPT]
    assert [seen.virtual_local_rank for seen in launches] == [False, True]


def test_the_files_keys_count_below_the_command_line(here: Path, launches: list[Launch]) -> None:
    (here / "ft.yaml").write_text(
        "job: {fault_tolerance: {rank_heartbeat_timeout: 60, initial_rank_heartbeat_timeout: 2m}}"
    )
    launch("--ft_cfg_path", "ft.yaml", "--ft-rank-heartbeat-timeout", "90", "train.py")
    config = launches[0].fault_tolerance
    assert (config.rank_heartbeat_timeout, config.initial_rank_heartbeat_timeout) == (90.0, 120.0)


@pytest.mark.parametrize(
    ("options", "variables", "kind", "target", "args"),
    [
        (["--run-path", "train.py", "a"], {}, ProgramKind.SCRIPT, "train.py", ["a"]),
        (["--run-path", "--no-python", "train.py"], {}, ProgramKind.SCRIPT, "train.py", []),
        (["--no-python", "/bin/echo", "a"], {}, ProgramKind.EXECUTABLE, "/bin/echo", ["a"]),
        (
            ["-m", "pkg.mod"],
            {"PYTHON_EXEC": "/bin/sh"},
            ProgramKind.EXECUTABLE,
            "/bin/sh",
            ["-u", "-m", "pkg.mod"],
        ),
    ],
)
def test_the_program_is_started_as_torchrun_would(
    here: Path,
    launches: list[Launch],
    options: list[str],
    variables: dict[str, str],
    kind: ProgramKind,
    target: str,
    args: list[str],
) -> None:
    launch(*options, **variables)
    program = launches[0].program
    assert (program.kind, program.target, program.args) == (kind, str(here / target), args)


@pytest.mark.parametrize(
    ("options", "variables", "folder"),
    [
        (["--log-dir", "logs"], {}, "logs/x"),
        (["--run-dir", "run"], {"NVRX_RUN_DIR": "other"}, "run"),
        (["--log-dir", "logs"], {"NVRX_RUN_DIR": "other"}, "other"),
        ([], {}, "nvrx/x"),
    ],
)
def test_the_run_directory_is_where_the_user_says(
    here: Path, launches: list[Launch], options: list[str], variables: dict[str, str], folder: str
) -> None:
    launch("--rdzv-endpoint", "h", "--rdzv-id", "x", *options, "train.py", **variables)
    assert launches[0].run_dir.path == here / folder
    assert launches[0].token_file == here / folder / "token"


@pytest.mark.parametrize("run_id", ["../../etc", "/etc", "a/b", ".", ".."])
def test_no_id_leads_out_of_the_folder_of_runs(here: Path, launches: list[Launch], run_id: str) -> None:
    launch("--rdzv-endpoint", "h", "--rdzv-id", run_id, "train.py")
    assert launches[0].run_dir.path.parent == here / "nvrx"
    assert launches[0].rendezvous.run_id == run_id


def test_several_ranks_share_the_cpus_and_that_is_said(launches: list[Launch]) -> None:
    assert "OMP_NUM_THREADS is 1" in launch("--nproc-per-node", "2", "train.py").output
    assert "OMP" not in launch("--nproc-per-node", "2", "train.py", OMP_NUM_THREADS="4").output
    assert "OMP" not in launch("train.py").output
