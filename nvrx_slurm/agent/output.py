"""Ranks' output: read from their pipes, sent to the Coordinator, with back-pressure and no loss."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from nvrx_slurm.agent.staging import StagedQueue
from nvrx_slurm.wire.messages import LogChunk, LogEnd, LogHello, LogMessage

_READ_BYTES = 64 * 1024


class OutputPump:
    """Reads every pipe that it is given until its end, whatever cycle runs meanwhile."""

    def __init__(
        self, node: str, show: Callable[[int, int, bytes], None] | None = None, staging: Path | None = None
    ) -> None:
        """``show`` is told of all output too, with rank and local rank; nothing: it is complete.

        ``staging``: see :class:`~nvrx_slurm.agent.staging.StagedQueue`.
        """
        self._node = node
        self._show = show
        self._loop = asyncio.get_running_loop()
        self._queue = StagedQueue(staging)
        self._sources: dict[int, tuple[int, int, int]] = {}
        self._paused = False
        self._closing = False

    def add(self, pipe: int, cycle: int, rank: int, local_rank: int) -> None:
        """Own ``pipe`` (the reading end) and read it to its end."""
        os.set_blocking(pipe, False)
        self._sources[pipe] = (cycle, rank, local_rank)
        if not self._paused:
            self._loop.add_reader(pipe, self._readable, pipe)

    def finish(self) -> None:
        """End :meth:`messages` once every pipe has ended."""
        self._closing = True
        if not self._sources:
            self._queue.finish()

    def close(self) -> None:
        """Give up what has not been sent."""
        self._queue.close()

    async def messages(self) -> AsyncIterator[LogMessage]:
        """Yield what is to be sent, in order; nothing at all if there is no output."""
        greeted = False
        while (message := await self._queue.get()) is not None:
            if not greeted:
                greeted = True
                yield LogHello(node=self._node)
            yield message
            if self._paused and self._queue.has_room:
                self._paused = False
                for pipe in self._sources:
                    self._loop.add_reader(pipe, self._readable, pipe)

    def _readable(self, pipe: int) -> None:
        cycle, rank, local_rank = self._sources[pipe]
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return
        if self._show is not None:
            self._show(rank, local_rank, data)
        if data:
            self._queue.put(LogChunk(cycle=cycle, rank=rank, ts=time.time(), data=data))
            if self._queue.is_full:
                self._paused = True
                for source in self._sources:
                    self._loop.remove_reader(source)
            return
        self._loop.remove_reader(pipe)
        os.close(pipe)
        del self._sources[pipe]
        self._queue.put(LogEnd(cycle=cycle, rank=rank))
        if self._closing and not self._sources:
            self._queue.finish()
