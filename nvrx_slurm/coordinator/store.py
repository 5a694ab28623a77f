"""The Coordinator's side of the rendezvous store's process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable


class StoreError(RuntimeError):
    """The store's process did not come up; the message holds what it said."""


class RendezvousStore:
    """One store process, replaced by :meth:`start` when it has died."""

    def __init__(self, address: str, on_lost: Callable[[str], None]) -> None:
        self.address = address
        self._on_lost = on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._port: asyncio.Task[int] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to start the store; :meth:`port` waits for it."""
        self._port = asyncio.create_task(self._start())

    async def port(self) -> int:
        """Return the port that ranks connect to.

        Raises:
            StoreError: the process ended instead.
        """
        assert self._port is not None, "start() comes first"
        return await asyncio.shield(self._port)

    async def _start(self) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nvrx_slurm.coordinator.store_process",
            self.address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._process = process
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            assert process.stderr is not None
            said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            why = said[-1] if said else f"exit code {await process.wait()}"
            raise StoreError(f"the rendezvous store on {self.address} did not start: {why}")
        self._watching = asyncio.create_task(self._watch(process))
        return int(line)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while await process.stderr.read(65536):
            pass
        code = await process.wait()
        self._on_lost(f"the rendezvous store ended with {code}")

    async def close(self) -> None:
        """End the process."""
        for task in (self._watching, self._port):
            if task is not None:
                task.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
