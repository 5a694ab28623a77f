"""Nodes that are lost and come back, and nodes that only seem to be gone."""

from __future__ import annotations

from typing import Any

import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.steps import Timer
from nvrx_slurm.wire.messages import NodeLocation

REJOIN_S = 60.0


def placing(active: int = 2, spares: int = 0, **policy: Any) -> Job:
    return Job(active=active, spares=spares, placing=policy)


def running(active: int = 2, spares: int = 0, **policy: Any) -> Job:
    """A job whose agents have all come, and whose lost nodes may come back."""
    job = placing(active, spares, rejoin_timeout_s=REJOIN_S, **policy)
    return job.join(*job.policy.nodes)


def recalled(job: Job) -> list[str]:
    return [command.node for command in job.all(steps.Recall)]


# --- too few nodes -----------------------------------------------------------------------------------


def test_a_job_without_a_spare_waits_for_its_lost_node_and_goes_on_with_it() -> None:
    job = running().lose("n2").stopped("n1")
    assert job.phase is Phase.FORMING
    assert recalled(job) == ["n2"]
    awaited = journal.NodesAwaited(nodes=["n2"], needed=2, here=1, seconds=REJOIN_S)
    assert job.written(journal.NodesAwaited) == [awaited]
    job.join("n2")
    assert job.started == [("n1", "n2")] * 2
    assert job.written(journal.NodeJoined)[-1] == journal.NodeJoined(node="n2", slots=2, returned=True)


def test_it_waits_no_longer_than_it_was_told() -> None:
    job = running().lose("n2").stopped("n1")
    assert job.timers[Timer.REJOIN] == REJOIN_S
    job.fire(Timer.REJOIN)
    assert job.end.code == 75
    assert "training needs 2, 1 is left" in job.end.why
    assert "node n2 lost" in job.end.why, "what it was that it waited for"


def test_a_node_that_stays_away_ends_the_wait_at_once() -> None:
    job = running().lose("n2").stopped("n1")
    job.feed(steps.NodeStaysAway("n2", "Slurm has taken it out of the job"))
    assert job.end.code == 75
    assert job.written(journal.NodeGivenUp)[-1].node == "n2"


def test_when_lost_nodes_are_to_stay_away_the_job_ends_at_once() -> None:
    job = Job(active=2).join("n1", "n2").lose("n2").stopped("n1")
    assert job.end.code == 75
    assert recalled(job) == []


def test_a_node_that_comes_back_while_the_others_stop_has_its_place() -> None:
    job = running().lose("n2").join("n2").stopped("n1")
    assert job.started[-1] == ("n1", "n2")


def test_a_wait_for_more_than_can_come_back_is_none() -> None:
    job = running(active=3).lose("n2")
    job.feed(steps.NodeStaysAway("n2", "Slurm has taken it out of the job"))
    job.lose("n3").stopped("n1")
    assert job.end.code == 75


# --- spares ------------------------------------------------------------------------------------------


def test_with_a_spare_nobody_is_waited_for_and_the_lost_node_becomes_a_spare() -> None:
    job = running(spares=1).lose("n2").stopped("n1")
    assert job.started[-1] == ("n1", "n3")
    job.join("n2")
    assert job.started[-1] == ("n1", "n3"), "nothing restarts because a node comes"
    assert job.machine.spares == ("n2",)


def test_a_node_that_returned_is_promoted_after_those_that_never_left() -> None:
    job = running(active=2, spares=2).lose("n1").stopped("n2").join("n1")
    assert job.started[-1] == ("n3", "n2")
    assert job.machine.spares == ("n4", "n1")
    assert job.lose("n2").stopped("n3").started[-1] == ("n3", "n4")


def test_those_that_returned_are_promoted_in_the_order_in_which_they_did() -> None:
    job = running(active=1, spares=2).lose("n3", "n2").join("n3", "n2")
    assert job.machine.spares == ("n3", "n2")


def test_the_batch_host_stays_behind_those_that_returned() -> None:
    job = running(active=1, spares=2, last_choice="n1")
    assert job.started == [("n2",)]
    job.lose("n3").join("n3")
    assert job.machine.spares == ("n3", "n1")


# --- agents that were asked to go --------------------------------------------------------------------


def test_an_agent_that_was_asked_to_go_comes_back_unless_slurm_is_ending_the_job() -> None:
    job = running().lose("n2", by_signal=True).stopped("n1")
    assert job.phase is Phase.CONSULTING
    assert recalled(job) == []
    job.feed(steps.SlurmAnswered("RUNNING"))
    assert recalled(job) == ["n2"]
    assert job.join("n2").started[-1] == ("n1", "n2")
    assert job.verdict.kind is journal.FaultKind.NODE_LOST


def test_a_job_that_slurm_is_ending_calls_nobody_back() -> None:
    job = running().lose("n2", by_signal=True).stopped("n1")
    job.feed(steps.SlurmAnswered("CANCELLED"))
    assert job.end.code == 143
    assert recalled(job) == []


def test_with_a_spare_it_is_called_back_once_the_job_has_gone_on() -> None:
    job = running(spares=1).lose("n2", by_signal=True)
    assert recalled(job) == []
    job.stopped("n1")
    assert recalled(job) == ["n2"]


def test_an_agent_that_is_still_going_when_slurm_answers_is_called_back_when_it_has_gone() -> None:
    job = running()
    job.feed(steps.NodeLeaving("n2", "the agent received SIGTERM", by_signal=True))
    job.stopped("n1", "n2")
    job.feed(steps.SlurmAnswered("RUNNING"))
    assert job.phase is Phase.FORMING
    job.lose("n2", by_signal=True)
    assert recalled(job) == ["n2"]
    assert job.join("n2").started[-1] == ("n1", "n2")


def test_asked_to_stop_nobody_is_waited_for() -> None:
    job = running().drain().lose("n2", by_signal=True).stopped("n1")
    job.feed(steps.SlurmAnswered("RUNNING"))
    assert job.end.code == 75


# --- nodes that fail again and again -----------------------------------------------------------------


def test_a_node_that_loses_one_agent_after_the_other_is_left_out() -> None:
    job = running(spares=1)
    for _ in range(2):
        job.lose("n3").join("n3")
    job.lose("n3")
    assert job.written(journal.NodeExcluded)[-1].reason == "it has lost its agent 3 times"
    assert recalled(job) == ["n3", "n3"]
    assert job.join("n3").new(steps.Disconnect)


# --- what the peer does wrong ------------------------------------------------------------------------


def test_w08_an_agent_that_died_before_the_start_is_no_ghost_in_the_cycle() -> None:
    job = Job(active=2, spares=1).join("n1", "n2").lose("n2").join("n3")
    assert job.started == [("n1", "n3")]


def test_w08_an_agent_that_dies_at_the_start_stops_the_others_at_once() -> None:
    job = running(spares=1).lose("n2")
    assert job.new(steps.StopCycle)[0].nodes == ("n1",)


def test_w09_a_new_agent_on_the_same_node_within_one_cycle_costs_a_restart_and_not_the_job() -> None:
    job = running()
    job.join("n2")
    assert [fault.node for fault in job.faults] == ["n2"]
    job.stopped("n1", "n2")
    assert job.started == [("n1", "n2")] * 2
    assert job.phase is Phase.RUNNING


def test_w09_a_second_agent_while_the_cycle_forms_counts_once() -> None:
    job = Job(active=2).join("n1", "n1", "n1")
    assert job.started == []
    assert job.join("n2").started == [("n1", "n2")]


def test_w10_what_a_stalled_agent_says_of_an_old_cycle_opens_nothing_again() -> None:
    job = running(spares=1).exit(0, 1).stopped("n1", "n2")
    assert job.machine.cycle == 1
    for late in (
        steps.RankExited("n1", 0, 1, 1, after_stop=False),
        steps.StartFailed("n1", 0, "late"),
        steps.NodeStopped("n1", 0),
        steps.RankStalled("n1", 0, 0, 6.0, ()),
    ):
        assert job.feed(late) == []
    assert job.join("n3").phase is Phase.RUNNING, "nor does an agent that comes late"
    assert job.machine.cycle == 1


@pytest.mark.parametrize("spares", [0, 1, 2])
def test_w11_a_node_that_is_slow_to_stop_keeps_its_place_for_the_whole_stop_time_out(spares: int) -> None:
    job = running(spares=spares).exit(0, 1).stopped("n1")
    job.now += job.timers[Timer.STOP] - 0.1
    assert job.phase is Phase.STOPPING
    assert job.stopped("n2").started[-1] == ("n1", "n2")


def test_w11_and_is_replaced_after_it() -> None:
    job = running(spares=1).exit(0, 1).stopped("n1").fire(Timer.STOP)
    assert job.started[-1] == ("n1", "n3")


# --- segments, groups, topology ----------------------------------------------------------------------


def in_domains(job: Job, **nodes: str) -> Job:
    for node, domain in nodes.items():
        job.feed(steps.NodeJoined(node, 2, location=NodeLocation(domain=domain)))
    return job


def test_a_cycle_forms_when_there_are_whole_segments_and_not_before() -> None:
    job = in_domains(placing(active=2, spares=1, segment=2), n1="a", n2="b")
    assert job.started == []
    assert in_domains(job, n3="b").started == [("n2", "n3")]


def test_segments_that_cannot_be_formed_end_the_job_with_75_and_the_counts() -> None:
    job = in_domains(placing(active=2, spares=1, segment=2), n1="a", n2="b", n3="c")
    assert job.end.code == 75
    assert "a has 1, b has 1, c has 1" in job.end.why


def test_a_lost_segment_that_no_domain_can_replace_is_waited_for_as_any_node() -> None:
    job = in_domains(
        placing(active=2, spares=1, segment=2, rejoin_timeout_s=REJOIN_S), n1="a", n2="a", n3="b"
    )
    job.lose("n2").stopped("n1")
    assert job.phase is Phase.FORMING
    assert in_domains(job, n2="a").started[-1] == ("n1", "n2")


def test_segments_where_no_node_knows_its_domain_are_wrong_usage() -> None:
    job = in_domains(placing(active=2, segment=2), n1="", n2="")
    assert job.end.code == 2
    assert "NVRX_DOMAIN_ID" in job.end.why


def test_a_number_of_nodes_that_is_no_multiple_of_the_segment_is_refused() -> None:
    with pytest.raises(ValueError, match="3 is no multiple of segment 2"):
        placing(active=3, segment=2)


def test_a_replacement_group_leaves_with_its_lost_node() -> None:
    job = placing(active=2, spares=2, group_size=2)
    for node, group in {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}.items():
        job.feed(steps.NodeJoined(node, 2, location=NodeLocation(group=group)))
    assert job.lose("n2").stopped("n1").started[-1] == ("n3", "n4")
    assert job.machine.spares == ("n1",)


def test_useless_addresses_are_told_once() -> None:
    job = Job(active=2)
    for node, address in {"n1": "s0.n1", "n2": ""}.items():
        where = NodeLocation(topology_addr=address, topology_pattern="switch.node")
        job.feed(steps.NodeJoined(node, 2, location=where))
    job.exit(0, 1).stopped("n1", "n2")
    assert len(job.started) == 2
    (told,) = job.written(journal.TopologyIgnored)
    assert "n2 has the address ''" in told.why
