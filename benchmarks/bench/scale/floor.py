#!/usr/bin/env python3
"""The least that a grpc.aio server can do for the same agents: the same streams and messages, no more.

``floor.py RUN_DIR NODES SPARES SLOTS``, as ``coordinator.py``; run by ``scale.py`` only. It keeps no state
machine, no journal of its nodes, no time-outs and no order; it has the same options of gRPC.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nvrx_slurm import journal
from nvrx_slurm.coordinator.job import prepare_for_many_nodes
from nvrx_slurm.journal import JournalWriter
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc
from nvrx_slurm.wire.timeouts import HeartbeatTimeouts, Monitoring, SectionTimeouts

_MONITORING = Monitoring(heartbeat=HeartbeatTimeouts(), section=SectionTimeouts())


class Floor:
    """Waits for all, starts the first ``nodes``, and whenever a stream ends stops and starts them again."""

    def __init__(self, run_dir: Path, nodes: int, spares: int, slots: int) -> None:
        run_dir.mkdir()
        self._run_dir = run_dir
        self._nodes, self._spares, self._slots = nodes, spares, slots
        self._journal = JournalWriter(run_dir / "journal.jsonl", "1", 0)
        self._agents: dict[str, Any] = {}
        self._active: list[str] = []
        self._stepping = 0
        self._stopping: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self._cycle = 0

    async def control(self, _requests: Any, context: Any) -> None:
        await context.send_initial_metadata((rpc.GREETING,))
        hello = await context.read()
        await context.write(self._welcome())
        await context.read()
        self._agents[hello.node] = context
        if len(self._agents) == self._nodes + self._spares:
            await self._start()
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                await self._heard(hello.node, message)
        finally:  # a call that is cancelled has its handler cancelled
            del self._agents[hello.node]
            self._task = asyncio.create_task(self._lost(hello.node))

    async def _lost(self, node: str) -> None:
        if self._stopping:
            await self._stopped(node)
        elif node in self._active:
            self._stopping = set(self._active) & set(self._agents)
            await self._send(msg.StopWorkers(cycle=self._cycle, hung=[]) for _ in self._here())

    async def logs(self, _requests: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass

    def _welcome(self) -> msg.Welcome:
        program = msg.Program(kind=msg.ProgramKind.SCRIPT, target="train.py", args=[], cwd="/")
        return msg.Welcome(
            program=program,
            job_id="1",
            run_dir=str(self._run_dir),
            nproc_per_node=str(self._slots),
            warm_start=True,
            max_restarts=100,
            stop_timeout_s=15.0,
        )

    def _here(self) -> list[Any]:
        return [self._agents[node] for node in self._active if node in self._agents]

    async def _send(self, messages: Iterable[msg.CoordinatorMessage]) -> None:
        pairs = zip(self._here(), messages, strict=True)
        await asyncio.gather(*(context.write(message) for context, message in pairs))

    async def _start(self) -> None:
        self._active = list(self._agents)[: self._nodes]
        self._stepping = 0
        self._journal.append(
            self._cycle,
            journal.CycleStarted(world_size=self._nodes * self._slots, nodes=self._active, spares=[]),
        )
        await self._send(
            msg.StartWorkers(
                cycle=self._cycle,
                group_rank=group_rank,
                group_world_size=self._nodes,
                first_rank=group_rank * self._slots,
                world_size=self._nodes * self._slots,
                master_addr="127.0.0.1",
                master_port=1,
                monitoring=_MONITORING,
            )
            for group_rank in range(self._nodes)
        )

    async def _heard(self, node: str, message: msg.AgentMessage) -> None:
        match message:
            case msg.RanksStepping():
                self._stepping += 1
                if self._stepping == self._nodes:
                    self._journal.append(self._cycle, journal.FirstStep(ranks=self._nodes * self._slots))
            case msg.WorkersGone():
                await self._stopped(node)

    async def _stopped(self, node: str) -> None:
        self._stopping.discard(node)
        if not self._stopping:
            self._cycle += 1
            await self._start()


async def main(run_dir: Path, nodes: int, spares: int, slots: int) -> None:
    prepare_for_many_nodes()
    floor = Floor(run_dir, nodes, spares, slots)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handlers: dict[str, Any] = {
        rpc.CONTROL: grpc.stream_stream_rpc_method_handler(
            floor.control, rpc.decode_agent.decode, rpc.encode
        ),
        rpc.LOGS: grpc.stream_unary_rpc_method_handler(floor.logs, rpc.decode_log.decode, lambda _: b""),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    environ = {
        **os.environ,
        rpc.COORDINATOR_VARIABLE: f"127.0.0.1:{port}",
        rpc.TOKEN_VARIABLE: "token",
        rpc.FENCE_VARIABLE: "1.0.0",
    }
    agents = Path(__file__).with_name("agents.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(agents), str(nodes + spares), str(slots), env=environ
    )
    await process.wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5])))
