"""A rank that floods its agent."""

from __future__ import annotations

import asyncio

import pytest

from nvrx_slurm.agent import throttle
from nvrx_slurm.agent.throttle import MAX_PER_INTERVAL, Throttle
from nvrx_slurm.wire.messages import AgentMessage, StepReached


def test_the_last_of_a_burst_goes_out_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(throttle, "INTERVAL_S", 0.05)

    async def flood() -> tuple[list[int], list[int]]:
        said: list[AgentMessage] = []
        it = Throttle(said.append)
        for step in range(10_000):
            it.say(0, "saved", StepReached(cycle=0, step=step))
        it.say(1, "saved", StepReached(cycle=0, step=-1))
        first = [message.step for message in said if isinstance(message, StepReached)]
        said.clear()
        await asyncio.sleep(0.3)
        return first, [message.step for message in said if isinstance(message, StepReached)]

    first, later = asyncio.run(flood())
    assert first == [*range(MAX_PER_INTERVAL), -1]
    assert later == [9_999]
    assert len(caplog.messages) == 1


def test_what_is_held_back_can_be_said_at_once_and_is_bounded() -> None:
    async def flood() -> list[AgentMessage]:
        said: list[AgentMessage] = []
        it = Throttle(said.append)
        for step in range(1_000):
            it.say(0, step, StepReached(cycle=0, step=step))
        said.clear()
        it.flush()
        it.flush()
        return said

    assert [message.step for message in asyncio.run(flood()) if isinstance(message, StepReached)] == [
        *range(1_000 - MAX_PER_INTERVAL, 1_000)
    ]
