"""The Coordinator's side of its lease: renew it, and notice that another holds a newer one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from nvrx_slurm.coordinator.lease import RENEW_S, Fence, Lease, LeaseError, LeaseFile

CONFIRM_S = 20.0
"""A Coordinator that has not looked for as long, as after a suspension, looks before it acts.

More than RENEW_S, and less than LAPSE_S: nobody can have taken over in a shorter time."""


def _since_boot() -> float:
    # Unlike CLOCK_MONOTONIC, it goes on while the machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseKeeper:
    """Holds the lease of ``fence`` for ``host`` until a newer fence is seen."""

    def __init__(
        self, file: LeaseFile, fence: Fence, host: str, clock: Callable[[], float] = _since_boot
    ) -> None:
        self._file = file
        self.fence = fence
        self._host = host
        self._clock = clock
        self._address = ""
        self._counter = 0
        self._confirmed = clock()
        self._writing = threading.Lock()
        self.successor: Fence | None = None
        """The newer fence, once seen."""
        self.paused = False
        """Do not renew: this host may be the one that is cut off."""

    def begin(self, address: str = "") -> None:
        """Write the lease, with where the Coordinator listens.

        Raises:
            OSError: the run directory can't be written.
        """
        self._address = address
        self._write(None)

    def holds(self) -> bool:
        """Tell whether this Coordinator may act. Looks into the run directory only after a standstill."""
        if self.successor is None and self._clock() - self._confirmed >= CONFIRM_S:
            self.confirm()
        return self.successor is None

    def confirm(self) -> bool:
        """Look into the run directory; tell whether this Coordinator may act.

        If that can't be read it may: agents hold to the newest fence themselves.
        """
        if self.successor is None:
            now = self._clock()
            try:
                newest = self._file.newest(self.fence)
            except LeaseError:
                return True
            if newest.is_newer_than(self.fence):
                self.successor = newest
            self._confirmed = now
        return self.successor is None

    async def keep(self, on_replaced: Callable[[], None], on_error: Callable[[OSError], None]) -> None:
        """Renew until cancelled or replaced; ``on_replaced`` is called once then."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                still_mine = await loop.run_in_executor(None, self._renew)
            except OSError as error:
                on_error(error)
                continue
            if not still_mine:
                on_replaced()
                return

    async def confirm_soon(self, timeout_s: float) -> bool:
        """As :meth:`confirm`, off the event loop; a file system that is silent does not forbid to act."""
        looking = asyncio.get_running_loop().run_in_executor(None, self.confirm)
        try:
            return await asyncio.wait_for(looking, timeout_s)
        except asyncio.TimeoutError:
            return self.successor is None

    def finish(self, code: int) -> None:
        """Write the job's exit code, for whoever waits for it.

        Raises:
            OSError: the run directory can't be written.
        """
        if self.confirm():
            self._write(code)

    def _renew(self) -> bool:
        if not self.confirm():
            return False
        if not self.paused:
            self._write(None)
        return True

    def _write(self, ended: int | None) -> None:
        with self._writing:
            self._counter += 1
            self._file.write(
                Lease(
                    fence=str(self.fence),
                    counter=self._counter,
                    host=self._host,
                    address=self._address,
                    ended=ended,
                )
            )
