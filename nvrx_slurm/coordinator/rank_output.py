"""Takes the ranks' output as it arrives, and has a thread write it; while that is slow, senders wait."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from nvrx_slurm.coordinator.app_log import AppLog
from nvrx_slurm.coordinator.rank_logs import REORDER_S, RankLogs, last_lines
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.wire import messages as msg

_QUEUE = 1024
_CULPRIT_LINES = 20
_LAST_OUTPUT_TIMEOUT_S = 30.0
LAST_LINES_TIMEOUT_S = 2.0
"""How long a rank's last lines are waited for, and as long again until they are written."""


class RankOutput:
    """One job's output. Needs a running event loop.

    Args:
        app_log: gets every line, too.
        world_size: of the cycle that runs.
        show: called in another thread with every line of rank 0, its end included; None: nobody wants it.
        complain: called when something can't be written.
    """

    def __init__(
        self,
        run_dir: RunDir,
        app_log: AppLog | None,
        world_size: Callable[[], int],
        show: Callable[[bytes], None] | None,
        complain: Callable[[str, Exception], None],
    ) -> None:
        self._run_dir = run_dir
        self._logs = RankLogs(run_dir, self._take_line, _max_open_files())
        self._app_log = app_log
        self._world_size = world_size
        self._show = show
        self._complain = complain
        self._queue: asyncio.Queue[tuple[str, msg.LogMessage]] = asyncio.Queue(_QUEUE)
        self._complete: defaultdict[tuple[int, int], asyncio.Event] = defaultdict(asyncio.Event)
        """Set when all output of a rank, named by cycle and rank, has arrived."""
        self._writing: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    def start(self) -> None:
        self._writing = asyncio.create_task(self._write_all())

    async def put(self, node: str, message: msg.LogMessage) -> None:
        """Take one message of ``node``; waits while too many are not written."""
        await self._queue.put((node, message))
        if isinstance(message, msg.LogEnd):
            self._complete[message.cycle, message.rank].set()

    def cycle_started(self, cycle: int) -> None:
        """Forget the ranks of cycles that nobody asks for any more."""
        for key in [key for key in self._complete if key[0] < cycle - 1]:
            del self._complete[key]

    async def last_lines(self, cycle: int, rank: int) -> list[str]:
        """Return what a rank said last, if it can be had in a moment."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._complete[cycle, rank].wait(), LAST_LINES_TIMEOUT_S)
            await asyncio.wait_for(self._queue.join(), LAST_LINES_TIMEOUT_S)
        return last_lines(self._run_dir.rank_log(cycle, rank), _CULPRIT_LINES)

    async def settle(self, cycle: int, rank: int | None) -> None:
        """Wait, for a bounded time, until the cycle's last lines are in its merged log; ``rank`` ended it."""
        with contextlib.suppress(asyncio.TimeoutError):
            if rank is not None:
                await asyncio.wait_for(self._complete[cycle, rank].wait(), LAST_LINES_TIMEOUT_S)
            await asyncio.wait_for(self._queue.join(), LAST_LINES_TIMEOUT_S)
        with contextlib.suppress(asyncio.TimeoutError):
            # There lines wait for earlier ones, and that is looked at as often.
            await asyncio.wait_for(self._closed.wait(), 2 * REORDER_S)

    async def drain(self) -> None:
        """Wait until what has arrived is written, for a bounded time."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._queue.join(), _LAST_OUTPUT_TIMEOUT_S)

    def close(self) -> None:
        """Write no more but the lines that wait for earlier ones."""
        if self._writing is not None:
            self._writing.cancel()
        try:
            self._logs.close()
        except OSError as error:
            self._complain("output", error)
        self._closed.set()

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch: list[tuple[str, msg.LogMessage]] = []
            with contextlib.suppress(asyncio.TimeoutError):
                patience = REORDER_S if self._logs.waits else None
                batch.append(await asyncio.wait_for(self._queue.get(), patience))
            while not self._queue.empty() and len(batch) < _QUEUE:
                batch.append(self._queue.get_nowait())
            error = await loop.run_in_executor(None, self._write_batch, batch)
            if error is not None:
                self._complain("output", error)
            for _ in batch:
                self._queue.task_done()

    def _write_batch(self, batch: Sequence[tuple[str, msg.LogMessage]]) -> Exception | None:
        """Write what can be written; return the last reason why something could not.

        Whatever goes wrong with one message, the next is taken: if nobody read the queue, every rank would
        soon wait in write(2).
        """
        now = time.time()
        failed: Exception | None = None
        for node, message in batch:
            try:
                self._logs.write(node, message, now)
            except Exception as error:
                failed = error
        try:
            self._logs.flush(now - REORDER_S)
            if self._app_log is not None:
                self._app_log.flush()
        except Exception as error:
            failed = error
        return failed

    def _take_line(self, cycle: int, rank: int, text: bytes) -> None:
        if self._app_log is not None:
            self._app_log.add(cycle, rank, self._world_size(), text)
        if rank == 0 and self._show is not None:
            # As it came, whatever this terminal's encoding.
            self._show(text + b"\n")


def _max_open_files() -> int:
    """How many of the ranks' logs may be open: a quarter of what this process may, for nodes need the rest.

    Opening is what costs, above all on a shared file system.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(256, soft // 4)
