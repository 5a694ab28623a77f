"""Brings lost nodes back: starts a new agent where one was lost, as soon as the node is there.

Off the restart path, and at rest while no node is lost. A node whose kernel answers gets a new agent at once;
one that is silent is looked at now and then, and so is Slurm's view of it, until it is back in the job or has
been taken out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from nvrx_slurm.slurm import SlurmClient, SlurmUnavailableError, UnknownJobError

_PROBE_TIMEOUT_S = 1.0
_QUESTIONS = 2
"""So many questions to Slurm at a time, and"""
_STARTS = 8
"""so many agents are being started, however many nodes are lost."""
_RECALLS = 64
"""Whoever loses more nodes than these at a time has another problem, and Slurm is not to be flooded."""


class Step(Protocol):
    """One ``srun`` with an agent."""

    async def start(self) -> None:
        """Raises: OSError."""
        ...

    async def wait(self) -> str:
        """Wait for its end; return what it was, for people."""
        ...

    async def end(self, grace_s: float) -> None: ...


@dataclass(frozen=True)
class Pace:
    """How often to look, and to try."""

    first_look_s: float = 1.0
    longest_look_s: float = 15.0
    attempts: int = 4
    start_timeout_s: float = 60.0
    """An agent that has not come by then won't."""
    backoff_s: float = 2.0
    """After the first attempt that failed; doubles."""


_PACE = Pace()


class _Condition(enum.Enum):
    USABLE = enum.auto()
    NOT_NOW = enum.auto()


class Returns:
    """One task per lost node. Needs a running event loop."""

    def __init__(
        self,
        new_step: Callable[[str], Step],
        slurm: SlurmClient,
        job_id: str,
        stays_away: Callable[[str, str], None],
        pace: Pace = _PACE,
        answers: Callable[[str], Awaitable[bool]] | None = None,
    ) -> None:
        """``stays_away`` is called with a node and the reason when there is no use in trying.

        ``answers`` stands in for :func:`kernel_answers`.
        """
        self._new_step = new_step
        self._slurm = slurm
        self._job_id = job_id
        self._stays_away = stays_away
        self._pace = pace
        self._answers = answers or kernel_answers
        self._addresses: dict[str, str] = {}
        self._arrived: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._steps: dict[str, Step] = {}
        self._questions = asyncio.Semaphore(_QUESTIONS)
        self._starts = asyncio.Semaphore(_STARTS)

    def joined(self, node: str, address: str) -> None:
        """Note that ``node`` has an agent, whose connection came from ``address`` in gRPC's notation."""
        self._addresses[node] = address
        if node in self._arrived:
            self._arrived[node].set()

    def recall(self, node: str) -> None:
        """Bring ``node`` back, which had an agent once."""
        busy = [each for each, task in self._tasks.items() if not task.done()]
        if node in busy:
            return
        if len(busy) >= _RECALLS:
            why = f"{len(busy)} other nodes are being brought back"
            asyncio.get_running_loop().call_soon(self._stays_away, node, why)
            return
        self._arrived[node] = asyncio.Event()
        self._tasks[node] = asyncio.create_task(self._bring_back(node))

    async def close(self, grace_s: float) -> None:
        """Try no more; end every step, those of agents that have come after ``grace_s`` seconds."""
        await self.stop_trying()
        await asyncio.gather(*(step.end(grace_s) for step in self._steps.values()))

    async def stop_trying(self) -> None:
        """Start no more agents; those that have come stay."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _bring_back(self, node: str) -> None:
        arrived = self._arrived[node]
        said = ""
        for attempt in range(self._pace.attempts):
            if attempt:
                await _wait(arrived, self._pace.backoff_s * 2 ** (attempt - 1))
            why = await self._until_usable(node)
            if arrived.is_set():
                return
            if why is not None:
                self._stays_away(node, why)
                return
            async with self._starts:
                said = await self._start(node)
            if arrived.is_set():
                return
        self._stays_away(node, f"{self._pace.attempts} new agents did not come, the last: {said}")

    async def _start(self, node: str) -> str:
        """Start an agent and wait until it has come; return what srun said if it has not."""
        if (former := self._steps.pop(node, None)) is not None:
            # It waits for a node that was gone.
            await former.end(0.0)
        step = self._steps[node] = self._new_step(node)
        try:
            await step.start()
        except OSError as error:
            del self._steps[node]
            return f"srun cannot be started: {error}"
        arrived = self._arrived[node]
        coming = asyncio.create_task(arrived.wait())
        ending = asyncio.create_task(step.wait())
        try:
            await asyncio.wait(
                {coming, ending},
                timeout=self._pace.start_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if arrived.is_set():
                return ""
            said = ending.result() if ending.done() else f"nothing for {self._pace.start_timeout_s:g} s"
        finally:
            coming.cancel()
            ending.cancel()
        await self._steps.pop(node).end(0.0)
        return said

    # --- is it there? --------------------------------------------------------------------------------

    async def _until_usable(self, node: str) -> str | None:
        """Wait until an agent can be started on ``node``; return why there will never be one."""
        async for _ in self._looks(node):
            answers = await self._answers(self._addresses[node])
            async with self._questions:
                found = await asyncio.get_running_loop().run_in_executor(None, self._ask_slurm, node)
            if isinstance(found, str):
                return found
            if answers and found is _Condition.USABLE:
                break
        return None

    async def _looks(self, node: str) -> AsyncIterator[None]:
        """Yield at once, and then again and again at growing intervals until the node has an agent."""
        arrived = self._arrived[node]
        for look in itertools.count():
            if arrived.is_set():
                return
            yield
            interval = self._pace.first_look_s * 1.5 ** min(look, 32)
            await _wait(arrived, min(interval, self._pace.longest_look_s))

    def _ask_slurm(self, node: str) -> _Condition | str:
        """Return whether a step can be started on ``node``, or why never."""
        try:
            job = self._slurm.job(self._job_id)
            if job.state not in ("RUNNING", "SUSPENDED"):
                return f"Slurm calls the job {job.state}"
            if node not in job.nodes:
                return "Slurm has taken it out of the job"
            usable = job.state == "RUNNING" and self._slurm.node(node).usable
        except UnknownJobError as error:
            return str(error)
        except SlurmUnavailableError:
            usable = False
        return _Condition.USABLE if usable else _Condition.NOT_NOW


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def kernel_answers(address: str) -> bool:
    """Tell whether the host of a connection is there, by knocking at the connection's own port.

    The process that had it is gone, so a living kernel refuses. One that has died, is cut off, or hides
    behind a firewall that drops says nothing.

    Args:
        address: as grpc's ``ServicerContext.peer`` names it: ``ipv4:10.0.0.1:4711``, ``ipv6:[::1]:4711``.
    """
    host, _, port = unquote(address).partition(":")[2].rpartition(":")
    try:
        connecting = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await asyncio.wait_for(connecting, _PROBE_TIMEOUT_S)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except (OSError, ValueError, asyncio.TimeoutError):
        return False
    writer.close()
    return True
