"""What the machine does about slow ranks: nothing rash, and only where a spare can take the place."""

from __future__ import annotations

import msgspec
import pytest
from cycle_driver import Job

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.cycle import Phase
from nvrx_slurm.coordinator.limits import StragglerAction
from nvrx_slurm.coordinator.slow_ranks import Told, scores_event
from nvrx_slurm.journal import FaultKind
from nvrx_slurm.journal.events import MOST_RANKS_LISTED
from nvrx_slurm.pace import Judgement, RankScore, SlowDown, StragglerVerdict


def slow(node: int, reports: int = 3, lost_ms: float = 10.0) -> StragglerVerdict:
    return StragglerVerdict(
        rank=2 * (node - 1),
        node=f"n{node}",
        section="forward",
        score=0.5,
        lost_ms=lost_ms,
        reports=reports,
        of_reports=3,
    )


def job(active: int = 2, spares: int = 1, action: str = "exclude", **options: int) -> Job:
    made = Job(active, spares, straggler_action=StragglerAction(action), **options)  # type: ignore[arg-type]
    return made.join(*made.policy.nodes).later(60)


def judged(job: Job, *verdicts: StragglerVerdict, cycle: int = 0) -> Job:
    job.feed(steps.RanksJudged(cycle, verdicts))
    return job


def excluded(job: Job) -> list[str]:
    return [event.node for event in job.written(journal.NodeExcluded)]


def kept(job: Job) -> list[tuple[str, str]]:
    return [(event.node, event.why) for event in job.written(journal.StragglerKept)]


def test_with_a_spare_the_node_leaves_now() -> None:
    it = judged(job(), slow(2))
    assert it.machine.phase is Phase.STOPPING
    it.stopped("n1", "n2")
    assert (it.verdict.rule, it.verdict.node, it.verdict.rank, it.verdict.kind) == (
        "slow-node",
        "n2",
        2,
        FaultKind.SLOW,
    )
    assert it.machine.active == ("n1", "n3")
    assert excluded(it) == ["n2"]


@pytest.mark.parametrize("reports", [1, 2])
def test_fewer_than_all_of_the_last_reports_are_not_enough(reports: int) -> None:
    it = judged(job(), slow(2, reports=reports))
    assert it.machine.phase is Phase.RUNNING


def test_told_only_to_log_it_does_nothing() -> None:
    it = judged(job(action="log"), slow(2))
    assert (it.machine.phase, kept(it)) == (Phase.RUNNING, [])
    assert excluded(it.fails()) == []


def test_without_a_spare_the_node_stays_and_the_job_goes_on() -> None:
    it = judged(judged(job(spares=0), slow(2)), slow(2))
    assert it.machine.phase is Phase.RUNNING
    assert kept(it) == [("n2", "there is no spare to take its place")], "told once"
    assert excluded(it.fails()) == []
    assert it.machine.phase is Phase.RUNNING


def test_it_leaves_at_the_next_restart_if_a_spare_has_come_by_then() -> None:
    it = job(active=2, spares=1)
    it.lose("n3")
    judged(it, slow(2))
    it.join("n3").fails()
    assert excluded(it) == ["n2"]
    assert it.machine.active == ("n1", "n3")


def test_who_has_recovered_stays_at_the_next_restart() -> None:
    it = job(active=2, spares=1)
    it.lose("n3")
    judged(judged(it, slow(2)))
    assert excluded(it.join("n3").fails()) == []


def test_nobody_leaves_when_the_restart_would_be_one_too_many() -> None:
    it = judged(job(max_restarts=0), slow(2))
    assert it.machine.phase is Phase.RUNNING
    assert kept(it) == [("n2", "restart budget of 0 used up")]


def test_many_slow_nodes_at_once_are_not_the_nodes_fault() -> None:
    it = judged(job(active=4, spares=2), slow(2), slow(3))
    assert it.machine.phase is Phase.RUNNING
    assert {node for node, _ in kept(it)} == {"n2", "n3"}
    assert excluded(it.fails()) == []


def test_why_a_node_stays_is_told_once_whatever_the_numbers() -> None:
    it = judged(job(active=8, spares=2), slow(2), slow(3))
    judged(judged(it, slow(2), slow(3), slow(4)), slow(2), slow(3))
    assert [node for node, _ in kept(it)] == ["n2", "n3", "n4"]


def test_who_is_not_sure_to_be_slow_yet_counts_among_many() -> None:
    """What makes several nodes slow does not reach all of them in the same report."""
    it = judged(job(active=8, spares=2), slow(2), slow(3, reports=2))
    assert it.machine.phase is Phase.RUNNING
    assert [node for node, _ in kept(it)] == ["n2"]


def test_a_rank_that_is_slow_on_another_node_too_has_more_to_do() -> None:
    """As the last stage of a pipeline: else one node after the other would leave."""
    it = judged(job(active=2, spares=2), slow(2))
    it.stopped(*it.machine.active)
    assert excluded(it) == ["n2"]
    assert it.machine.active == ("n1", "n3")
    again = msgspec.structs.replace(slow(2), node="n3")
    judged(judged(it.later(60), again, cycle=1), again, cycle=1)
    assert it.machine.phase is Phase.RUNNING
    assert kept(it) == [("n3", "rank 2 was slow on n2, too, so the cause is its work, not the node")]
    assert excluded(it.fails()) == ["n2"]


def test_that_holds_for_each_slow_rank_of_the_node_that_left() -> None:
    """Which of them loses most is chance."""
    both = (slow(2), msgspec.structs.replace(slow(2, lost_ms=9.0), rank=3))
    it = judged(job(active=2, spares=2), *both)
    it.stopped(*it.machine.active)
    other_first = [msgspec.structs.replace(verdict, node="n3") for verdict in reversed(both)]
    judged(it.later(60), *other_first, cycle=1)
    assert it.machine.phase is Phase.RUNNING
    assert {node for node, _ in kept(it)} == {"n3"}


def test_of_two_the_worst_leave_while_there_are_spares() -> None:
    it = judged(job(active=9, spares=1), slow(3), slow(2, lost_ms=99.0))
    it.stopped(*it.machine.active)
    assert excluded(it) == ["n2"]


def test_what_is_said_of_another_cycle_or_of_a_node_without_ranks_is_nothing() -> None:
    assert judged(job(), slow(2), cycle=7).machine.phase is Phase.RUNNING
    assert judged(job(), slow(3)).machine.phase is Phase.RUNNING


def test_a_job_that_is_asked_to_stop_soon_is_not_restarted() -> None:
    it = job()
    it.feed(steps.DrainRequested(why="the time limit"))
    assert judged(it, slow(2)).machine.phase is Phase.RUNNING


# --- what is recorded ------------------------------------------------------------------------------------


def test_a_verdict_is_news_when_it_comes_when_it_is_surer_and_when_it_comes_again() -> None:
    told = Told()
    seen = [
        [event.reports for event in told.news(Judgement(verdicts, {}, []))]  # type: ignore[union-attr]
        for verdicts in ([slow(2, 2)], [slow(2, 3)], [slow(2, 3)], [], [slow(2, 2)])
    ]
    assert seen == [[2], [3], [], [], [2]]


def test_a_slow_down_of_all_is_news_once() -> None:
    told = Told()
    now = Judgement([], {}, [SlowDown("step", 0.5, 64, 3, 3)])
    assert told.news(now) == [journal.JobSlowed(section="step", score=0.5, ranks=64, reports=3, of_reports=3)]
    assert told.news(now) == []


def test_of_many_ranks_the_worst_are_kept() -> None:
    scores = {rank: RankScore(0.2 if rank == 9_000 else 0.99, "step") for rank in range(16_384)}
    event = scores_event(scores, {rank: f"n{rank // 8}" for rank in scores}, 16_400)
    assert (event.ranks[0], event.scores[0], event.sections) == (9_000, 0.2, ["step"])
    assert (len(event.ranks), len(event.nodes)) == (MOST_RANKS_LISTED, MOST_RANKS_LISTED)
    assert (event.compared, event.missing, event.median) == (16_384, 16, 0.99)
    assert next(iter(event.nodes)) == "n1125"
