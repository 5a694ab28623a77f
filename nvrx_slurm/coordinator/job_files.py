"""Writes a job's files off the event loop; training goes on where one can't be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


class JobFiles:
    """One job's small files, and what could not be written of all its files.

    Args:
        directory: the run directory, as complaints name it.
        say: tells the person who watches the job.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._complained: set[str] = set()
        self._order = asyncio.Lock()

    async def write(self, what: str, write: Callable[[], None]) -> None:
        """Have ``write`` called in another thread; complain of ``what`` if that raises OSError."""
        try:
            await asyncio.get_running_loop().run_in_executor(None, write)
        except OSError as error:
            self.complain(what, error)

    async def write_in_order(self, what: str, write: Callable[[], None]) -> None:
        """Do the same, one after the other: a file that is written again must hold the newest in the end."""
        # The lock is fair: what comes first is written first.
        async with self._order:
            await self.write(what, write)

    async def settle(self) -> None:
        """Wait until nothing is being written in order."""
        async with self._order:
            pass

    def complain(self, what: str, error: Exception) -> None:
        """Say once that something can't be written."""
        if what not in self._complained:
            self._complained.add(what)
            self._say(f"WARNING: the {what} cannot be written to {self._directory}: {error}")

    def sum_up(self) -> None:
        """Say at the end what could not be written, if anything."""
        if self._complained:
            self._say(f"WARNING: not everything could be written: {', '.join(sorted(self._complained))}")
