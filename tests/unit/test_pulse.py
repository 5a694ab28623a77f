"""When the guardian takes the agent for stopped."""

from __future__ import annotations

import asyncio

from nvrx_slurm.agent import pulse
from nvrx_slurm.agent.pulse import CHECK_S, MAX_UNCHANGED, PulseWatch


class World:
    """A clock and a counter."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 1
        self.watch = PulseWatch(lambda: self.count, lambda: self.now)

    def checks(self, beats: int = 0, seconds: float = CHECK_S) -> bool:
        self.count += beats
        self.now += seconds
        return self.watch.has_stopped()


def test_an_agent_that_stands_still_is_noticed_within_ten_seconds() -> None:
    world = World()
    assert not any(world.checks(beats=2) for _ in range(10))
    assert [world.checks() for _ in range(MAX_UNCHANGED)] == [False, False, True]
    assert (MAX_UNCHANGED + 1) * CHECK_S <= 10.0


def test_waking_up_between_checks_counts_nothing() -> None:
    world = World()
    world.checks()
    assert not any(world.checks(seconds=0.01) for _ in range(100))


def test_a_suspension_of_all_is_none_of_the_agent() -> None:
    world = World()
    world.checks()
    world.checks()
    world.checks()
    assert not world.checks(seconds=3600), "it had two behind it, and woke up first"
    assert not world.checks()
    assert not world.checks(beats=1)


def test_an_agent_that_begins_or_ends_need_not_beat() -> None:
    world = World()
    world.count = 0
    assert not any(world.checks() for _ in range(10))


def test_the_event_loop_beats_until_it_ends() -> None:
    async def beats() -> int:
        task = asyncio.create_task(pulse.beat())
        await asyncio.sleep(0.01)
        seen = pulse.count()
        task.cancel()
        await asyncio.wait({task})
        return seen

    assert asyncio.run(beats()) == 1
    assert pulse.count() == 0
