"""``nvrx-launch`` with real processes: faults, nodes, secrets, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from functools import partial

import psutil
import pytest
from harness import RANK, until
from launchers import COLD, LaunchedJob, free_port, meeting

from nvrx_slurm import journal
from nvrx_slurm.journal import FaultKind

Jobs = partial[LaunchedJob]


WAITS_ONCE = (
    RANK
    + """
write(f"ready{rank}.{cycle}", os.getpid())
if cycle == 0:
    wait_for("go_on")
print(f"rank {rank} is done", flush=True)
"""
)


@pytest.mark.skipif(os.geteuid() != 0, reason="others look for another place")
def test_without_a_place_for_private_files_nothing_is_started(launched: Jobs) -> None:
    job = launched(RANK, "--standalone", *COLD)
    job.launch("n1", NVRX_NODE_LOCAL_TMPDIR="/proc")
    assert job.code() == 2
    said = " ".join(job.said().split())
    assert "no place for this node's private files" in said
    assert "NVRX_NODE_LOCAL_TMPDIR or TMPDIR names another" in said
    assert "Traceback" not in said
    assert job.nothing_is_left()


# --- one node ----------------------------------------------------------------------------------------


def test_a_crash_costs_one_restart_and_the_job_ends_well(launched: Jobs) -> None:
    script = (
        RANK
        + """
if cycle == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if cycle == 0:
    time.sleep(60)
os.write(1, f"done {cycle}\\n".encode())
"""
    )
    job = launched(script, "--standalone", *COLD, "--nproc_per_node=2", "--max_restarts=1").launch()
    assert job.code() == 0, job.stderr
    (fault,) = job.events(journal.FaultDetected)
    assert (fault.kind, fault.rank, fault.signal) == (FaultKind.SIGNAL, 1, "SIGKILL")
    assert job.shown() == "done 1\n" * 2
    assert job.log("rank_0", cycle=1) == job.log("rank_1", cycle=1) == "done 1\n"
    assert job.nothing_is_left()


def test_a_hang_is_found_and_healed(launched: Jobs) -> None:
    script = (
        RANK
        + """
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
client.send_heartbeat(step=1)
if cycle == 0 and rank == 1:
    time.sleep(600)
while cycle == 0:
    client.send_heartbeat(step=2)
    time.sleep(0.05)
client.shutdown_workload_monitoring()
"""
    )
    options = ("--standalone", *COLD, "--nproc-per-node", "2", "--max-restarts", "1")
    job = launched(script, *options, "--ft-rank-heartbeat-timeout", "2").launch()
    assert job.code() == 0, job.stderr
    (fault,) = job.events(journal.FaultDetected)
    assert (fault.kind, fault.rank) == (FaultKind.HANG, 1)
    assert job.nothing_is_left()


def test_without_restarts_the_first_fault_ends_the_job_as_with_torchrun(launched: Jobs) -> None:
    job = launched("import sys\nsys.exit(3)", "--standalone", *COLD).launch()
    assert job.code() == 1
    assert [verdict.action for verdict in job.events(journal.Verdict)] == [journal.VerdictAction.STOP]


def test_what_torch_records_of_an_error_is_told_as_the_faults_detail(launched: Jobs) -> None:
    script = """
    import json, os, sys
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:  # as torch's record does
        json.dump({"message": {"message": "ValueError: NaN in the loss", "extraInfo": {}}}, file)
    sys.exit(1)
    """
    job = launched(script, "--standalone", *COLD).launch()
    assert job.code() == 1
    (fault,) = job.events(journal.FaultDetected)
    assert fault.detail == "ValueError: NaN in the loss"
    assert "ValueError: NaN in the loss" in job.said()


def test_output_is_shown_as_torchrun_shows_it(launched: Jobs) -> None:
    script = "import os\nprint('to rank', os.environ['RANK'])"
    ranks = ("--standalone", *COLD, "--nproc-per-node", "2")
    tee = launched(script, *ranks, "-t", "0:3", "-r", "3", "--role", "trainer").launch()
    assert tee.code() == 0
    assert tee.shown() == "[trainer0]:to rank 0\n"
    some = launched(script, *ranks, "--local_ranks_filter", "1").launch()
    assert some.code() == 0
    assert some.shown() == "to rank 1\n"
    assert [some.log("rank_0"), some.log("rank_1")] == ["to rank 0\n", "to rank 1\n"]


@pytest.mark.parametrize("way", ["option", "file"])
def test_watchers_find_cycle_infos_and_logs_as_with_ft_launcher(launched: Jobs, way: str) -> None:
    script = (
        RANK
        + """
print("current:", os.environ["NVRX_CURRENT_CYCLE_INFO"], flush=True)
sys.exit(3 if cycle == 0 and rank == 1 else 0)
"""
    )
    job = launched(script, "--standalone", *COLD, "--nproc-per-node", "2", "--max-restarts", "1")
    infos, prefix = job.root / "infos", job.root / "logs" / "train"
    if way == "option":
        job.launch("n1", "--ft-cycle-info-dir", str(infos), "--ft-per-cycle-applog-prefix", str(prefix))
    else:
        (job.root / "ft.yaml").write_text(f"fault_tolerance: {{cycle_info_dir: {infos}}}")
        job.launch("n1", "--ft-cfg-path", "ft.yaml", PET_FT_PER_CYCLE_APPLOG_PREFIX=str(prefix))
    assert job.code() == 0, job.stderr
    (current,) = infos.glob("cycle_info.*.current")
    newest = json.loads(current.read_text())
    assert (newest["cycle_number"], newest["end_reason"]) == (1, "all 2 ranks exited with 0")
    assert newest["cycle_log_file"] == str(job.root / "logs" / "train_cycle1.log")
    first = json.loads((infos / current.name.replace("current", "0.0")).read_text())
    assert (first["culprit_rank"], first["culprit_kind"], first["active_ranks"]) == (1, "exit", "0")
    assert first["cycle_start_time"] < first["cycle_end_time"] <= newest["cycle_start_time"]
    lines = (job.root / "logs" / "train_cycle1.log").read_text().splitlines()
    assert sorted(lines) == [f"{rank}: current: {current}" for rank in (0, 1)]


# --- several nodes -----------------------------------------------------------------------------------


def test_a_launcher_that_is_killed_with_its_ranks_is_replaced_by_the_spare(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("2:3"), "--max-restarts", "3").launch_all("n1", "n2", "n3")
    started = job.wait_for(journal.CycleStarted)
    assert (started.world_size, len(started.spares)) == (2, 1)
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    # The Coordinator's host is 127.0.0.1: another of the active ones goes.
    victim = next(node for node in ("n2", "n3") if node in started.nodes)
    job.kill_node(victim)
    again = job.wait_for(journal.CycleStarted, 2)
    assert victim not in again.nodes
    assert set(again.nodes) == {"127.0.0.1", "n2", "n3"} - {victim}
    codes = job.codes()
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) == {0}, job.stderr
    until("all has ended", lambda: not job.processes())


def test_a_launcher_alone_that_is_killed_takes_its_ranks_with_it(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("1:2"), "--max-restarts", "3").launch_all("n1", "n2")
    job.wait_for_file("ready0.0")
    (active,) = job.wait_for(journal.CycleStarted).nodes
    victim = "n1" if active == "127.0.0.1" else active
    other = {"n1": "n2", "n2": "n1"}[victim]
    job.launchers[victim].kill()
    # Where it was the Coordinator's launcher too, that one goes on.
    job.wait_for(journal.CycleStarted, 2)
    assert job.code(other) == 0, job.stderr
    assert job.nothing_is_left()


def test_when_the_coordinators_host_is_lost_the_others_fail_and_leave_nothing(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("2:3")).launch_all("n1", "n2", "n3")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    job.kill_node("n1")
    codes = job.codes()
    assert (codes["n2"], codes["n3"]) == (1, 1)
    until("all has ended", lambda: not job.processes())


def test_every_launcher_returns_the_jobs_code_spares_included(launched: Jobs) -> None:
    script = RANK + "sys.exit(rank)\n"
    job = launched(script, *meeting("2:3")).launch_all("n1", "n2", "n3")
    assert job.codes() == {"n1": 1, "n2": 1, "n3": 1}
    job = launched("pass", *meeting("2:3")).launch_all("n1", "n2", "n3")
    assert job.codes() == {"n1": 0, "n2": 0, "n3": 0}


def test_too_few_nodes_end_every_launcher_with_75(launched: Jobs) -> None:
    job = launched("pass", *meeting("3"), "--token-file", "secret")
    (job.root / "secret").write_text("x" * 43)
    (job.root / "secret").chmod(0o600)
    # The second waits for the first already when the time begins.
    job.launch("n2", "--rdzv-conf", "join_timeout=10,is_host=0").named("nvrx-agent", "n2")
    job.launch("n1", "--rdzv-conf", "join_timeout=10,is_host=1")
    assert job.codes() == {"n1": 75, "n2": 75}
    assert "waits 10 s for 3 nodes, this one among them" in job.said("n1")
    assert "joins job " in job.said("n2")
    (why,) = job.events(journal.NotRequeued)
    assert why.why == "nvrx-launch starts no job again: whoever started this one can do so"


def test_a_node_that_cannot_take_part_fails_the_job_for_all(launched: Jobs) -> None:
    # One launcher of the peer that fails so closes the job for all as finished well.
    job = launched("pass", *meeting("2:3"))
    job.launch("n1", "--rdzv-conf", "is_host=1")
    job.launch("n2", "--rdzv-conf", "is_host=0", "--role", "other")
    assert job.codes() == {"n1": 2, "n2": 2}
    assert "--role is other here and default where the job is coordinated" in job.said("n2")


@pytest.mark.parametrize(("victim", "code"), [("nvrx-agent", 1), ("nvrx-guardian", 75), ("nvrx-warm", 1)])
def test_whatever_breaks_in_one_launcher_no_other_calls_a_broken_job_finished(
    launched: Jobs, victim: str, code: int
) -> None:
    job = launched(WAITS_ONCE, *meeting("2")).launch_all("n1", "n2")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    job.named(victim, "n2").kill()
    codes = job.codes()
    assert codes["n1"] == code
    assert codes["n2"] != 0
    assert ("the agent was killed by SIGKILL" in job.said("n2")) == (victim == "nvrx-agent")
    assert job.nothing_is_left()


def test_a_coordinator_that_is_killed_alone_fails_every_launcher(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("2:3")).launch_all("n1", "n2", "n3")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    job.named("nvrx-coord").kill()
    assert job.codes() == {"n1": 1, "n2": 1, "n3": 1}
    assert "the Coordinator was killed by SIGKILL" in job.said("n1")
    assert job.nothing_is_left()


@pytest.mark.parametrize("when", ["at once", "after a restart"])
def test_a_rank_that_shuts_the_workload_down_ends_every_launcher_with_the_same_code(
    launched: Jobs, when: str
) -> None:
    script = (
        RANK
        + f"""
from nvrx_slurm.fault_tolerance import RankMonitorClient, WorkloadAction, WorkloadControlRequest
if {when!r} == "after a restart" and cycle == 0:
    sys.exit(rank)
client = RankMonitorClient()
client.init_workload_monitoring()
if rank == 0:
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ShutdownWorkload, "enough"))
time.sleep(60)
"""
    )
    job = launched(script, *meeting("2:3"), "--max-restarts", "1").launch_all("n1", "n2", "n3")
    assert job.codes() == {"n1": 0, "n2": 0, "n3": 0}, job.stderr
    assert job.nothing_is_left()


def test_no_name_that_a_launcher_gives_its_node_leads_to_a_file(launched: Jobs) -> None:
    job = launched("print('said')", *meeting("2"))
    job.launch("n1", "--rdzv-conf", "is_host=1")
    job.launch("n2", "--rdzv-conf", "is_host=0", "--local-addr", "../../evil/x")
    assert job.codes() == {"n1": 0, "n2": 0}, job.stderr
    assert "../../evil/x" in job.events(journal.CycleStarted)[0].nodes
    assert {path.name for path in job.run_dir.rglob("*")} == {
        *(
            "journal.jsonl",
            "coordinator.lock",
            "token",
            "cycles",
            "0",
            "rank_0.log",
            "rank_1.log",
            "merged.log",
        )
    }
    assert not list(job.root.parent.rglob("evil*"))


def test_nodes_have_the_ranks_that_node_rank_says(launched: Jobs) -> None:
    script = RANK + "write(os.environ['TEST_NODE'], os.environ['GROUP_RANK'])"
    options = (*COLD, "--nnodes", "3", "--master-port", str(free_port()))
    job = launched(script, *options)
    for number, node in enumerate(("n1", "n2", "n3")):
        job.launch(node, "--node-rank", str(number))
    assert set(job.codes().values()) == {0}, job.stderr
    assert [(job.root / node).read_text() for node in ("n1", "n2", "n3")] == ["0", "1", "2"]


def test_a_launcher_that_is_started_again_goes_on_where_it_was(launched: Jobs) -> None:
    options = (*meeting("2"), "--max-restarts", "1", "--rejoin-timeout", "30")
    job = launched(WAITS_ONCE, *options).launch_all("n1", "n2")
    for rank in (0, 1):
        job.wait_for_file(f"ready{rank}.0")
    before = job.wait_for(journal.CycleStarted)
    job.kill_node("n2")
    job.wait_for(journal.NodeLost)
    job.launch("n2", "--rdzv-conf", "is_host=0")
    assert job.codes() == {"n1": 0, "n2": 0}, job.stderr
    assert job.events(journal.CycleStarted)[1].nodes == before.nodes


def test_two_launchers_of_one_name_are_two_nodes(launched: Jobs) -> None:
    job = launched("pass", *meeting("2"))
    job.launch("n1", "--local-addr", "127.0.0.1").launch("n2", "--local-addr", "127.0.0.1")
    assert set(job.codes().values()) == {0}, job.stderr
    assert set(job.events(journal.CycleStarted)[0].nodes) == {"127.0.0.1", "127.0.0.1-2"}


# --- who may join ------------------------------------------------------------------------------------


def test_the_token_is_the_users_alone_and_in_no_command_line(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("2")).launch_all("n1", "n2")
    job.wait_for_file("ready0.0")
    path = job.run_dir / "token"
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    for process in job.processes():
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            assert token not in " ".join(process.cmdline())
            assert token not in process.environ().values()
    job.touch("go_on")
    assert set(job.codes().values()) == {0}


def test_who_has_another_token_is_not_taken(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("1:2")).launch("n1")
    job.wait_for_file("ready0.0")
    wrong = job.root / "wrong"
    wrong.write_text("x" * 43)
    wrong.chmod(0o600)
    job.launch("n2", "--token-file", str(wrong))
    assert job.code("n2") == 1
    assert "not an agent of this job" in job.said("n2")
    job.touch("go_on")
    assert job.code("n1") == 0


def test_who_means_another_job_is_not_taken(launched: Jobs) -> None:
    job = launched(WAITS_ONCE, *meeting("1:2")).launch("n1")
    job.wait_for_file("ready0.0")
    job.launch("n2", "--rdzv-id", "two")
    assert job.code("n2") == 1
    assert "this is one (protocol 1), not two" in job.said("n2")
    job.touch("go_on")
    assert job.code("n1") == 0


@pytest.mark.parametrize(
    ("mode", "says"), [(0o644, "is open to others (mode 0644)"), (0o600, "holds no token")]
)
def test_a_token_file_that_cannot_be_trusted_is_refused(launched: Jobs, mode: int, says: str) -> None:
    job = launched("pass", *meeting("1:2"), "--token-file", "secret")
    (job.root / "secret").write_text("short")
    (job.root / "secret").chmod(mode)
    assert job.launch().code() == 2
    assert says in " ".join(job.said().split())


def test_a_token_that_never_comes_is_said_in_one_sentence(launched: Jobs) -> None:
    job = launched("pass", *meeting("2"))
    assert job.launch("n1", "--rdzv-conf", "is_host=0,store_connect_wait_seconds=0.5").code() == 2
    assert "did not appear within 0.5 s" in " ".join(job.said().split())


# --- ports -------------------------------------------------------------------------------------------


def test_two_jobs_run_beside_each_other(launched: Jobs) -> None:
    jobs = [launched(WAITS_ONCE, *meeting("2", run_id=name)).launch_all("n1", "n2") for name in ("a", "b")]
    for job in jobs:
        job.wait_for_file("ready1.0")
        job.touch("go_on")
    for job in jobs:
        assert set(job.codes().values()) == {0}, job.stderr


def test_standalone_jobs_never_meet(launched: Jobs) -> None:
    jobs = [launched(WAITS_ONCE, "--standalone", *COLD).launch() for _ in range(3)]
    for job in jobs:
        job.wait_for_file("ready0.0")
    for job in jobs:
        job.touch("go_on")
    assert [job.code() for job in jobs] == [0, 0, 0]


def test_a_port_in_use_is_said_in_one_sentence(launched: Jobs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        job = launched("pass", *meeting("1", port=port)).launch()
        assert job.code() == 2
    said = " ".join(job.said().split())
    assert (
        f"cannot listen on 127.0.0.1:{port}: it is in use, or not of this host; choose another port" in said
    )
    assert "Traceback" not in said
    assert job.nothing_is_left()


def test_a_second_host_of_one_port_is_told_of_the_first(launched: Jobs) -> None:
    port = free_port()
    first = launched(WAITS_ONCE, *meeting("1", port=port)).launch()
    first.wait_for_file("ready0.0")
    second = launched("pass", *meeting("1", port=port, run_id="two"), "--rdzv-conf", "is_host=1").launch()
    assert second.code() == 2
    assert f"another nvrx-launch of this host coordinates on port {port} already" in second.said()
    first.touch("go_on")
    assert first.code() == 0
