"""What a Coordinator does beside its event loop's callbacks: tasks that somebody holds and waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

_CANCEL_AGAIN_S = 0.1


class Tasks:
    """The running tasks of one job. Needs a running event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._useless_at_end: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run it; :meth:`finish` waits for it."""
        self._spawn(coroutine)

    def spawn_until_end(self, coroutine: Coroutine[object, object, None]) -> None:
        """Run it; its result is of no use once the job has ended."""
        task = self._spawn(coroutine)
        self._useless_at_end.add(task)
        # Not kept: there is one for each report on the ranks' pace, for weeks.
        task.add_done_callback(self._useless_at_end.discard)

    async def finish(self, timeout_s: float) -> None:
        """Cancel what is of no use any more, and wait for the rest."""
        for task in list(self._useless_at_end):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until all have ended: before Python 3.12 ``asyncio.wait_for`` can swallow that."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
