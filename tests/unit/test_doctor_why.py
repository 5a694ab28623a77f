"""Rules W1 to W10: why a job stands as it does. 22.05 is captured; later releases are adapted by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nvrx_slurm.doctor.findings import Finding, Status
from nvrx_slurm.doctor.why import Case, explain, headline, is_job_id, read_cases
from nvrx_slurm.slurm import Node, QueuedJob, ScontrolDiagnosis, SiteConfig, SlurmUnavailableError
from nvrx_slurm.slurm.client import parse_nodes
from nvrx_slurm.slurm.diagnosis import parse_queued_jobs, unavailable_nodes
from nvrx_slurm.testing.slurm_commands import FakeSlurmCommands

DATA = Path(__file__).parent / "data" / "doctor"
OK, WARN, PROBLEM, UNKNOWN = Status.OK, Status.WARN, Status.PROBLEM, Status.UNKNOWN
NOW = 1796046767.0
"""Shortly after the captured jobs were submitted."""
IDLE = tuple(Node(f"n{number}", "idle", "none") for number in (1, 2, 3))
SITE = SiteConfig({"MaxBatchRequeue": "5"})


def golden(name: str, version: str = "22.05") -> str:
    return (DATA / version / f"{name}.txt").read_text()


def job(name: str, version: str = "22.05", **changes: object) -> QueuedJob:
    (found,) = parse_queued_jobs(golden(f"job_{name}", version), "1")
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def case(name: str, version: str = "22.05", *, nodes: object = IDLE, **changes: object) -> Case:
    assert nodes is None or isinstance(nodes, tuple | list)
    return Case(job(name, version, **changes), nodes, SITE, NOW)


def of_rule(rule: str, found: Case) -> Finding:
    (finding,) = [finding for finding in explain(found) if finding.rule == rule]
    return finding


def rules(found: Case, status: Status) -> list[str]:
    return [finding.rule for finding in explain(found) if finding.status is status]


# --- reading ---------------------------------------------------------------------------------------------


def test_a_pending_job_is_read() -> None:
    found = job("excluded_too_wide")
    assert (found.job_id, found.name, found.user) == ("22", "train", "user")
    assert (found.state, found.reason, found.held) == ("PENDING", "BadConstraints", True)
    assert (found.num_nodes, found.excluded_nodes) == (2, ("n1", "n2"))
    assert (found.batch_flag, found.restarts, found.start_time) == (1, 0, None)


def test_every_captured_job_is_read() -> None:
    for path in DATA.glob("*/job_*.txt"):
        for found in parse_queued_jobs(path.read_text(), "1"):
            assert found.state.isupper(), path
            assert "_" not in found.reason.partition(":")[0], path
            assert headline(Case(found, IDLE, SITE, NOW))


def test_the_elements_of_an_array_are_told_apart() -> None:
    found = parse_queued_jobs(golden("job_array"), "41")
    assert {element.job_id for element in found} == {"41_0", "41_[1-3%1]"}


def test_a_job_s_name_cannot_pretend_to_be_its_fields() -> None:
    text = golden("job_held_user").replace("JobName=train", "JobName=x JobState=RUNNING Reason=None")
    (found,) = parse_queued_jobs(text, "17")
    assert (found.state, found.reason) == ("PENDING", "JobHeldUser")
    assert found.name == "x JobState=RUNNING Reason=None"


def test_a_submit_line_cannot_either() -> None:
    assert job("launch_failed", "25.11").reason == "launch failed requeued held"


def test_the_nodes_in_a_reason_are_read() -> None:
    assert unavailable_nodes("ReqNodeNotAvail, UnavailableNodes:n[1-2],gpu_7") == ["n1", "n2", "gpu_7"]
    assert unavailable_nodes("Priority") == ()
    assert job("req_node_unavail").reason == "ReqNodeNotAvail, UnavailableNodes:n1"


# --- W1: held, and who can release it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "by_owner"),
    [
        ("held_user", "22.05", True),
        ("uhold", "22.05", True),
        ("held_admin", "22.05", False),
        ("requeued_held", "22.05", True),
        ("launch_failed", "22.05", True),
        ("launch_failed", "24.11", True),
        ("launch_failed", "25.11", True),
        ("limit_exceeded", "24.11", False),
        ("limit_exceeded", "25.11", False),
    ],
)
def test_a_held_job_says_who_can_release_it(name: str, version: str, by_owner: bool) -> None:
    found = case(name, version)
    answer = of_rule("W1", found).answer
    assert answer.status is PROBLEM
    assert f"scontrol release {found.job.job_id}" in answer.fix
    assert answer.fix.startswith("the owner can:") is by_owner
    assert " is held" in headline(found) or found.job.state == "REQUEUE_HOLD"


@pytest.mark.parametrize("name", ["priority", "begintime", "running", "excluded_too_wide", "completing"])
def test_a_job_that_nobody_has_held_is_not_called_held(name: str) -> None:
    assert "W1" not in {finding.rule for finding in explain(case(name))}


def test_priority_0_is_a_hold_whatever_the_reason() -> None:
    assert of_rule("W1", case("priority", priority=0)).status is PROBLEM


# --- W2: Slurm's own words -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("begintime", OK, "sbatch --begin"),
        ("requeued", OK, "StartTime=now"),
        ("resources", OK, "first in line"),
        ("priority", OK, "higher priority"),
        ("dependency", OK, "afterok:14(unfulfilled)"),
        ("dependency_never", PROBLEM, "afterok:2(failed)"),
        ("too_many", PROBLEM, "does not allow"),
        ("excluded_too_wide", PROBLEM, "release is refused"),
        ("required_excluded", PROBLEM, "exclusions included"),
    ],
)
def test_each_reason_is_explained(name: str, status: Status, words: str) -> None:
    answer = of_rule("W2", case(name)).answer
    assert answer.status is status
    assert words in answer.why


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("PartitionDown", PROBLEM),
        ("PartitionTimeLimit", PROBLEM),
        ("Reservation", OK),
        ("Licenses", OK),
        ("QOSMaxNodePerUserLimit", OK),
        ("AssocGrpNodeLimit", OK),
        ("InvalidAccount", PROBLEM),
        ("Prolog", OK),
        ("Cleaning", OK),
        ("", OK),
        ("SomethingNew", UNKNOWN),
    ],
)
def test_other_reasons_are_explained_or_left_unknown(reason: str, status: Status) -> None:
    assert of_rule("W2", case("priority", reason=reason)).status is status


def test_a_job_in_an_array_that_is_throttled_names_the_array() -> None:
    (waiting,) = [j for j in parse_queued_jobs(golden("job_array"), "41") if j.state == "PENDING"]
    assert "JobId=41 ArrayTaskThrottle" in of_rule("W2", Case(waiting, IDLE, SITE, NOW)).answer.why


def test_nodes_that_are_not_available_are_named_with_their_reasons() -> None:
    nodes = parse_nodes(golden("nodes_unavail"))
    answer = of_rule("W2", case("req_node_unavail", nodes=nodes)).answer
    assert (answer.status, answer.read) == (PROBLEM, "not available: n1")
    assert "n1 is drained: nvrx:xid79 GPU 3 fell off the bus" in answer.why
    both = of_rule("W2", case("nodes_unavail", nodes=nodes)).answer
    assert both.read == "not available: n[1-2]"
    assert "n2 is down: Not responding | cable" in both.why


def test_missed_nodes_that_are_all_right_are_reserved() -> None:
    assert of_rule("W2", case("nodes_unavail")).status is OK


def test_without_the_nodes_what_is_missed_is_unknown() -> None:
    assert of_rule("W2", case("req_node_unavail", nodes=None)).status is UNKNOWN


def test_when_a_job_may_start_is_said() -> None:
    assert of_rule("W2", case("begintime")).answer.read == "may start in 59m 56s"
    late = dataclasses.replace(case("begintime"), now=2e9)
    assert of_rule("W2", late).answer.read == "may start now"


# --- W3: the arithmetic of exclusions --------------------------------------------------------------------

_DOWN = Node("n3", "down*", "Not responding")


@pytest.mark.parametrize(
    ("nodes", "excluded", "needed", "status", "words"),
    [
        (IDLE, (), 3, OK, "3 usable of 3 in batch: 3 left, 3 needed"),
        (IDLE, ("n1",), 2, OK, "1 of them excluded: 2 left, 2 needed"),
        (IDLE, ("n1", "n2"), 2, PROBLEM, "2 of them excluded: 1 left, 2 needed"),
        ((*IDLE[:2], _DOWN), ("n1",), 2, PROBLEM, "2 usable of 3 in batch, 1 of them excluded: 1 left"),
        ((*IDLE[:2], _DOWN), (), 3, PROBLEM, "2 usable of 3"),
        ((*IDLE[:2], _DOWN), ("n3",), 2, OK, "2 usable of 3 in batch: 2 left"),
        (IDLE, ("n1",), 4, PROBLEM, "4 needed"),
        (None, ("n1",), 2, UNKNOWN, "could not be asked"),
    ],
)
def test_exclusions_are_counted_against_what_is_needed(
    nodes: object, excluded: tuple[str, ...], needed: int, status: Status, words: str
) -> None:
    found = case("priority", nodes=nodes, excluded_nodes=excluded, num_nodes=needed)
    answer = of_rule("W3", found).answer
    assert (answer.status, words in answer.read) == (status, True), answer


def test_an_exclusion_that_can_never_be_met_says_how_many_are_possible() -> None:
    answer = of_rule("W3", case("excluded_too_wide")).answer
    assert "even with every other node back" in answer.why
    assert answer.fix.startswith("exclude 1 node at most: scontrol update JobId=22 ExcNodeList=")


def test_a_partition_that_is_too_small_is_not_blamed_on_exclusions() -> None:
    answer = of_rule("W3", case("priority", excluded_nodes=("n1",), num_nodes=4)).answer
    assert "fewer nodes than it needs" in answer.why


# --- W4 to W10 -------------------------------------------------------------------------------------------


def test_a_node_that_is_required_and_excluded_is_named() -> None:
    answer = of_rule("W4", case("required_excluded")).answer
    assert (answer.status, answer.read) == (PROBLEM, "n1")
    assert "ReqNodeList=" in answer.fix


def test_a_required_node_that_is_drained_is_named() -> None:
    answer = of_rule("W4", case("req_node_unavail", nodes=parse_nodes(golden("nodes_unavail")))).answer
    assert "n1 is drained (nvrx:xid79" in answer.why


def test_required_nodes_that_are_busy_are_nothing_special() -> None:
    assert "W4" not in {finding.rule for finding in explain(case("req_busy"))}


@pytest.mark.parametrize(("flag", "status"), [(2, OK), (4, OK), (5, WARN), (6, PROBLEM)])
def test_the_launch_counter_warns_one_step_before(flag: int, status: Status) -> None:
    answer = of_rule("W5", case("running", batch_flag=flag)).answer
    assert answer.status is status
    assert f"BatchFlag {flag} of MaxBatchRequeue 5" in answer.read


@pytest.mark.parametrize("version", ["24.11", "25.11"])
def test_the_last_launch_of_a_later_release_warns(version: str) -> None:
    assert of_rule("W5", case("last_launch", version)).status is WARN


def test_before_23_02_the_limit_is_5() -> None:
    found = dataclasses.replace(case("running", batch_flag=5), config=SiteConfig({}))
    assert of_rule("W5", found).status is WARN


def test_a_first_launch_is_not_worth_a_word() -> None:
    assert "W5" not in {finding.rule for finding in explain(case("running"))}


def test_a_requeued_job_says_what_it_leaves_out() -> None:
    answer = of_rule("W6", case("requeued", excluded_nodes=("n2",))).answer
    assert answer.read == "Slurm has requeued it 1 time, now without n2"


def test_components_of_a_heterogeneous_job_are_warned_about() -> None:
    for component in parse_queued_jobs(golden("job_het"), "1"):
        assert of_rule("W7", Case(component, IDLE, SITE, NOW)).status is WARN


def test_a_completing_job_says_what_it_waits_for() -> None:
    busy = (Node("n1", "completing", "none"), *IDLE[1:])
    answer = of_rule("W8", dataclasses.replace(case("completing", nodes=busy), now=1796046820.0)).answer
    assert (answer.status, answer.read) == (OK, "completing for 4s on n1")
    dead = (Node("n1", "completing*", "Not responding"), *IDLE[1:])
    assert of_rule("W8", case("completing", nodes=dead)).status is WARN


@pytest.mark.parametrize(
    ("changes", "status", "read"),
    [
        ({}, OK, "may be requeued"),
        ({"requeue": False}, WARN, "--no-requeue"),
        ({"batch": False, "batch_flag": 0}, OK, "interactive"),
        ({"priority": 0}, WARN, "held for the next time"),
    ],
)
def test_a_running_job_says_what_a_requeue_would_do(
    changes: dict[str, object], status: Status, read: str
) -> None:
    answer = of_rule("W9", case("running", **changes)).answer
    assert (answer.status, answer.read) == (status, read)


@pytest.mark.parametrize(
    ("state", "code", "signal", "status", "words"),
    [
        ("COMPLETED", 0, 0, OK, ""),
        ("FAILED", 1, 0, PROBLEM, "restarts were used up"),
        ("FAILED", 75, 0, PROBLEM, "could not be requeued"),
        ("FAILED", 143, 0, PROBLEM, "signal 15"),
        ("FAILED", 0, 9, PROBLEM, "signal 9"),
        ("FAILED", 3, 0, PROBLEM, "batch script failed"),
        ("NODE_FAIL", 1, 0, PROBLEM, "a node died"),
        ("PREEMPTED", 0, 0, PROBLEM, "preempted"),
        ("TIMEOUT", 0, 0, PROBLEM, "time limit"),
        ("CANCELLED", 0, 0, PROBLEM, "cancelled"),
        ("OUT_OF_MEMORY", 0, 125, PROBLEM, "memory"),
    ],
)
def test_the_end_of_a_job_is_explained(
    state: str, code: int, signal: int, status: Status, words: str
) -> None:
    ended = case("running", state=state, reason="", exit_code=code, exit_signal=signal)
    answer = of_rule("W10", ended).answer
    assert answer.status is status
    assert words in answer.why


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({}, "scontrol requeue 13"),
        ({"requeue": False}, "submit it again"),
        ({"batch": False}, "submit it again"),
    ],
)
def test_only_what_slurm_would_requeue_is_to_be_requeued(changes: dict[str, object], fix: str) -> None:
    ended = case("running", state="FAILED", reason="", exit_code=75, **changes)
    assert of_rule("W10", ended).answer.fix.startswith(fix)


def test_a_job_that_could_never_fit_says_so() -> None:
    assert of_rule("W10", case("bad_constraints")).answer.read == "BadConstraints"


# --- asking ----------------------------------------------------------------------------------------------


def test_slurm_is_asked_once_per_partition() -> None:
    commands = FakeSlurmCommands(
        {
            "scontrol -o show job 41": golden("job_array"),
            "scontrol show config": golden("config"),
            "sinfo": golden("nodes_allocated"),
        }
    )
    cases = read_cases(ScontrolDiagnosis({}, commands), "41", NOW)
    assert len(cases) == 2
    assert [line.split()[0] for line in commands.asked].count("sinfo") == 1


def test_nodes_that_could_not_be_asked_about_are_unknown_and_the_rest_is_told() -> None:
    commands = FakeSlurmCommands({"scontrol -o show job 17": golden("job_held_user")})
    (found,) = read_cases(ScontrolDiagnosis({}, commands), "17", NOW)
    assert (found.nodes, found.config) == (None, None)
    assert rules(found, PROBLEM) == ["W1"]
    assert rules(found, UNKNOWN) == ["W3"]


def test_a_slurm_that_cannot_be_asked_about_the_job_says_so() -> None:
    commands = FakeSlurmCommands({"scontrol": FileNotFoundError("scontrol")})
    with pytest.raises(SlurmUnavailableError):
        read_cases(ScontrolDiagnosis({}, commands), "17", NOW)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("17", True), ("17_3", True), ("17+1", True), ("", False), ("n1", False), ("1 2", False)],
)
def test_a_job_id_is_told_from_other_text(text: str, is_one: bool) -> None:
    assert is_job_id(text) is is_one
