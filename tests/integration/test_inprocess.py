"""In-process restart with real processes: the scenarios of a fault, and what each rank sees of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from bench.inprocess_ranks.client import Rank, Ranks

_HANGS = {
    "soft_timeout": 2.0,
    "hard_timeout": 20.0,
    "monitor_thread_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}
"""Time-outs of the wrapper, seconds; all others are far away."""
_SOON = {**_HANGS, "hard_timeout": 4.0}
_GROUP_S = 8.0
"""gloo may leave a rank blocked until its group's time-out, once in a while."""
_SILENCE = {"heartbeat_interval": 0.3, "heartbeat_timeout": 5.0}


class Scenarios:
    """Runs plans whose ranks must all end by themselves and leave nothing."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(
        self, *faults: list[tuple[int, str]], world_size: int = 3, scenario: str = "planned", **plan: Any
    ) -> list[Rank]:
        """Run a plan: what happens in each iteration, and more; see the script."""
        outcome = self._ranks.run({"faults": faults, **plan}, world_size, scenario, timeout_s=200)
        assert outcome.hung == [], outcome
        assert not outcome.left_behind, "a supervisor is still there"
        for rank in outcome.ranks:
            if rank.exit >= 0:
                assert rank.all("end")
            for end in rank.all("end"):
                assert end["threads"] == ["MainThread"]
                assert end["memfds"] == 0
                # As in the chaos benchmark: an exception may still hold the function's own group.
                assert end["sockets"] == 0 or not rank.all("returned")
        return outcome.ranks

    def said(self) -> str:
        """What all ranks have written to standard error."""
        return self._ranks.said()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    server = Ranks(tmp_path_factory.mktemp("inprocess"))
    yield Scenarios(server)
    server.close()


def all_returned(ranks: list[Rank], world_size: int | None = None) -> None:
    """Every rank that is left has returned its own value, and the numbers have no gaps."""
    left = [rank for rank in ranks if rank.all("returned")]
    assert len(left) == (len(ranks) if world_size is None else world_size)
    last = [rank.all("enter")[-1] for rank in left]
    assert sorted(int(entry["rank"]) for entry in last) == list(range(len(left)))
    for rank, entry in zip(left, last, strict=True):
        assert entry["world_size"] == str(len(left))
        assert rank.one("returned")["value"] == f"7 from {entry['rank']}"
        assert rank.exit == 0


def test_after_exceptions_all_ranks_enter_again_also_out_of_a_blocked_all_reduce(ranks: Scenarios) -> None:
    """S1, S14; exceptions that can't be copied or pickled are exceptions like all others."""
    done = ranks.run([(1, "exception")], [(0, "uncopyable"), (2, "exception")], others="gloo")
    all_returned(done)
    for rank in done:
        assert rank.entered == [0, 1, 2]
        assert (1, "EXCEPTION") in rank.records(1)
        # The slower one may be interrupted before it raises its own.
        assert {(0, "EXCEPTION"), (2, "EXCEPTION")} & rank.records(2)
        assert rank.one("reduced")["value"] == 3.0
        # initialize and health check begin an iteration; then abort, finalize, health check, rank assignment.
        order = [e["event"] for e in rank.events if e["event"] not in ("fault", "reduced", "returned", "end")]
        restart = ["abort", "finalize", "health_check", "assignment"]
        begin = ["initialize", "health_check", "enter"]
        assert order == ["assignment", *(begin + restart) * 2, *begin, "completion"]
        assert all(each["iteration"] == 2 for each in rank.all("completion"))
    # A plug-in sees the exception of its own rank's function.
    assert done[1].all("finalize")[0]["exception"] == "ValueError"
    second = {rank.all("finalize")[1]["exception"] for rank in done}
    assert second & {"TwoArguments", "ValueError"}


def test_a_killed_rank_is_left_out_and_rank_0_is_a_rank_as_any_other(ranks: Scenarios) -> None:
    """S2, BUG-2: all others blocked in an all-reduce, or in a barrier of the store."""
    done = ranks.run([(0, "sigkill")], [(2, "segfault")], [(4, "sigterm")], world_size=5, others="gloo")
    all_returned(done, 2)
    assert [rank.exit for rank in done] == [-9, 0, -11, 0, -15]
    assert (0, "TERMINATED") in done[1].records(1)
    assert [each["terminated"] for each in done[1].all("enter")] == [[], [0], [1], [2]]
    assert [each["rank"] for each in done[3].all("enter")] == ["3", "2", "1", "1"]


@pytest.mark.parametrize(("gets", "kind"), [("SIGSTOP", "UNRESPONSIVE"), ("SIGKILL", "TERMINATED")])
def test_a_lost_node_is_left_out(ranks: Scenarios, gets: str, kind: str) -> None:
    """S7: its processes are silent and all connections stay, or all end at once; ranks 1 and 3 are on it."""
    done = ranks.run(
        [(0, "node")],
        world_size=5,
        others="gloo",
        node=[1, 3],
        node_gets=gets,
        buriers=[0],
        times=_SILENCE,
        group_s=_GROUP_S,
    )
    all_returned(done, 3)
    assert [rank.exit for rank in done] == [0, -9, 0, -9, 0]
    assert done[0].records(1) >= {(1, kind), (3, kind)}
    again = done[0].all("enter")[1]["t"] - done[0].one("fault")["t"]
    assert again >= (_SILENCE["heartbeat_timeout"] if gets == "SIGSTOP" else 0)
    assert again < 60


@pytest.mark.parametrize("gets", ["SIGSTOP", "SIGKILL"])
def test_when_the_node_of_the_hub_is_lost_all_end_with_an_error_that_says_so(
    ranks: Scenarios, gets: str
) -> None:
    """S7, BUG-2: silence of a hub that was there is bounded by the heartbeat's time-out."""
    done = ranks.run(
        [(2, "node")], world_size=4, others="gloo", node=[0, 1], node_gets=gets, buriers=[2, 3],
        times=_SILENCE, group_s=_GROUP_S,
    )  # fmt: skip
    assert [rank.exit for rank in done] == [-9, -9, 1, 1]
    for rank in done[2:]:
        assert rank.one("raised")["type"] == "InternalError"
        assert len(rank.all("terminate")) == 1
        assert rank.one("end")["t"] - done[2].one("fault")["t"] < 60
    # Whoever ends first buries the node.
    said = min((rank.one("raised") for rank in done[2:]), key=lambda raised: raised["t"])["text"]
    assert ("nothing was heard of the hub" in said) == (gets == "SIGSTOP")


def test_deaths_during_a_restart_are_part_of_it_or_of_the_next_one(ranks: Scenarios) -> None:
    """S11: in finalize, after the barrier, and at the beginning of an iteration."""
    chaos = [
        [0, 1, "collective", "exception", 0],
        [0, 2, "finalize", "sigkill", 0],
        [1, 1, "collective", "exception", 0],
        [1, 3, "assignment", "sigkill", 0],
        [3, 0, "initialize", "sigkill", 0],
    ]
    done = ranks.run(
        world_size=5,
        scenario="chaotic",
        chaos=chaos,
        duration=0.1,
        times={"soft_timeout": 30.0},
        group_s=_GROUP_S,
    )
    assert [rank.exit for rank in done] == [-9, 0, -9, -9, 0]
    assert [done[1].one("returned")["value"], done[4].one("returned")["value"]] == ["0", "1"]
    for rank in (done[1], done[4]):
        # The death after the barrier interrupts iteration 2, maybe before the function has begun.
        assert [each for each in rank.entered if each not in (2, 3)] == [0, 1, 4]
        assert rank.all("enter")[-1]["world_size"] == "2"
        # Long before any heartbeat or hang would be noticed.
        assert rank.all("enter")[-1]["t"] - rank.all("enter")[0]["t"] < 28


def test_ctrl_c_while_a_call_cleans_up_leaves_nothing(ranks: Scenarios) -> None:
    done = ranks.run([(0, "exception")], ctrl_c_at_end=[1])
    assert done[1].one("raised")["type"] == "KeyboardInterrupt"
    assert done[1].exit == 1
    assert [done[0].exit, done[2].exit] == [0, 0]


def test_a_rank_that_leaves_lets_the_others_restart_rank_0_too(ranks: Scenarios) -> None:
    """S3, S12, BUG-3: SystemExit, KeyboardInterrupt; then the function asks for a restart itself."""
    done = ranks.run([(0, "exit")], [(1, "keyboard")], [(2, "restart")], world_size=4)
    all_returned(done, 2)
    assert done[0].exit == 3
    assert done[0].one("raised")["type"] == "SystemExit"
    assert done[1].one("raised")["type"] == "KeyboardInterrupt"
    for rank in done[:2]:
        assert len(rank.all("terminate")) == 1
        assert rank.one("terminate")["mode"] == "TERMINATED"
        assert not rank.all("completion")
    assert done[3].records(1) == {(0, "BASE_EXCEPTION")}
    assert done[3].records(3) == {(0, "EXCEPTION")}


def test_a_rank_without_ping_restarts_and_all_survive_whatever_they_are_blocked_in(ranks: Scenarios) -> None:
    """S5, BUG-1: steady signs of life from elsewhere hide nothing."""
    done = ranks.run([(1, "livelock")], [(2, "livelock")], others="gloo", times=_HANGS)
    all_returned(done)
    # Those that wait for it in the all-reduce are as silent as it is.
    assert "SOFT_TIMEOUT" in {kind for _, kind in done[0].records(1)}
    fault, again = done[1].all("fault")[0]["t"], done[1].all("enter")[1]["t"]
    # Their silence began a moment before the fault.
    assert again - fault >= 0.8


@pytest.mark.parametrize("kind", ["block", "gil", "sigstop"])
def test_a_rank_that_nothing_unblocks_is_killed_as_soon_as_all_others_wait(
    ranks: Scenarios, kind: str
) -> None:
    """S6: long before the hard time-out, which is 20 s."""
    done = ranks.run([(1, kind)], times=_HANGS)
    all_returned(done, 2)
    assert done[1].exit == -15
    assert done[0].records(1) == {(1, "SOFT_TIMEOUT"), (1, "HARD_TIMEOUT")}
    assert done[0].all("enter")[1]["t"] - done[1].one("fault")["t"] < 15


def test_when_the_process_of_the_hub_is_killed_all_end_with_an_error_that_says_so(
    ranks: Scenarios,
) -> None:
    """BUG-2: never a hang."""
    done = ranks.run([(1, "hub")])
    for rank in done:
        assert rank.exit == 1
        assert rank.one("raised")["type"] == "InternalError"
        assert len(rank.all("terminate")) == 1
    assert (
        "nothing was heard of the hub" in done[1].one("raised")["text"]
        or "closed" in done[1].one("raised")["text"]
    )
    assert "supervisor process has ended" in done[0].one("raised")["text"]


def test_a_rank_whose_supervisor_is_killed_leaves_at_once_and_the_others_go_on(ranks: Scenarios) -> None:
    """S8: nobody waits for a heartbeat that does not come."""
    done = ranks.run([(2, "supervisor")], others="gloo")
    all_returned(done, 2)
    assert done[2].one("raised")["type"] == "InternalError"
    assert (2, "TERMINATED") in done[0].records(1)


@pytest.mark.parametrize("others", ["swallow", "del"])
def test_a_function_that_swallows_the_interruption_is_interrupted_again(
    ranks: Scenarios, others: str
) -> None:
    """BUG-9: and never is the wrapper's own code."""
    done = ranks.run([(1, "exception")], others=others)
    all_returned(done)


def test_faults_of_plug_ins_end_one_rank_or_restart_all_as_is_documented(ranks: Scenarios) -> None:
    """S4, S10: which exceptions escape, by where they are raised."""
    done = ranks.run(
        [(1, "exception")],
        [(1, "exception")],
        world_size=5,
        fail_initialize=[(0, 3)],
        fail_abort=[(1, 4)],
        fail_finalize=[(1, 0)],
        fail_health_check=[(2, 2)],
        fail_assignment=[(2, 3)],
    )
    # initialize of rank 3 fails in iteration 0, so the plan's own fault comes in iteration 1.
    assert done[0].one("raised")["type"] == "ValueError"
    assert "finalize fails" in done[0].one("raised")["text"]
    assert done[0].entered[-1] == 1
    assert done[4].exit == 0


def test_the_limit_of_restarts_ends_all_ranks_and_each_calls_terminate_once(ranks: Scenarios) -> None:
    """S13"""
    done = ranks.run(*[[(1, "exception")]] * 5, max_iterations=3)
    for rank in done:
        assert rank.entered == [0, 1, 2]
        assert rank.one("raised")["type"] == "RestartAbort"
        assert len(rank.all("terminate")) == 1


def test_spares_take_the_place_of_lost_ranks(ranks: Scenarios) -> None:
    """S9: and they return nothing if they are not needed."""
    done = ranks.run([(1, "sigkill")], world_size=4, wrapper={"active_world_size": 2})
    assert [rank.entered for rank in done] == [[0, 1], [0], [1], []]
    assert [rank.all("enter")[-1]["world_size"] for rank in done[::2]] == ["2", "2"]
    assert [rank.one("returned")["value"] for rank in done if rank.exit == 0] == [
        "7 from 0",
        "7 from 1",
        None,
    ]


def test_what_a_call_wrapper_offers_and_what_a_wrapped_function_refuses(ranks: Scenarios) -> None:
    """Atomic sections hold up the abort, time-outs can be off, calls begin anew, metadata stays."""
    done = ranks.run(world_size=2, scenario="manners", silent=2.5, times=_HANGS)
    for rank in done:
        assert [each["value"] for each in rank.all("result")] == [[1, "one", 1], [2, "two", 1]]
        assert rank.all("result")[1]["name"] == "function"
        assert rank.all("result")[1]["text"] == "What a user says of it."
        assert "main thread" in rank.one("in_thread")["error"]
        assert "not torch.distributed.is_initialized()" in rank.one("with_group")["error"]
        # Silent for longer than the soft time-out, twice, and never interrupted for that.
        assert len(rank.all("unprotected")) == 2
    for end, aborted in zip(done[0].all("atomic_ends"), done[0].all("abort"), strict=True):
        assert aborted["t"] > end["t"]


def test_processes_in_place_of_lost_ranks_bring_the_world_back_to_its_size(ranks: Scenarios) -> None:
    """``rejoin``: of the rank whose supervisor runs the hub, too."""
    done = ranks.run(world_size=4, scenario="rejoining", killed=[0, 2], replace=True)
    assert [rank.exit for rank in done] == [-9, 0, -9, 0, 0, 0]
    left = [done[number] for number in (1, 3, 4, 5)]
    # Numbered after those that stayed, in the order of their coming.
    assert [rank.one("returned")["value"] for rank in left[:2]] == ["0", "1"]
    assert {rank.one("returned")["value"] for rank in left[2:]} == {"2", "3"}
    for rank in left:
        assert rank.one("reduced")["value"] == 4.0
        assert rank.entered[-1] == done[1].entered[-1]
        assert rank.all("enter")[-1]["world_size"] == "4"
        assert len(rank.all("completion")) == 1
    assert done[1].all("enter")[1]["world_size"] < "4"


def test_who_comes_in_place_of_another_holds_up_no_end(ranks: Scenarios) -> None:
    """A call that ends without any further restart: the process returns as a spare does."""
    done = ranks.run(world_size=2, scenario="rejoining", killed=[0], replace=True, ends=True)
    assert [rank.exit for rank in done] == [-9, 0, 0]
    assert done[1].one("returned")["value"] == "0"
    assert done[1].entered == [0, 1]
    assert done[2].one("returned")["value"] is None
    assert done[2].entered == []


def test_what_users_count_on(ranks: Scenarios, tmp_path: Path) -> None:
    """The rest of the behaviours that NVIDIA's tests ask for, in single calls of one after the other."""
    fails = [
        # Unhealthy at the start of an iteration, or no initialization, once: a restart.
        {
            "fail_health_check": [(0, 0)],
            "fail_abort": [(0, 0)],
            "fail_initialize": [(1, 0)],
            "fail_completion": [(2, 0)],
        },
        {"fail_assignment": [(0, 0)]},
    ]
    (rank,) = ranks.run(
        world_size=1,
        scenario="behaviours",
        times=_HANGS,
        fails=fails,
        transient=True,
        wrapper={"monitor_process_logfile": f"{tmp_path}/supervisor_{{rank}}.log"},
    )
    assert rank.one("no_store")["error"] == "ConnectionError"
    assert rank.one("slow")["value"] == 0
    # An exception inside leaves hang protection on; then it strikes.
    assert rank.one("protected")["value"] == 2
    assert not rank.one("keys")["there"]
    assert [each["error"] for each in rank.all("failed")] == ["'well'", "ValueError"]
    # An outer call would only repeat an inner one.
    assert rank.one("nested")["error"] == "RestartAbort"
    assert rank.one("handlers")["same"]
    assert (tmp_path / "supervisor_0.log").exists()


def test_numbers_by_which_all_ranks_would_be_spares_are_refused(ranks: Scenarios) -> None:
    """Before, they waited for each other for ever."""
    (rank,) = ranks.run(world_size=1, scenario="unassigned")
    assert [each["error"] for each in rank.all("idle")] == ["ValueError", "RestartAbort"]


def test_who_waits_in_the_store_holds_up_nobody(ranks: Scenarios) -> None:
    """BUG-5"""
    (rank,) = ranks.run(world_size=1, scenario="contended")
    assert rank.one("set")["alive"]
    assert rank.one("came")["value"] == "now"


def test_a_restart_needs_no_gpu_and_no_full_garbage_collection(ranks: Scenarios) -> None:
    """BUG-7, BUG-11"""
    done = ranks.run([(0, "exception")], [(1, "exception")], world_size=2, env={"LOCAL_RANK": "0"})
    all_returned(done)
    for rank in done:
        assert len({entry["full_collections"] for entry in rank.all("enter")}) == 1
        last = rank.all("enter")[-1]
        assert sum(last["phases"].values()) == pytest.approx(last["total"], abs=1e-6)


def test_a_rank_that_dies_while_a_group_is_being_made_takes_no_other_along(ranks: Scenarios) -> None:
    """The others wait for its connections, and in the store for its address."""
    chaos = [[0, 1, "function", "sigkill", 0.05], [1, 3, "function", "keyboard", 0.05]]
    done = ranks.run(
        world_size=5, scenario="chaotic", chaos=chaos, duration=0.05, times={"soft_timeout": 30.0}
    )
    assert [rank.exit for rank in done] == [0, -9, 0, 1, 0]
    assert [rank.one("returned")["value"] for rank in done if rank.exit == 0] == ["0", "1", "2"]
    for rank in done[::2]:
        # A slow one may be interrupted before its function begins.
        assert rank.entered[-1] == 2
        assert rank.all("enter")[-1]["t"] - rank.all("enter")[0]["t"] < 28


def test_an_exception_that_cannot_be_told_is_an_exception_like_all_others(ranks: Scenarios) -> None:
    """Attributes that raise, text without UTF-8, and a KeyboardInterrupt in ``__str__``."""
    done = ranks.run([(1, "unreadable")], [(0, "untellable")], world_size=2)
    all_returned(done)
    assert [rank.entered for rank in done] == [[0, 1, 2]] * 2


def test_a_process_that_the_function_forks_takes_no_part(ranks: Scenarios) -> None:
    """What leaves the function there ends that process, and nothing of this rank's."""
    done = ranks.run([(1, "fork")], world_size=2)
    all_returned(done)
    assert done[1].one("forked")["exit"] == 3
    assert done[0].records(1) == {(1, "EXCEPTION")}
    assert done[1].all("terminate") == []


def test_a_rank_whose_abort_and_terminate_hang_is_killed_and_holds_up_nobody(ranks: Scenarios) -> None:
    """The abort is left behind at the hard time-out, terminate ends the process then."""
    done = ranks.run([(1, "exit")], hang_abort=[(0, 1)], hang_terminate=[(0, 1)], times=_SOON)
    all_returned(done, 2)
    assert done[1].exit == -15
    assert len(done[1].all("terminate")) == 1


def test_a_first_assignment_that_hangs_ends_its_rank_and_standard_error_says_so(ranks: Scenarios) -> None:
    done = ranks.run([(0, "exception")], hang_assignment=[(0, 1)], times=_SOON)
    all_returned(done, 2)
    assert done[1].exit == -15
    assert (
        f"rank 1 is killed: rank_assignment has not returned for {_SOON['hard_timeout']:g} s" in ranks.said()
    )


def test_a_completion_that_hangs_ends_its_rank_and_standard_error_says_so(ranks: Scenarios) -> None:
    done = ranks.run(world_size=2, hang_completion=[(0, 1)], times=_SOON)
    assert [rank.exit for rank in done] == [0, -15]
    assert f"rank 1 is killed: completion has not returned for {_SOON['hard_timeout']:g} s" in ranks.said()


def test_an_abort_that_hangs_is_left_behind_in_time_for_the_interruption(ranks: Scenarios) -> None:
    done = ranks.run([(0, "exception")], hang_abort=[(0, 1)], hang_s=3.0, times=_SOON)
    all_returned(done)
    assert done[1].all("enter")[1]["t"] < done[1].one("end")["t"]


def test_a_job_that_was_suspended_for_longer_than_its_time_outs_goes_on(ranks: Scenarios) -> None:
    """Gang scheduling, preemption by suspension: no rank could show progress, and none is taken for hung."""
    times = {**_SOON, "soft_timeout": 2.0, **_SILENCE}
    done = ranks.run([(1, "suspend")], others="gloo", times=times)
    all_returned(done)
    assert (1, "EXCEPTION") in done[0].records(1)


def test_a_function_that_has_used_up_all_descriptors_restarts(ranks: Scenarios) -> None:
    """What unblocks the others, and ends the groups of this rank, has kept some back."""
    done = ranks.run([(1, "descriptors")], others="gloo")
    all_returned(done)
    assert (1, "EXCEPTION") in done[0].records(1)


@pytest.mark.parametrize("fault", ["keeps", "nothing"])
def test_a_rank_assignment_that_is_wrong_ends_all_ranks(ranks: Scenarios, fault: str) -> None:
    """It would be as wrong in the next iteration, and they would restart for ever."""
    nothing = [(0, rank) for rank in range(3)] if fault == "nothing" else []
    done = ranks.run([(1, "sigkill")], keeps_numbers=True, nothing_assignment=nothing)
    for rank in done if nothing else done[::2]:
        raised = rank.one("raised")
        assert raised["type"] == ("TypeError" if nothing else "InternalError")
        assert (
            "a RankAssignmentCtx is accepted" in raised["text"] if nothing else "1 to none" in raised["text"]
        )


def test_a_rank_whose_supervisor_stands_still_leaves_within_the_heartbeats_time_out(ranks: Scenarios) -> None:
    """The others have gone on without it: it must not train on alone. Rank 0's runs the hub."""
    done = ranks.run(
        [(2, "supervisor_stops")], [(0, "supervisor_stops")], wakes_supervisor=[0, 2], times=_SILENCE
    )
    # The hub may hear of it from rank 2 itself, once its supervisor goes on.
    assert {rank for rank, _ in done[1].records(1)} == {2}
    for rank in done[::2]:
        assert rank.exit == 1
        raised = rank.one("raised")
        assert raised["type"] == "InternalError"
        assert "nothing was heard of" in raised["text"]
        assert raised["t"] - rank.all("fault")[-1]["t"] < 30
