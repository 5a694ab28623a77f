"""Whether this Coordinator is in charge of its job, and what it does when it is not any more."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

from nvrx_slurm.coordinator.lease import LAPSE_S, Fence, Lease, LeaseError, LeaseFile
from nvrx_slurm.coordinator.lease_keeper import LeaseKeeper
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.slurm import SlurmClient, SlurmUnavailableError, UnknownJobError

EXIT_REPLACED = 1
_ASK_S = 5.0
_LOOK_S = 3.0
_GIVE_UP_S = 10 * LAPSE_S
"""A successor that has not renewed its lease for so long has gone too, and nobody took over from it."""


class Charge:
    """One job's lease on this host.

    Args:
        on_replaced: called once, in the event loop, when another Coordinator is found to have taken over.
        say: tells the person who watches the job.
    """

    def __init__(
        self,
        run_dir: RunDir,
        fence: Fence,
        host: str,
        slurm: SlurmClient,
        on_replaced: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._file = LeaseFile(run_dir.path)
        self._keeper = LeaseKeeper(self._file, fence, host)
        self._fence = fence
        self._slurm = slurm
        self._on_replaced = on_replaced
        self._say = say
        self._keeping: asyncio.Task[None] | None = None
        self._told = False
        self._complained = False

    def begin(self, address: str) -> None:
        """Take charge, and tell where the Coordinator listens.

        Raises:
            OSError: the run directory can't be written.
        """
        self._keeper.begin(address)
        self._keeping = asyncio.create_task(self._keeper.keep(self._replaced, self._complain))

    def holds(self) -> bool:
        """Tell whether this Coordinator may go on; costs nothing unless it stood still."""
        return self._tell(self._keeper.holds())

    def confirm(self) -> bool:
        """Tell the same from a look into the run directory, as is due before whatever can't be undone."""
        return self._tell(self._keeper.confirm())

    async def end(self, code: int) -> None:
        """Stop renewing; write the job's exit code for whoever waits for it."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._keeper.finish, code)
        except OSError as error:
            self._complain(error)

    def _tell(self, holds: bool) -> bool:
        if not holds:
            self._replaced()
        return holds

    def _replaced(self) -> None:
        if not self._told:
            self._told = True
            self._on_replaced()

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._say(f"WARNING: the lease cannot be written: {error}")

    # --- alone ---------------------------------------------------------------------------------------

    async def while_alone(self, is_alone: Callable[[], bool], cut_off: Callable[[], None]) -> None:
        """Find out which side is cut off, for no other node answers any more.

        The lease is not renewed until Slurm answers or a node comes back: if it is this host, the others must
        see that nobody is in charge. ``cut_off`` is called once when that has lasted for LAPSE_S: somebody
        may have taken over by then.
        """
        if self._keeper.paused:
            return
        self._keeper.paused = True
        began, called = time.monotonic(), False
        while is_alone() and not self._told:
            if await asyncio.get_running_loop().run_in_executor(None, self._slurm_answers):
                break
            if not called and time.monotonic() - began >= LAPSE_S:
                called = True
                cut_off()
            await asyncio.sleep(_ASK_S)
        self._keeper.paused = False

    def _slurm_answers(self) -> bool:
        try:
            self._slurm.job(self._fence.job)
        except SlurmUnavailableError:
            return False
        except UnknownJobError:
            pass
        return True

    # --- replaced ------------------------------------------------------------------------------------

    async def follow(self) -> int:
        """Wait for the job's end under its successor; return its exit code.

        This process is what the batch script waits for: if it ended now, Slurm would end the job, successor
        included. When the job was started again there is nothing to wait for.
        """
        successor = self._keeper.successor
        assert successor is not None, "nobody has taken over"
        if successor.restart != self._fence.restart:
            self._say(f"job was started again meanwhile ({successor}): this is {self._fence}, and ends")
            return EXIT_REPLACED
        self._say(f"another host has taken over ({successor}): this one only waits for the job's end")
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[signal.Signals] = loop.create_future()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, _set_result, stopped, sig)
        looking = asyncio.create_task(self._await_end(successor))
        waited: set[asyncio.Future[Any]] = {stopped, looking}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            return looking.result()
        looking.cancel()
        return 128 + stopped.result()

    async def _await_end(self, successor: Fence) -> int:
        last: Lease | None = None
        since = time.monotonic()
        while time.monotonic() - since < _GIVE_UP_S:
            with contextlib.suppress(LeaseError):
                lease = await asyncio.get_running_loop().run_in_executor(None, self._file.read)
                if lease is not None and lease.ended is not None:
                    self._say(f"the job has ended under {lease.fence} on {lease.host} with {lease.ended}")
                    return lease.ended
                if lease is not None and Fence.parse(lease.fence).restart != successor.restart:
                    self._say(f"the job was started again ({lease.fence})")
                    return EXIT_REPLACED
                if lease != last:
                    last, since = lease, time.monotonic()
            await asyncio.sleep(_LOOK_S)
        self._say("whoever took over has been silent for too long: giving up")
        return EXIT_REPLACED


def _set_result(future: asyncio.Future[signal.Signals], sig: signal.Signals) -> None:
    if not future.done():
        future.set_result(sig)
