"""The Coordinator's gRPC server, with agents that do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from nvrx_slurm.agent.agent import Agent as NodeAgent
from nvrx_slurm.agent.agent import AgentConfig
from nvrx_slurm.agent.exit_codes import EXIT_COORDINATOR_SILENT
from nvrx_slurm.coordinator.server import AgentServer
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc

PATIENCE_S = 60.0
FENCE = "7.0.0"
WELCOME = msg.Welcome(
    program=msg.Program(kind=msg.ProgramKind.SCRIPT, target="/train.py", args=[], cwd="/"),
    job_id="7",
    run_dir="/run",
    nproc_per_node="2",
    warm_start=True,
    max_restarts=1,
    stop_timeout_s=1.0,
)


class Heard:
    """A sink that notes everything."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.outputs: list[tuple[str, msg.LogMessage]] = []

    def joined(self, node: str, joined: msg.Joined, address: str) -> None:
        self.events.put_nowait(("joined", node, joined.slots))

    def unusable(self, node: str, why: str) -> None:
        self.events.put_nowait(("unusable", node, why))

    def lost(self, node: str, why: str, by_signal: bool) -> None:
        self.events.put_nowait(("lost", node, why, by_signal))

    def message(self, node: str, message: msg.AgentMessage) -> None:
        self.events.put_nowait(("message", node, message))

    async def output(self, node: str, message: msg.LogMessage) -> None:
        self.outputs.append((node, message))

    async def next(self) -> tuple[object, ...]:
        return await asyncio.wait_for(self.events.get(), PATIENCE_S)


class Agent:
    """One control stream, on a connection of its own."""

    def __init__(self, port: int, node: str) -> None:
        self.node = node
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=rpc.CLIENT_OPTIONS)
        self._call: Any = self._channel.stream_stream(
            f"/{rpc.SERVICE}/{rpc.CONTROL}",
            request_serializer=rpc.encode,
            response_deserializer=rpc.decode_coordinator.decode,
        )(metadata=((rpc.TOKEN_METADATA, "secret"),))

    async def greet(self) -> msg.CoordinatorMessage:
        await self.say(msg.Hello(version=msg.PROTOCOL_VERSION, node=self.node, fence=FENCE))
        return await self.hear()

    async def join(self, slots: int = 2) -> Agent:
        assert await self.greet() == WELCOME
        await self.say(msg.Joined(slots=slots))
        return self

    async def say(self, message: msg.AgentMessage) -> None:
        await asyncio.wait_for(self._call.write(message), PATIENCE_S)

    async def hear(self) -> Any:
        return await asyncio.wait_for(self._call.read(), PATIENCE_S)

    async def close(self) -> None:
        await self._channel.close()


class Stage:
    def __init__(self) -> None:
        self.heard = Heard()
        self.server = AgentServer("secret", FENCE, WELCOME, self.heard)
        self.port = 0
        self._agents: list[Agent] = []

    def agent(self, node: str) -> Agent:
        self._agents.append(Agent(self.port, node))
        return self._agents[-1]

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls) -> AsyncIterator[Stage]:
        stage = cls()
        stage.port = await stage.server.start("127.0.0.1")
        try:
            yield stage
        finally:
            for agent in stage._agents:
                await agent.close()
            await asyncio.wait_for(stage.server.shut_down(1.0), PATIENCE_S)


def on_stage(play: Callable[[Stage], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Stage.open() as stage:
            await play(stage)

    asyncio.run(run())


def test_a_node_joins_talks_and_is_talked_to() -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        assert await stage.heard.next() == ("joined", "n1", 2)
        await agent.say(msg.RanksReady(cycle=0))
        assert await stage.heard.next() == ("message", "n1", msg.RanksReady(cycle=0))
        stage.server.send("n1", msg.Probe(cycle=0))
        stage.server.send("n9", msg.Probe(cycle=9))
        assert await agent.hear() == msg.Probe(cycle=0)

    on_stage(play)


def test_an_agent_that_cannot_take_part_is_unusable() -> None:
    async def play(stage: Stage) -> None:
        agent = stage.agent("n1")
        await agent.greet()
        await agent.say(msg.Leaving(why="no GPU here", by_signal=False))
        assert await stage.heard.next() == ("unusable", "n1", "no GPU here")

    on_stage(play)


@pytest.mark.parametrize("by_signal", [True, False])
def test_who_says_why_it_goes_is_lost_for_that_reason(by_signal: bool) -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        await stage.heard.next()
        leaving = msg.Leaving(why="SIGTERM", by_signal=by_signal)
        await agent.say(leaving)
        assert await stage.heard.next() == ("message", "n1", leaving)
        await agent.close()
        assert await stage.heard.next() == ("lost", "n1", "SIGTERM", by_signal)

    on_stage(play)


def test_whose_connection_breaks_is_lost() -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        await stage.heard.next()
        await agent.close()
        kind, node, why, by_signal = await stage.heard.next()
        assert (kind, node, by_signal) == ("lost", "n1", False)
        assert "its connection broke" in str(why)

    on_stage(play)


def test_a_second_agent_of_a_node_replaces_the_first_which_is_told() -> None:
    async def play(stage: Stage) -> None:
        first = await stage.agent("n1").join()
        await stage.heard.next()
        second = await stage.agent("n1").join()
        assert await stage.heard.next() == ("joined", "n1", 2)
        assert await first.hear() == msg.Refused(why="another agent of this node took its place")
        assert await first.hear() is grpc.aio.EOF
        stage.server.send("n1", msg.Probe(cycle=0))
        assert await second.hear() == msg.Probe(cycle=0)
        assert stage.heard.events.empty(), "the first is not lost: the state machine knows already"

    on_stage(play)


def test_who_is_disconnected_hears_why_and_nothing_that_it_says_counts() -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        await stage.heard.next()
        stage.server.disconnect("n1", "too slow")
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await agent.say(msg.RankExited(cycle=0, rank=0, exit=1, after_stop=False))
        assert await agent.hear() == msg.Refused(why="too slow")
        assert await agent.hear() is grpc.aio.EOF
        assert stage.heard.events.empty()

    on_stage(play)


def test_at_the_end_every_agent_is_told_and_waited_for() -> None:
    async def play(stage: Stage) -> None:
        agents = [await stage.agent(node).join() for node in ("n1", "n2")]
        ending = asyncio.create_task(stage.server.shut_down(PATIENCE_S))
        for agent in agents:
            assert await agent.hear() == msg.Shutdown()
            assert not ending.done()
            await agent.close()
        await asyncio.wait_for(ending, PATIENCE_S / 2)

    on_stage(play)


def test_who_joins_while_the_job_ends_does_not_hold_it_up() -> None:
    async def play(stage: Stage) -> None:
        late, other = stage.agent("n2"), await stage.agent("n1").join()
        await late.greet()
        ending = asyncio.create_task(stage.server.shut_down(PATIENCE_S))
        assert await other.hear() == msg.Shutdown()
        await late.say(msg.Joined(slots=2))
        assert await late.hear() == msg.Shutdown()
        await late.close()
        await other.close()
        await asyncio.wait_for(ending, PATIENCE_S / 2)

    on_stage(play)


def test_who_does_not_go_is_not_waited_for_longer_than_asked() -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        await asyncio.wait_for(stage.server.shut_down(0.2), PATIENCE_S / 2)
        assert await agent.hear() == msg.Shutdown()

    on_stage(play)


def test_who_connects_and_says_nothing_is_cut_off_and_agents_are_not() -> None:
    async def play(stage: Stage) -> None:
        agent = await stage.agent("n1").join()
        assert await stage.heard.next() == ("joined", "n1", 2)
        strangers = [await asyncio.open_connection("127.0.0.1", stage.port) for _ in range(20)]
        patience_s = rpc.STRANGER_SILENCE_MS / 1000 + PATIENCE_S
        # Each is read to the end of its stream.
        await asyncio.gather(*(asyncio.wait_for(reader.read(), patience_s) for reader, _ in strangers))
        for _, writer in strangers:
            writer.close()
        await agent.say(msg.WorkersGone(cycle=0))
        assert await stage.heard.next() == ("message", "n1", msg.WorkersGone(cycle=0))

    on_stage(play)


def test_output_comes_with_the_name_of_its_node() -> None:
    async def play(stage: Stage) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{stage.port}") as channel:
            call: Any = channel.stream_unary(f"/{rpc.SERVICE}/{rpc.LOGS}", request_serializer=rpc.encode)(
                metadata=((rpc.TOKEN_METADATA, "secret"),)
            )
            chunk = msg.LogChunk(cycle=0, rank=1, ts=1.0, data=b"hello\n")
            for message in (msg.LogHello(node="n1"), chunk, msg.LogEnd(cycle=0, rank=1)):
                await call.write(message)
            await call.done_writing()
            await asyncio.wait_for(call, PATIENCE_S)
        assert stage.heard.outputs == [("n1", chunk), ("n1", msg.LogEnd(cycle=0, rank=1))]

    on_stage(play)


def test_an_agent_that_comes_while_the_coordinator_stands_still_finds_out_who_is_in_charge(
    tmp_path: Path,
) -> None:
    empty_settings = b"\0\0\0\4\0\0\0\0\0"

    async def run() -> int:
        async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not came:
                # It was well when the first connection was made; RFC 9113, 3.4.
                writer.write(empty_settings)
            came.append(writer)
            await reader.read()
            writer.close()

        came: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(stand_still, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        config = AgentConfig(f"127.0.0.1:{port}", "token", FENCE, "n1", tmp_path, os.environ)
        code = await asyncio.wait_for(NodeAgent(config).run(), 200)
        server.close()
        return code

    assert asyncio.run(run()) == EXIT_COORDINATOR_SILENT
