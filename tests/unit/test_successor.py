"""What a node does when its Coordinator's host is silent, with files and a Slurm of the test's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator.deferred_exit import deferred_code, report_exit
from nvrx_slurm.coordinator.handover import (
    Handover,
    HandoverError,
    job_state,
    load_handover,
    save_handover,
)
from nvrx_slurm.coordinator.job_end import leave_exit_code
from nvrx_slurm.coordinator.lease import Fence, Lease, LeaseFile
from nvrx_slurm.coordinator.lease_watch import Join, Leave
from nvrx_slurm.coordinator.policy import Policy
from nvrx_slurm.coordinator.run_dir import RunDir, RunDirError
from nvrx_slurm.coordinator.successor import Outcome, Successor, Won
from nvrx_slurm.coordinator.takeover import requeue_job, specification
from nvrx_slurm.journal import JournalWriter, read_journal
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import Node, SlurmUnavailableError
from nvrx_slurm.testing import FakeSlurmClient, running_job
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

F0, F1 = Fence("7", 0, 0), Fence("7", 0, 1)
NODES = ("n1", "n2", "n3")
MONITORING = Monitoring(
    heartbeat=HeartbeatTimeouts(initial=60.0, subsequent=30.0),
    section=SectionTimeouts(section={"step": 9.0, "save": None}),
)
HANDOVER = Handover(
    job_id="7",
    restart_count=0,
    submitted=5,
    policy=Policy(nodes=NODES, active_nodes=2, max_restarts=4, rejoin_timeout_s=60.0),
    welcome=msg.Welcome(
        program=msg.Program(kind=msg.ProgramKind.SCRIPT, target="/train.py", args=["--x"], cwd="/"),
        job_id="7",
        run_dir="/run",
        nproc_per_node="2",
        warm_start=True,
        max_restarts=4,
        stop_timeout_s=1.0,
    ),
    monitoring=MONITORING,
    keep_timeouts=True,
    standby=True,
)


class Time:
    """Passes when somebody sleeps; ``then`` is called with it."""

    def __init__(self, then: Callable[[float], None] = lambda _: None) -> None:
        self.now = 0.0
        self._then = then

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 3600, "it never decides"
        self._then(self.now)

    def clock(self) -> float:
        return self.now


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    write_lease(RunDir(tmp_path), F0, 1)
    return RunDir(tmp_path)


def write_lease(run_dir: RunDir, fence: Fence, counter: int, **fields: object) -> None:
    values = {"host": "n1", "address": "10.0.0.1:5", **fields}
    LeaseFile(run_dir.path).write(Lease(fence=str(fence), counter=counter, **values))  # type: ignore[arg-type]


def slurm_with(n1: str = "down*", **fields: object) -> FakeSlurmClient:
    nodes = [Node("n1", n1, ""), *(Node(f"n{number}", "allocated", "") for number in range(2, 6))]
    return FakeSlurmClient(running_job("7", NODES, **fields), nodes=nodes)


def outcome_for(
    run_dir: RunDir, slurm: FakeSlurmClient, time: Time, node: str = "n2", standby: bool = True
) -> Outcome:
    handover = msgspec.structs.replace(HANDOVER, standby=standby)
    return Successor(run_dir, handover, node, F0, slurm).run(time.sleep, time.clock)


# --- watching ----------------------------------------------------------------------------------------


def test_the_first_node_in_order_takes_over_after_30_s_and_says_so_in_the_lease(run_dir: RunDir) -> None:
    time = Time()
    assert outcome_for(run_dir, slurm_with("allocated"), time) == Won(F1, "n1", 30.0)
    lease = LeaseFile(run_dir.path).read()
    assert lease == Lease(fence="7.0.1", counter=0, host="n2")
    assert not LeaseFile(run_dir.path).claim(F1, "n3"), "it is taken"


def test_the_second_node_steps_in_ten_seconds_later(run_dir: RunDir) -> None:
    time = Time()
    assert isinstance(outcome_for(run_dir, slurm_with(), time, node="n3"), Won)
    assert time.now == pytest.approx(40.0, abs=1.0)


def test_a_node_whose_coordinator_renews_leaves_without_asking_anybody(run_dir: RunDir) -> None:
    slurm = slurm_with()
    time = Time(lambda now: write_lease(run_dir, F0, 1 + int(now // 10)))
    outcome = outcome_for(run_dir, slurm, time)
    assert isinstance(outcome, Leave)
    assert "cut off" in outcome.why
    assert slurm.orders == []
    assert LeaseFile(run_dir.path).highest_claim(F0) == 0


def test_a_node_joins_whoever_took_over(run_dir: RunDir) -> None:
    def another(now: float) -> None:
        write_lease(run_dir, F1, 1, host="n3", address="10.0.0.3:6")

    outcome = outcome_for(run_dir, slurm_with(), Time(another))
    assert isinstance(outcome, Join)
    assert outcome.lease.address == "10.0.0.3:6"


def test_a_node_that_cannot_read_the_run_directory_leaves(run_dir: RunDir) -> None:
    (run_dir.path / "lease.json").write_text("{")
    outcome = outcome_for(run_dir, slurm_with(), Time())
    assert isinstance(outcome, Leave)
    assert "does not tell" in outcome.why


def test_without_a_standby_nobody_acts_while_slurm_hears_from_the_host(run_dir: RunDir) -> None:
    slurm, time = slurm_with("allocated"), Time()
    outcome = outcome_for(run_dir, slurm, time, standby=False)
    assert isinstance(outcome, Leave)
    assert "Slurm still hears from n1" in outcome.why
    assert time.now == pytest.approx(30 + 2 * 300 + 60, abs=3), "twice SlurmdTimeout, and a minute"
    assert LeaseFile(run_dir.path).highest_claim(F0) == 0


def test_without_a_standby_the_job_is_claimed_once_slurm_misses_the_host(run_dir: RunDir) -> None:
    slurm = slurm_with("allocated")

    def missed(now: float) -> None:
        if now >= 100:
            slurm.nodes[0] = Node("n1", "allocated*", "")

    time = Time(missed)
    assert isinstance(outcome_for(run_dir, slurm, time, standby=False), Won)
    assert time.now == pytest.approx(100, abs=3)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"state": "COMPLETING"}, "the job is COMPLETING"),
        ({"batch": False}, "cannot be requeued"),
        ({"requeue": False}, "cannot be requeued"),
    ],
)
def test_without_a_standby_a_job_that_cannot_be_requeued_is_left_alone(
    run_dir: RunDir, fields: dict[str, object], why: str
) -> None:
    outcome = outcome_for(run_dir, slurm_with(**fields), Time(), standby=False)
    assert isinstance(outcome, Leave)
    assert why in outcome.why


def test_without_a_standby_and_without_slurm_nobody_acts(run_dir: RunDir) -> None:
    slurm = slurm_with()
    slurm.unavailable = SlurmUnavailableError("no controller")
    assert isinstance(outcome_for(run_dir, slurm, Time(), standby=False), Leave)
    assert LeaseFile(run_dir.path).highest_claim(F0) == 0


# --- going on ----------------------------------------------------------------------------------------


def events(run_dir: RunDir, *events: AnyEvent, attempt: int = 0, job: str = "7") -> None:
    log = JournalWriter(run_dir.journal, job, attempt)
    for number, event in enumerate(events):
        log.append(number if isinstance(event, journal.CycleStarted) else 0, event)
    log.close()


STARTED = journal.JobStarted(
    nodes=list(NODES),
    active_nodes=2,
    spares=1,
    max_restarts=4,
    argv=["/train.py", "--x"],
    host="n1",
    fence="7.0.0",
    version="0",
)
CYCLE = journal.CycleStarted(world_size=4, nodes=["n1", "n2"], spares=["n3"])
RESTART = journal.Verdict(action=journal.VerdictAction.RESTART, rule="r", why="w", node="n3")


def test_a_handover_is_read_back_and_holds_no_secret(run_dir: RunDir) -> None:
    save_handover(run_dir.handover, HANDOVER)
    assert load_handover(run_dir.handover) == HANDOVER
    assert b"token" not in run_dir.handover.read_bytes()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"v":2}'])
def test_a_handover_that_is_none_is_refused_with_its_name(run_dir: RunDir, text: str) -> None:
    run_dir.handover.write_text(text)
    with pytest.raises(HandoverError, match="handover"):
        load_handover(run_dir.handover)


def test_the_journal_tells_how_far_the_job_had_come(run_dir: RunDir) -> None:
    events(run_dir, STARTED, CYCLE, RESTART, CYCLE, RESTART)  # an earlier start of the job
    events(
        run_dir,
        STARTED,
        CYCLE,
        CYCLE,
        journal.NodeLost(node="n2", why="w"),
        journal.NodeLost(node="n3", why="w"),
        journal.NodeJoined(node="n2", slots=2),
        journal.NodeExcluded(node="n3", reason="r"),
        RESTART,
        journal.TimeoutsCalculated(initial=1.0, subsequent=2.0, section={"step": 3.0, "save": None}),
        attempt=1,
    )
    state = job_state(read_journal(run_dir.journal), 1, MONITORING)
    assert (state.next_cycle, state.restarts) == (4, 1)
    assert state.excluded == {"n3": "r"}
    assert state.lost == {"n3"}
    assert state.monitoring is not None
    assert state.monitoring.heartbeat.subsequent == 2.0
    assert state.monitoring.section.section == {"step": 3.0, "save": None}


def test_a_standby_goes_on_with_the_next_cycle_and_what_is_left_of_the_budget(run_dir: RunDir) -> None:
    events(run_dir, STARTED, CYCLE, RESTART)
    slurm = slurm_with()
    slurm.addresses = {"n3": "127.0.0.1"}
    spec = specification(Won(F1, "n1", 31.0), "n2", "secret", run_dir, HANDOVER, slurm, {"A": "b"})
    assert spec.fence == "7.0.1"
    assert (spec.host, spec.address) == ("n2", "127.0.0.1")
    assert (spec.policy.first_cycle, spec.policy.active_nodes) == (2, 2)
    assert spec.policy.rejoin_timeout_s == 0.0
    assert spec.succession is not None
    assert (spec.succession.restarts, spec.succession.token) == (1, "secret")
    assert spec.welcome == HANDOVER.welcome


def test_a_requeue_by_a_successor_is_told_in_the_journal(run_dir: RunDir) -> None:
    events(run_dir, STARTED, CYCLE)
    slurm = slurm_with()
    assert requeue_job(Won(F1, "n1", 31.0), "n2", run_dir, HANDOVER, slurm)
    told = [record.event for record in read_journal(run_dir.journal)][2:]
    assert [type(event).__name__ for event in told] == [
        "CoordinatorLost",
        "FaultDetected",
        "Verdict",
        "JobEnded",
        "Requeued",
    ]
    assert told[0] == journal.CoordinatorLost(host="n1", successor="n2", fence="7.0.1", silent_s=31.0)
    assert told[-1].excluded == ["n1"]  # type: ignore[union-attr]


def test_a_requeue_that_is_refused_is_told_too(run_dir: RunDir) -> None:
    events(run_dir, STARTED, CYCLE)
    slurm = slurm_with()
    slurm.refuses["requeuehold"] = "Access denied"
    assert not requeue_job(Won(F1, "n1", 31.0), "n2", run_dir, HANDOVER, slurm)
    assert isinstance(read_journal(run_dir.journal)[-1].event, journal.NotRequeued)


# --- the exit code -----------------------------------------------------------------------------------


def test_an_exit_code_without_a_batch_script_is_left_to_a_start_on_one_node() -> None:
    slurm, told = slurm_with(), list[AnyEvent]()
    leave_exit_code(slurm, "7", "n1", 3, told.append)
    assert told[0] == journal.ExitDeferred(code=3)
    assert isinstance(told[1], journal.Requeued)
    assert ("update", "7", {"NumNodes": "1"}) in slurm.orders


def test_an_exit_code_that_the_old_batch_script_tells_is_left_to_it() -> None:
    slurm, told = slurm_with("allocated", state="COMPLETED"), list[AnyEvent]()
    leave_exit_code(slurm, "7", "n1", 0, told.append)
    assert told == []
    assert slurm.orders == []


def test_a_deferred_exit_code_is_told_once(run_dir: RunDir) -> None:
    assert deferred_code(run_dir.journal, "7") is None
    events(run_dir, STARTED, journal.JobEnded(code=3, why="w"), journal.ExitDeferred(code=3))
    assert deferred_code(run_dir.journal, "7") == 3
    assert deferred_code(run_dir.journal, "8") is None, "it is another job's"
    report_exit(run_dir.journal, "7", 1, 3)
    assert deferred_code(run_dir.journal, "7") is None
    assert read_journal(run_dir.journal)[-1].attempt == 1


def test_a_job_that_trains_again_has_no_deferred_exit_code(run_dir: RunDir) -> None:
    events(run_dir, STARTED, journal.ExitDeferred(code=3))
    events(run_dir, STARTED, attempt=1)
    assert deferred_code(run_dir.journal, "7") is None


# --- the run directory -------------------------------------------------------------------------------


def test_a_later_start_of_the_job_takes_the_directory_from_a_host_that_was_lost(run_dir: RunDir) -> None:
    held = RunDir(run_dir.path).claim(F0)
    with pytest.raises(RunDirError, match="in use"):
        run_dir.claim()
    with pytest.raises(RunDirError, match="in use"):
        run_dir.claim(F0)
    with pytest.raises(RunDirError, match="in use"):
        run_dir.claim(Fence("8", 1, 0))
    later = run_dir.claim(Fence("7", 1, 0))
    write_lease(run_dir, Fence("7", 1, 0), 1)
    with pytest.raises(RunDirError, match="in use"):
        run_dir.claim(Fence("7", 1, 0))
    os.close(held)
    os.close(later)
