"""The Coordinator's accusations: who is accused, and how that gets into the job's Comment."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm import journal
from nvrx_slurm.coordinator.accusations import Accusations
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import SlurmUnavailableError, UnknownJobError
from nvrx_slurm.slurm.accusation import parse_accusation
from nvrx_slurm.slurm.client import parse_comment
from nvrx_slurm.testing import FakeSlurmClient, running_job


class World:
    def __init__(self) -> None:
        self.slurm = FakeSlurmClient(running_job("7", ["n1", "n2"]))
        self.said: list[str] = []

    def tell(self, *events: AnyEvent, run: int = 0) -> None:
        async def all_of_them() -> None:
            accusations = Accusations(self.slurm, "7", run, self.said.append)
            for event in events:
                if accusations.note(event):
                    await accusations.publish()

        asyncio.run(all_of_them())

    @property
    def bad(self) -> dict[str, str]:
        return dict(parse_accusation(self.slurm.comments.get("7", "")).bad)


@pytest.fixture
def world() -> World:
    return World()


EXCLUDED = journal.NodeExcluded(node="n2", reason="gpu-ecc gpu 3: 2 errors")


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (EXCLUDED, "gpu-ecc gpu 3: 2 errors"),
        (journal.NodeSuspected(node="n2", faults=3, why="no spare"), "3 faults of its own"),
        (journal.NodeLost(node="n2", why="no heartbeat"), "lost: no heartbeat"),
    ],
)
def test_a_node_that_is_held_to_be_the_cause_is_accused(world: World, event: AnyEvent, why: str) -> None:
    world.tell(event, run=2)
    assert world.bad == {"n2": why}
    assert parse_accusation(world.slurm.comments["7"]).run == 2


def test_nobody_is_accused_of_what_is_no_nodes_fault(world: World) -> None:
    world.tell(journal.JobEnded(code=1, why="training failed"), journal.NodeJoined(node="n2", slots=2))
    assert world.slurm.orders == []


def test_a_node_whose_agent_was_told_to_end_is_not_accused(world: World) -> None:
    """Slurm tells all of them when a job is cancelled."""

    async def lost_and_acquitted() -> None:
        accusations = Accusations(world.slurm, "7", 0, world.said.append)
        assert accusations.note(journal.NodeLost(node="n2", why="SIGTERM"))
        publishing = asyncio.create_task(accusations.publish())
        accusations.acquit("n2")
        await publishing

    asyncio.run(lost_and_acquitted())
    assert world.slurm.orders == []


def test_later_accusations_are_added(world: World) -> None:
    world.tell(EXCLUDED, journal.NodeLost(node="n1", why="no heartbeat"))
    assert world.bad == {"n2": "gpu-ecc gpu 3: 2 errors", "n1": "lost: no heartbeat"}


def test_the_same_again_is_not_written_again(world: World) -> None:
    world.tell(EXCLUDED, EXCLUDED)
    assert len(world.slurm.orders) == 1


def test_what_others_keep_in_the_comment_stays(world: World) -> None:
    world.slurm.comments["7"] = '{"APS":{"auto_resume_mode":"requeue"}}'
    world.tell(EXCLUDED)
    assert world.slurm.comments["7"] == (
        '{"APS":{"auto_resume_mode":"requeue"},"nvrx":{"v":1,"run":0,"bad":{"n2":"gpu-ecc gpu 3: 2 errors"}}}'
    )


def test_what_an_earlier_run_has_said_is_replaced(world: World) -> None:
    world.tell(journal.NodeLost(node="n1", why="no heartbeat"))
    world.tell(EXCLUDED, run=1)
    assert world.bad == {"n2": "gpu-ecc gpu 3: 2 errors"}


@pytest.mark.parametrize("how", ["refused", "unavailable"])
def test_a_slurm_that_does_not_take_it_is_told_of_once(world: World, how: str) -> None:
    """Without slurmdbd it takes no changes of a job that has lost a node."""
    if how == "refused":
        world.slurm.refuses["update"] = "the DB index is being set"
    else:
        world.slurm.unavailable = SlurmUnavailableError("no answer")
    world.tell(EXCLUDED, journal.NodeLost(node="n1", why="no heartbeat"))
    assert len(world.said) == 1
    assert world.said[0].startswith("WARNING: the job's Comment cannot tell of n2: ")


@pytest.mark.parametrize(
    ("printed", "comment"),
    [
        ("7|(null)\n", ""),
        ("7|\n", ""),
        ("7|a | b=c\n", "a | b=c"),
        ("7|two\nlines\n", "two\nlines"),
        ("8|(null)\n7|mine\n", "mine"),
    ],
)
def test_a_comment_is_read_exactly_as_squeue_prints_it(printed: str, comment: str) -> None:
    assert parse_comment(printed, "7") == comment


def test_a_job_that_is_not_there_has_no_comment() -> None:
    with pytest.raises(UnknownJobError):
        parse_comment("", "7")
