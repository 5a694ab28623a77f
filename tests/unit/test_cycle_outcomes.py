"""How a job ends: every row of the table in docs/users.md, played through."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cycle_driver import Job

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.past import Past
from nvrx_slurm.wire.rank_channel import WorkloadAction

USERS = Path(__file__).resolve().parent.parent.parent / "docs" / "users.md"
running = Job.running


def preempted_or_not(*, preempted: bool, state: str = "RUNNING") -> int:
    return running().lose("n1", "n2", by_signal=True).slurm_answers(state, preempted=preempted).end.code


def goes_on(job: Job) -> None:
    assert job.phase is Phase.RUNNING


def all_succeed() -> list[int]:
    return [running().exit_all().end.code]


def one_is_done_early() -> list[int]:
    job = running().exit(0, 0).later(10**6)
    goes_on(job)
    assert len(job.started) == 1
    assert job.timers == {}
    return []


def another_fails_then() -> list[int]:
    job = running().exit(0, 0).exit(1, 0).fails(3)
    goes_on(job)
    assert job.started == [("n1", "n2")] * 2
    # Their first success is no longer one.
    goes_on(job.exit(2, 0).exit(3, 0))
    return []


def a_node_that_is_done_is_lost() -> list[int]:
    job = running().exit(0, 0).exit(1, 0).lose("n1")
    goes_on(job)
    assert job.exit(2, 0).exit(3, 0).end.code == 0
    return []


def too_few_nodes() -> list[int]:
    return [running().lose("n2").stopped("n1").end.code]


def the_time_is_nearly_over() -> list[int]:
    codes = set()
    limit, sent = steps.DrainRequested(why="the time limit, 120 s away"), steps.DrainRequested(signal.SIGUSR1)
    for asks in (limit, sent):
        job = running()
        job.feed(asks)
        assert job.new(steps.AskRanksToStop) == [steps.AskRanksToStop(0, ("n1", "n2"))]
        codes.add(job.exit_all().end.code)
    return list(codes)


def some_do_not_heed_it() -> list[int]:
    job = running().drain().exit(0, 0).exit(2, 0).later(10**6)
    goes_on(job)
    assert job.timers == {}
    return []


def a_fault_after_that() -> list[int]:
    job = running().drain().exit(0, 0).fails(3)
    assert len(job.started) == 1
    return [job.end.code]


def cancelled() -> list[int]:
    job = running().signal()
    for rank in range(4):
        job.exit(rank, 0, after_stop=True)
    code = job.stopped("n1", "n2").end.code
    assert running().signal().signal().end.code == code
    return [code]


def interrupted() -> list[int]:
    return [running().signal(sig).stopped("n1", "n2").end.code for sig in (signal.SIGINT, signal.SIGHUP)]


def all_agents_are_signalled() -> list[int]:
    return [
        preempted_or_not(preempted=False, state="CANCELLED"),
        preempted_or_not(preempted=True),
        preempted_or_not(preempted=False),
    ]


def one_rank_is_signalled() -> list[int]:
    job = running().fails(2, -signal.SIGTERM)
    goes_on(job)
    assert len(job.started) == 2
    return []


def preempted() -> list[int]:
    job = running()
    job.feed(steps.StopRequested(signal.SIGTERM))
    code = job.stopped("n1", "n2").slurm_answers("PREEMPTED", preempted=True).end.code
    assert code == preempted_or_not(preempted=True)
    return [code]


def a_rank_shuts_down() -> list[int]:
    return [running().asks(3, WorkloadAction.ShutdownWorkload).exit(0, 1).stopped("n1", "n2").end.code]


def a_rank_wants_its_node_out() -> list[int]:
    job = running(spares=1).asks(2, WorkloadAction.ExcludeThisNode).stopped("n1", "n2")
    goes_on(job)
    return [running().asks(2, WorkloadAction.ExcludeThisNode).stopped("n1", "n2").end.code]


def restarts_used_up() -> list[int]:
    codes = {running(max_restarts=0).fails().end.code}
    codes.add(running(max_restarts=9, max_restarts_per_hour=1).fails().fails().end.code)
    return list(codes)


def no_progress() -> list[int]:
    job = running(max_restarts=9).trains(5).fails().trains(5).fails().trains(5).fails().trains(5).fails()
    never = running(past=Past(fruitless=2)).lose("n2").stopped("n1")
    return list({job.end.code, never.end.code})


OUTCOMES: dict[str, Callable[[], list[int]]] = {
    "every rank exits with 0": all_succeed,
    "a rank exits with 0 while others train": one_is_done_early,
    "ranks have exited with 0, and then another fails": another_fails_then,
    "a node is lost whose ranks have all exited with 0": a_node_that_is_done_is_lost,
    "fewer nodes than needed are left": too_few_nodes,
    "the time limit is `--time-limit-margin` (120 s) away; SIGUSR2 or SIGUSR1": the_time_is_nearly_over,
    "then some ranks exit with 0, and others do not heed it": some_do_not_heed_it,
    "a fault after that": a_fault_after_that,
    "`scancel`, SIGTERM to nvrx-srun, the time limit itself": cancelled,
    "SIGINT, SIGHUP": interrupted,
    "SIGTERM to agents or ranks of all nodes": all_agents_are_signalled,
    "SIGTERM to one rank": one_rank_is_signalled,
    "Slurm preempts the job": preempted,
    "a rank asks to shut the workload down": a_rank_shuts_down,
    "a rank asks to exclude its node": a_rank_wants_its_node_out,
    "`--max-restarts` or `--max-restarts-per-hour` used up": restarts_used_up,
    "no progress, or three attempts in a row that came to no step": no_progress,
}


def documented() -> dict[str, list[int]]:
    """The first column of the table, and the numbers in the last."""
    lines = iter(USERS.read_text().splitlines())
    assert "And how a job ends:" in lines
    rows = [line.strip("| ").split(" | ") for line in list(lines)[3:]]
    table = {}
    for row in rows:
        if len(row) != 3:
            break
        table[row[0]] = [int(number) for number in re.findall(r"\d+", row[2])]
    return table


@pytest.mark.parametrize("what", OUTCOMES)
def test_a_job_ends_as_the_table_says(what: str) -> None:
    assert OUTCOMES[what]() == documented()[what]


def test_the_table_has_no_other_rows() -> None:
    assert set(documented()) == set(OUTCOMES)
