"""What Slurm's own tools print, read back. The 22.05 files are captured; later ones are adapted by hand."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from nvrx_slurm.slurm import (
    Node,
    ScontrolClient,
    SlurmClient,
    SlurmConfig,
    SlurmRefusedError,
    SlurmUnavailableError,
    UnknownJobError,
)
from nvrx_slurm.slurm.client import exact_job_id, parse_config, parse_fields, parse_job, parse_nodes
from nvrx_slurm.testing import FakeSlurmClient, running_job

DATA = Path(__file__).parent / "data" / "slurm"
VERSIONS = ["22.05", "24.11", "25.11"]


def golden(version: str, name: str) -> str:
    return (DATA / version / f"{name}.txt").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_running_job_is_read(version: str) -> None:
    job = parse_job(golden(version, "job"), "1")
    assert job.state == "RUNNING"
    assert job.nodes == ("n1", "n2")
    assert job.batch_host == "n1"
    assert job.work_dir == Path("/home/user/my runs")
    assert (job.batch, job.requeue, job.restarts) == (True, True, 0)
    assert (job.partition, job.num_nodes) == ("batch", 2)
    assert (job.required_nodes, job.excluded_nodes) == ((), ())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_end_of_a_jobs_time_is_read(version: str) -> None:
    job = parse_job(golden(version, "job"), "1")
    assert job.ends == 1827583304
    assert not job.preempted


@pytest.mark.parametrize("limit", ["TimeLimit=UNLIMITED", "EndTime=Unknown"])
def test_a_job_without_limit_has_no_end(limit: str) -> None:
    """Slurm gives it one all the same, a year after its start."""
    name = limit.partition("=")[0]
    text = re.sub(rf"{name}=\S+", limit, golden("22.05", "job"))
    assert parse_job(text, "1").ends is None


@pytest.mark.parametrize(
    ("field", "preempted"),
    [
        ("PreemptTime=1796047400", True),
        ("PreemptTime=1796047000", False),
        ("PreemptTime=None", False),
        ("JobState=PREEMPTED", True),
    ],
    ids=["now", "in an earlier run", "never", "and its grace is over"],
)
def test_a_preempted_job_is_told_from_others(field: str, preempted: bool) -> None:
    name = field.partition("=")[0]
    text = re.sub(rf"{name}=\S+", "", golden("22.05", "job")).replace("StartTime=", f"{field} StartTime=")
    assert parse_job(text, "1").preempted is preempted


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lost_node_is_no_longer_in_the_job(version: str) -> None:
    job = parse_job(golden(version, "job_after_node_loss"), "1")
    assert (job.state, job.nodes) == ("RUNNING", ("n1",))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pending_job_has_no_nodes(version: str) -> None:
    job = parse_job(golden(version, "job_pending"), "3")
    assert (job.state, job.nodes, job.batch_host, job.num_nodes) == ("PENDING", (), None, 5)


@pytest.mark.parametrize(
    ("version", "state"), [("22.05", "COMPLETING"), ("24.11", "CANCELLED"), ("25.11", "CANCELLED")]
)
def test_a_cancelled_job_does_not_run(version: str, state: str) -> None:
    assert parse_job(golden(version, "job_cancelled"), "1").state == state


def test_of_a_job_array_the_task_that_was_asked_for_is_read() -> None:
    """``scontrol show job`` of the array's own id prints every task, in any order."""
    text = golden("22.05", "job_array")
    assert text.startswith("JobId=6 ")
    assert parse_job(text, "2").nodes == ("n2",)
    assert parse_job(text, "6").nodes == ("n1",)


def test_lists_of_required_and_excluded_nodes_are_expanded() -> None:
    text = golden("22.05", "job")
    text = text.replace("ReqNodeList=(null) ExcNodeList=(null)", "ReqNodeList=n[1-2] ExcNodeList=n[07-08]")
    job = parse_job(text, "1")
    assert job.required_nodes == ("n1", "n2")
    assert job.excluded_nodes == ("n07", "n08")


@pytest.mark.parametrize(
    "name", ["x", "NodeList=evil", "a UserId=b(1) c NodeList=evil", "JobState=FAILED  ", "="]
)
def test_a_job_name_is_not_mistaken_for_fields(name: str) -> None:
    text = golden("22.05", "job").replace("JobName=train gpt=2 NodeList=x", f"JobName={name}")
    job = parse_job(text, "1")
    assert (job.state, job.nodes) == ("RUNNING", ("n1", "n2"))


@pytest.mark.parametrize("text", ["", "\n", "No jobs in the system\n", "JobId=11 JobState=RUNNING\n"])
def test_a_job_that_is_not_in_the_answer_is_unknown(text: str) -> None:
    with pytest.raises(UnknownJobError, match=r"does not know job 1$"):
        parse_job(text, "1")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_is_read(version: str) -> None:
    fields = parse_fields(golden(version, "node"))
    assert fields["NodeAddr"] == "10.77.3.11"
    assert fields["OS"].startswith("Linux 6.1.0-13-amd64 #1 SMP")
    assert fields["State"] == "MIXED"


def test_nodes_of_a_partition_are_read_and_silent_ones_are_not_usable() -> None:
    nodes = parse_nodes(golden("22.05", "sinfo"))
    assert nodes == [Node("n1", "mixed", "none"), Node("n2", "down*", "Not responding")]
    assert [node.usable for node in nodes] == [True, False]


def test_a_node_in_two_partitions_counts_once_and_a_reason_may_hold_bars() -> None:
    text = "n1|idle|none\nn1|idle|none\nn2|drained|gpu 3|xid 79\n\n"
    assert parse_nodes(text) == [Node("n1", "idle", "none"), Node("n2", "drained", "gpu 3|xid 79")]


def test_the_configuration_is_read() -> None:
    assert parse_config(golden("22.05", "config")) == SlurmConfig(kill_wait_s=5, slurmd_timeout_s=20)


def test_the_limit_of_failed_launches_is_read_where_slurm_tells_it() -> None:
    text = golden("22.05", "config")
    assert parse_config(text).max_batch_requeue is None
    assert parse_config(text + "MaxBatchRequeue         = 5\n").max_batch_requeue == 5


def test_something_else_than_a_configuration_says_nothing() -> None:
    with pytest.raises(SlurmUnavailableError, match="does not tell KillWait"):
        parse_config("Unable to contact slurm controller\n")


# --- the client over the tools -----------------------------------------------------------------------


class Tool:
    """Stands in for ``subprocess.run``."""

    def __init__(self, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        self.result = (code, stdout, stderr)
        self.error: Exception | None = None
        self.calls: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        self.calls.append((list(argv), dict(environ)))
        if self.error is not None:
            raise self.error
        return subprocess.CompletedProcess(argv, *self.result)


def client(tool: Tool) -> ScontrolClient:
    return ScontrolClient({"PATH": "/bin", "SLURM_CONF": "/etc/slurm/slurm.conf"}, tool)


def test_scontrol_is_asked_for_one_line_in_no_language_with_plain_times() -> None:
    tool = Tool(golden("22.05", "job"))
    assert client(tool).job("1").nodes == ("n1", "n2")
    assert tool.calls == [
        (
            ["scontrol", "-o", "show", "job", "1"],
            {
                "PATH": "/bin",
                "SLURM_CONF": "/etc/slurm/slurm.conf",
                "LC_ALL": "C",
                "SLURM_TIME_FORMAT": "%s",
            },
        )
    ]


def test_a_users_preferences_change_no_question() -> None:
    tool = Tool("")
    ScontrolClient({"SQUEUE_STATES": "R", "SINFO_ALL": "1", "SLURM_CLUSTERS": "a"}, tool).partition_nodes("b")
    ((_, environ),) = tool.calls
    assert set(environ) == {"SLURM_CLUSTERS", "LC_ALL", "SLURM_TIME_FORMAT"}


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), BlockingIOError(11, "Again")])
def test_a_command_that_cannot_be_started_is_no_answer(error: OSError) -> None:
    tool = Tool()
    tool.error = error
    with pytest.raises(SlurmUnavailableError, match=f"scontrol cannot be run: {error.strerror}"):
        client(tool).config()


def test_text_of_any_encoding_is_read_and_a_comment_is_the_very_bytes(tmp_path: Path) -> None:
    for name in ("scontrol", "squeue"):
        said = b"7|NodeName=n1 State=IDLE Reason=K\xfchlung [a@1]\n"
        (tmp_path / f"{name}.said").write_bytes(said)
        (tmp_path / name).write_text(f"#!/bin/sh\nexec cat {tmp_path}/{name}.said\n")
        (tmp_path / name).chmod(0o755)
    real = ScontrolClient({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert real.node("n1").reason == "K\ufffdhlung [a@1]"
    assert os.fsencode(real.comment("7")).endswith(b"Reason=K\xfchlung [a@1]")


def test_the_address_of_a_node_is_slurms_own() -> None:
    assert client(Tool(golden("22.05", "node"))).node_address("n1") == "10.77.3.11"


def test_a_node_without_an_address_is_found_under_its_name() -> None:
    assert client(Tool("NodeName=n1 Arch=x86_64\n")).node_address("n1") == "n1"


def test_a_job_that_slurm_does_not_know_is_unknown() -> None:
    tool = Tool(stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(UnknownJobError, match="does not know job 99"):
        client(tool).job("99")


@pytest.mark.parametrize(
    ("tool", "error", "says"),
    [
        (Tool(stderr="slurm_load_jobs error: Unable to contact slurm controller\n", code=1), None, "contact"),
        (Tool(code=1), None, "exit code 1"),
        (Tool(), FileNotFoundError("scontrol"), "scontrol is not installed or not on PATH"),
        (Tool(), subprocess.TimeoutExpired(["scontrol"], 30), "did not answer in 30 s"),
    ],
)
def test_slurm_that_cannot_be_asked_is_neither_gone_nor_healthy(
    tool: Tool, error: Exception | None, says: str
) -> None:
    tool.error = error
    for ask in (lambda: client(tool).job("1"), lambda: client(tool).node_address("n1")):
        with pytest.raises(SlurmUnavailableError, match=says):
            ask()


def test_orders_are_given_as_arguments() -> None:
    tool = Tool("JobId=7 JobName=x UserId=bob(1000) GroupId=bob(1000)\n")
    orders = client(tool)
    orders.requeue_hold("7")
    orders.update_job("7", ExcNodeList="n[1-2]", StartTime="now+15")
    orders.release("7")
    assert [argv for argv, _ in tool.calls] == [
        ["scontrol", "-o", "show", "job", "7"],
        ["scontrol", "requeuehold", "7"],
        ["scontrol", "update", "JobId=7", "ExcNodeList=n[1-2]", "StartTime=now+15"],
        ["scontrol", "release", "7"],
    ]


def test_an_order_that_slurm_refuses_says_so_in_slurms_words() -> None:
    orders = client(Tool("JobId=7 JobName=x UserId=bob(1000) GroupId=bob(1000)\n"))
    orders.job("7")
    orders._run = Tool(stderr="Access/permission denied for job 7\n", code=1)
    with pytest.raises(SlurmRefusedError, match="permission denied"):
        orders.release("7")


def test_an_order_for_one_task_of_an_array_is_none_for_the_others() -> None:
    """The id of the task that began last is the array's own: Slurm would requeue every task."""
    tool = Tool((DATA / "22.05" / "job_array.txt").read_text())
    orders = client(tool)
    for job_id in ("2", "6"):
        orders.requeue(job_id)
        orders.update_job(job_id, StartTime="now+15")
    assert [argv[1:3] for argv, _ in tool.calls if argv[1] != "-o"] == [
        ["requeue", "2_2"],
        ["update", "JobId=2_2"],
        ["requeue", "6"],
        ["update", "JobId=6"],
    ]


@pytest.mark.parametrize(
    "name", ["a\nb", "a\nState=x UserId=root(0)", "a\nJobId=2 ArrayJobId=9 ArrayTaskId=1"]
)
def test_a_name_with_new_lines_hides_nothing_and_means_no_other_job(name: str) -> None:
    told = golden("22.05", "job_array").replace("JobName=array", f"JobName={name}")
    if "JobId" not in name:
        assert parse_job(told, "6").state == "RUNNING"
    assert exact_job_id(told, "6") == "6"
    assert exact_job_id(told, "2").split("_")[0] == "2"


def test_a_job_that_slurm_does_not_know_gets_no_order() -> None:
    tool = Tool(stderr="slurm_load_jobs error: Invalid job id specified\n", code=1)
    with pytest.raises(SlurmRefusedError, match="does not know job 7"):
        client(tool).requeue("7")
    assert len(tool.calls) == 1


def test_a_real_command_that_hangs_or_is_missing_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailableError, match="not installed"):
        ScontrolClient({"PATH": str(tmp_path)}).job("1")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nexec sleep 30\n")
    scontrol.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with pytest.raises(SlurmUnavailableError, match=r"show job 1` did not answer in 0\.2 s"):
        ScontrolClient(environ, timeout_s=0.2).job("1")


# --- the fake ----------------------------------------------------------------------------------------


def test_the_fake_answers_as_it_was_told() -> None:
    fake: SlurmClient = FakeSlurmClient(running_job("7", ["n1", "n2"]))
    assert fake.job("7").nodes == ("n1", "n2")
    assert fake.node_address("n2") == "n2"
    assert [node.name for node in fake.partition_nodes("batch")] == ["n1", "n2"]
    with pytest.raises(UnknownJobError):
        fake.job("8")


def test_the_fake_carries_orders_out_or_refuses_them() -> None:
    fake = FakeSlurmClient(running_job("7", ["n1"]))
    fake.requeue_hold("7")
    fake.update_job("7", ExcNodeList="n[1-2]")
    assert fake.job("7").excluded_nodes == ("n1", "n2")
    fake.refuses["release"] = "no"
    with pytest.raises(SlurmRefusedError, match="no"):
        fake.release("7")
    assert [order for order, _, _ in fake.orders] == ["requeuehold", "update", "release"]


def test_the_fake_can_be_out_of_reach() -> None:
    fake = FakeSlurmClient(running_job("7", ["n1"]))
    fake.unavailable = SlurmUnavailableError("down")
    for ask in (lambda: fake.job("7"), fake.config, lambda: fake.release("7")):
        with pytest.raises(SlurmUnavailableError):
            ask()
