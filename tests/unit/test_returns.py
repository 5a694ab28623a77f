"""How a lost node gets a new agent: at once if it answers, later if it is silent, never if Slurm says so."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Awaitable, Callable

import pytest

from nvrx_slurm.coordinator.returns import Pace, Returns, kernel_answers
from nvrx_slurm.slurm import Node, SlurmUnavailableError
from nvrx_slurm.testing import FakeSlurmClient, running_job

PACE = Pace(first_look_s=0.01, longest_look_s=0.05, attempts=3, start_timeout_s=5.0, backoff_s=0.01)
HERE, SILENT = "ipv4:192.0.2.1:9", "ipv4:192.0.2.2:9"


class FakeStep:
    """An srun that comes to an end when it is told to."""

    def __init__(self, node: str, fails: str = "") -> None:
        self.node = node
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.graces: list[float] = []
        self._said = fails
        if fails:
            self.ended.set()

    async def start(self) -> None:
        self.started.set()

    async def wait(self) -> str:
        await self.ended.wait()
        return self._said

    async def end(self, grace_s: float) -> None:
        self.graces.append(grace_s)
        self.ended.set()


class Site:
    """A job on n1 and n2, and what is done to bring n2 back."""

    def __init__(self, fails: str = "", pace: Pace = PACE) -> None:
        self.slurm = FakeSlurmClient(running_job("7", ["n1", "n2"]))
        self.fails = fails
        self.healed = False
        self.steps: asyncio.Queue[FakeStep] = asyncio.Queue()
        self.all: list[FakeStep] = []
        self.away: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.returns = Returns(
            self._new_step,
            self.slurm,
            "7",
            lambda node, why: self.away.put_nowait((node, why)),
            pace,
            self._answers,
        )

    async def _answers(self, address: str) -> bool:
        return address == HERE or self.healed

    def _new_step(self, node: str) -> FakeStep:
        step = FakeStep(node, self.fails)
        self.all.append(step)
        self.steps.put_nowait(step)
        return step

    def set_job(self, **fields: object) -> None:
        self.slurm.jobs["7"] = dataclasses.replace(self.slurm.jobs["7"], **fields)  # type: ignore[arg-type]

    def set_state(self, state: str) -> None:
        self.slurm.nodes = [Node("n2", state, "")]


def play(test: Callable[[Site], Awaitable[None]], **site: object) -> None:
    async def run() -> None:
        there = Site(**site)  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(test(there), 20)
        finally:
            await there.returns.close(0.0)

    asyncio.run(run())


def test_a_node_whose_kernel_answers_gets_a_new_agent_at_once() -> None:
    async def test(site: Site) -> None:
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        step = await site.steps.get()
        assert step.node == "n2"
        site.returns.joined("n2", HERE)
        await site.returns.close(2.0)
        assert step.graces == [2.0], "its srun ends with the job, and not before"

    play(test)


def test_a_silent_node_gets_none_until_it_answers() -> None:
    async def test(site: Site) -> None:
        site.returns.joined("n2", SILENT)
        site.returns.recall("n2")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(site.steps.get(), 0.5)
        site.healed = True
        assert (await site.steps.get()).node == "n2"

    play(test)


@pytest.mark.parametrize("state", ["down*", "idle+drain", "down+not_responding", "unknown"])
def test_a_node_that_slurm_does_not_use_now_is_waited_for(state: str) -> None:
    async def test(site: Site) -> None:
        site.set_state(state)
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(site.steps.get(), 0.5)
        site.set_state("mixed")
        assert (await site.steps.get()).node == "n2"

    play(test)


def test_a_slurm_that_cannot_be_asked_is_asked_again() -> None:
    async def test(site: Site) -> None:
        site.slurm.unavailable = SlurmUnavailableError("no answer")
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(site.steps.get(), 0.5)
        site.slurm.unavailable = None
        await site.steps.get()

    play(test)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nodes": ("n1",)}, "Slurm has taken it out of the job"),
        ({"state": "CANCELLED"}, "Slurm calls the job CANCELLED"),
        ({"state": "COMPLETING"}, "Slurm calls the job COMPLETING"),
        (None, "Slurm does not know job 7"),
    ],
)
def test_what_slurm_has_decided_ends_the_attempt_however_silent_the_node_is(
    change: dict[str, object] | None, why: str
) -> None:
    async def test(site: Site) -> None:
        if change is None:
            site.slurm.jobs.clear()
        else:
            site.set_job(**change)
        site.returns.joined("n2", SILENT)
        site.returns.recall("n2")
        assert await site.away.get() == ("n2", why)
        assert site.all == []

    play(test)


def test_agents_that_do_not_come_are_tried_a_few_times_and_their_words_are_told() -> None:
    async def test(site: Site) -> None:
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        node, why = await site.away.get()
        assert node == "n2"
        assert why == "3 new agents did not come, the last: srun ended with 1: no such file"
        assert len(site.all) == 3
        assert all(step.graces == [0.0] for step in site.all), "nothing is left of them"

    play(test, fails="srun ended with 1: no such file")


def test_an_srun_that_says_nothing_is_ended() -> None:
    async def test(site: Site) -> None:
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        _, why = await site.away.get()
        assert why == "1 new agents did not come, the last: nothing for 0.1 s"
        assert site.all[0].ended.is_set()

    play(test, pace=dataclasses.replace(PACE, attempts=1, start_timeout_s=0.1))


def test_a_node_that_is_lost_again_gets_another_agent_and_the_former_srun_is_ended() -> None:
    async def test(site: Site) -> None:
        site.returns.joined("n2", HERE)
        site.returns.recall("n2")
        first = await site.steps.get()
        await first.started.wait()
        site.returns.joined("n2", HERE)
        await asyncio.sleep(0)
        while not site.returns._tasks["n2"].done():
            await asyncio.sleep(0.01)
        site.returns.recall("n2")
        second = await site.steps.get()
        assert first.graces == [0.0]
        assert second is not first

    play(test)


def test_nothing_runs_while_no_node_is_lost() -> None:
    async def test(site: Site) -> None:
        before = len(asyncio.all_tasks())
        site.returns.joined("n1", HERE)
        site.returns.joined("n2", HERE)
        assert len(asyncio.all_tasks()) == before

    play(test)


def test_a_kernel_answers_whether_or_not_somebody_listens_in_both_families() -> None:
    async def run() -> None:
        for family, host, shown in (
            (socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1"),
            (socket.AF_INET6, "::1", "ipv6:%5B::1%5D"),
        ):
            with socket.socket(family) as listening:
                try:
                    listening.bind((host, 0))
                except OSError:
                    continue  # no IPv6 here
                port = listening.getsockname()[1]
                assert await kernel_answers(f"{shown}:{port}")
                listening.listen()
                assert await kernel_answers(f"{shown}:{port}")
        assert not await kernel_answers("unix:/tmp/x")
        with socket.socket() as full, socket.socket() as first, socket.socket() as second:
            # A listener with nobody to accept: the kernel drops the next SYN, as a dead host's network does.
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for client in (first, second):
                client.setblocking(False)
                client.connect_ex(full.getsockname())
            assert not await kernel_answers(f"ipv4:127.0.0.1:{full.getsockname()[1]}")
        assert not await kernel_answers("")

    asyncio.run(run())
