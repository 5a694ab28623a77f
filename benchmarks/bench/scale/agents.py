#!/usr/bin/env python3
"""Stands in for srun in the scale benchmark: many simulated agents in one process.

An agent has its own connection, speaks the real protocol and has no ranks: it says at once that they
started, train, or are gone, and prints a line for its first rank. SIGUSR1 cuts one active agent off. Times,
and both sides' processor time until then, go to standard output, one JSON object a line; the Coordinator
relays them. Run by ``scale.py`` only.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
import psutil

from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc

_JOINING_AT_ONCE = 512


class Fleet:
    """All agents, and when the last of them had what."""

    def __init__(self, nodes: list[str], slots: int) -> None:
        self.slots = slots
        self.nodes = nodes
        self.assigned: dict[int, int] = {}
        self.lines: dict[int, int] = {}
        self.all_assigned: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.active: list[str] = []

    def started(self, node: str, start: msg.StartWorkers) -> None:
        count = self.assigned[start.cycle] = self.assigned.get(start.cycle, 0) + 1
        if count == 1:
            self.active = []
        self.active.append(node)
        if count == start.group_world_size:
            tell("assigned", cycle=start.cycle)
            self.all_assigned[start.cycle].set()

    def printed(self, start: msg.StartWorkers) -> None:
        count = self.lines[start.cycle] = self.lines.get(start.cycle, 0) + 1
        if count == start.group_world_size:
            tell("printed", cycle=start.cycle)

    async def cut_one(self) -> None:
        node = self.active[len(self.active) // 2]
        tell("cut", cycle=1)
        await self.channels[node].close()


def tell(what: str, cycle: int = 0) -> None:
    server = psutil.Process(os.getppid()).cpu_times()
    times = {"t": time.time(), "agents_cpu": time.process_time(), "server_cpu": server.user + server.system}
    print(json.dumps({"what": what, "cycle": cycle, **times}), flush=True)


async def agent(fleet: Fleet, node: str, joining: asyncio.Semaphore) -> None:
    """One agent's life."""
    environ = os.environ
    options = [*rpc.CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(environ[rpc.COORDINATOR_VARIABLE], options=options)
    fleet.channels[node] = channel
    metadata = ((rpc.TOKEN_METADATA, environ[rpc.TOKEN_VARIABLE]),)
    async with joining:
        call: Any = channel.stream_stream(
            f"/{rpc.SERVICE}/{rpc.CONTROL}",
            request_serializer=rpc.encode,
            response_deserializer=rpc.decode_coordinator.decode,
        )(metadata=metadata)
        fence = environ[rpc.FENCE_VARIABLE]
        await call.write(msg.Hello(version=msg.PROTOCOL_VERSION, node=node, fence=fence))
        await call.read()
        await call.write(msg.Joined(slots=fleet.slots))
    logs: Any = None
    try:
        while (message := await call.read()) is not grpc.aio.EOF:
            match message:
                case msg.StartWorkers():
                    fleet.started(node, message)
                    ranks = list(range(message.first_rank, message.first_rank + fleet.slots))
                    started = msg.WorkersStarted(
                        cycle=message.cycle, ranks=ranks, pids=ranks, warm=True, why_cold=""
                    )
                    for answer in (
                        started,
                        msg.RanksReady(cycle=message.cycle),
                        msg.RanksStepping(cycle=message.cycle, step=1),
                    ):
                        await call.write(answer)
                    # A rank takes longer to say something than the whole job to be assigned.
                    await fleet.all_assigned[message.cycle].wait()
                    logs = logs or await open_logs(channel, metadata, node)
                    text = f"rank {message.first_rank} begins\n".encode()
                    await logs.write(
                        msg.LogChunk(cycle=message.cycle, rank=message.first_rank, ts=time.time(), data=text)
                    )
                    fleet.printed(message)
                case msg.StopWorkers():
                    await call.write(msg.WorkersGone(cycle=message.cycle))
                case msg.Shutdown() | msg.Refused():
                    break
        if logs is not None:
            await logs.done_writing()
        await call.done_writing()
    except (grpc.aio.AioRpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        return
    finally:
        await channel.close()


async def open_logs(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], node: str) -> Any:
    logs: Any = channel.stream_unary(
        f"/{rpc.SERVICE}/{rpc.LOGS}", request_serializer=rpc.encode, response_deserializer=bytes
    )(metadata=metadata)
    await logs.write(msg.LogHello(node=node))
    return logs


async def main(nodes: int, slots: int) -> None:
    gc.disable()  # thousands of agents in one process is this benchmark's own trouble
    names = [f"node{index:05d}" for index in range(nodes)]
    fleet = Fleet(names, slots)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(fleet.cut_one()))
    tell("begin")
    joining = asyncio.Semaphore(_JOINING_AT_ONCE)
    await asyncio.gather(*(agent(fleet, name, joining) for name in names))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
