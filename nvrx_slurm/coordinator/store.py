"""The Coordinator's side of the process that hosts the rendezvous stores."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from nvrx_slurm.interpreter import command_for

_PROCESS_INTERVAL_S = 1.0
"""Store processes are not started more often."""
_OPEN_TIMEOUT_S = 300.0
"""To import torch, from a busy file system, and open a store."""


class StoreError(RuntimeError):
    """The store process did not come up, or died; the message holds what it said."""


class RendezvousStores:
    """Hands out one fresh store per cycle. The next one is always opened ahead, off the restart path.

    Args:
        address: of this host, where ranks reach it.
        bind: where to listen, if that is not it.
        on_lost: told when the process, and so the running cycle's store, has died; call :meth:`start` again.
    """

    def __init__(self, address: str, on_lost: Callable[[str], None], bind: str = "") -> None:
        self.address = address
        self._bind = bind or address
        self._on_lost = on_lost
        self._started = -_PROCESS_INTERVAL_S
        self._process: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._next: asyncio.Task[int] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to start the process and to open the first store.

        Called again soon, it waits a moment first: a process that dies at once would do so over and over.
        """
        now = time.monotonic()
        pause = max(0.0, self._started + _PROCESS_INTERVAL_S - now)
        self._started = now + pause
        self._process = asyncio.create_task(self._spawn(pause))
        self._watching = asyncio.create_task(self._watch(self._process))
        self._next = self._open_ahead(self._process)

    async def next_port(self) -> int:
        """Return the port of a store that no rank has used.

        Raises:
            StoreError: there is none; ``on_lost`` is called too.
        """
        assert self._process is not None, "start() comes first"
        assert self._next is not None, "start() comes first"
        opened, process = self._next, self._process
        port = await asyncio.shield(opened)
        if self._next is opened:
            self._next = self._open_ahead(process)
        return port

    def _open_ahead(self, process: asyncio.Task[asyncio.subprocess.Process]) -> asyncio.Task[int]:
        opening = asyncio.create_task(self._open(process))
        # Whoever wants the store gets the error; if nobody does, it is no news.
        opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return opening

    async def _spawn(self, pause: float) -> asyncio.subprocess.Process:
        if pause:
            await asyncio.sleep(pause)
        return await asyncio.create_subprocess_exec(
            *command_for("nvrx_slurm.coordinator.store_process", self._bind),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    async def _open(self, spawning: asyncio.Task[asyncio.subprocess.Process]) -> int:
        try:
            process = await asyncio.shield(spawning)
        except OSError as error:
            raise StoreError(f"no rendezvous store on {self.address}: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(b"open\n")
            await process.stdin.drain()
        try:
            line = await asyncio.wait_for(process.stdout.readline(), _OPEN_TIMEOUT_S)
            return int(line)
        except (ValueError, asyncio.TimeoutError) as error:
            # Mostly it has ended. If not, it is of no use: then this ends it, and whoever watches it says so.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise StoreError(f"no rendezvous store on {self.address}: its process gave none") from error

    async def _watch(self, spawning: asyncio.Task[asyncio.subprocess.Process]) -> None:
        try:
            process = await asyncio.shield(spawning)
        except OSError as error:
            self._on_lost(f"the rendezvous store's process cannot be started: {error}")
            return
        assert process.stderr is not None
        said = ""
        while data := await process.stderr.read(65536):
            said = (said + data.decode(errors="replace"))[-4096:]
        code = await process.wait()
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        self._on_lost(f"the rendezvous store's process ended with {code}: {last[0]}")

    async def close(self) -> None:
        """End the process."""
        tasks = [task for task in (self._watching, self._next) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            with contextlib.suppress(OSError):
                process = await self._process
                if process.returncode is None:
                    process.kill()
                    await process.wait()
