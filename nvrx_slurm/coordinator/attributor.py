"""Has each cycle that a fault has ended attributed, in a child process; nothing waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.past import hung_node
from nvrx_slurm.coordinator.tasks import cancel_all
from nvrx_slurm.interpreter import command_for
from nvrx_slurm.journal import CycleAttributed, FaultKind, Record

_TIMEOUT_S = 120.0
_LAST_S = 10.0
"""At the end of a job that has failed: for what has not been attributed by then."""
_TRACES_S = 6.0
"""A little longer than agents take to write the traces of a hang."""
_USELESS = frozenset(
    {"4-deterministic", "6-exclude", "7-repeated", "8-no-checkpoint", "9-budget", "10-startup"}
)
"""Rules of the policy by which a job may be ended. Not those that say how Slurm ended it."""
_RESTARTS = ("restart", "restart_exclude")
_COUNTED = frozenset({"slurm.node_fail", "host.sigkill", "host.segfault", "host.sigbus", "host.abort"})
"""Families whose nodes it counts by them, too: a lost node may come back, a signal be the program's fault."""
_decoder = msgspec.json.Decoder(CycleAttributed)


def finding_of(found: CycleAttributed, cycle: int) -> steps.CycleAttributed:
    """Return what was found out of ``cycle`` as the machine takes it."""
    return steps.CycleAttributed(
        cycle=cycle,
        useless=found.action == "stop" and (found.by != "rules" or found.rule in _USELESS),
        hold=found.action == "hold" and found.by == "rules",
        delay_s=found.delay_s if found.action in _RESTARTS else 0.0,
        rule=found.rule,
        why=found.why,
        exclude=() if found.category in _COUNTED else tuple(found.exclude),
        hung=hung_node(found),
    )


class Attributor:
    """Attributes one cycle after the other. Needs a running event loop.

    Args:
        run_dir: which the child reads and writes.
        settle: waits, for a bounded time, until the last output of a cycle is in its logs; takes the cycle
            and the rank that ended it.
        tell: called with what was found out, and the cycle.
    """

    def __init__(
        self,
        run_dir: Path,
        settle: Callable[[int, int | None], Awaitable[None]],
        tell: Callable[[CycleAttributed, int], None],
    ) -> None:
        self._run_dir = run_dir
        self._settle = settle
        self._tell = tell
        self._order = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        self._nodes: tuple[str, ...] = ()
        self._without_traces: dict[int, set[str]] = {}
        """Nodes of a cycle that hung whose traces have not been written."""
        self._traces_written = asyncio.Event()
        self._asked_to_end = False

    def take(self, record: Record) -> None:
        """Take what has happened: what ends a cycle by a fault has it attributed."""
        match record.event:
            case journal.CycleStarted(nodes=nodes):
                self._nodes = tuple(nodes)
            case journal.FaultDetected(kind=FaultKind.HANG):
                self._without_traces.setdefault(record.cycle, set(self._nodes))
            case journal.StopRequested():
                self._asked_to_end = True
            case journal.TracesKept(node=node):
                self._note_traces(record.cycle, node)
            case journal.NodeLost(node=node):
                self._note_traces(record.cycle, node)
            case journal.Verdict(kind=kind, rank=rank) if kind is not None:
                task = asyncio.create_task(self._attribute(record.cycle, rank))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            case _:
                pass

    def _note_traces(self, cycle: int, node: str) -> None:
        self._without_traces.get(cycle, set()).discard(node)
        self._traces_written.set()

    async def finish(self, failed: bool) -> None:
        """End what is being attributed; wait a little for it first if the job has ``failed``.

        But not if somebody has asked the job to end: Slurm soon kills what has not ended then.
        """
        if self._running and failed and not self._asked_to_end:
            await asyncio.wait(self._running, timeout=_LAST_S)
        await cancel_all([*self._running])

    async def _attribute(self, cycle: int, rank: int | None) -> None:
        # The lock is fair: the history is in order.
        async with self._order:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_traces(cycle), _TRACES_S)
            self._without_traces.pop(cycle, None)
            await self._settle(cycle, rank)
            self._tell(await self._ask_child(cycle), cycle)

    async def _all_traces(self, cycle: int) -> None:
        while self._without_traces.get(cycle):
            self._traces_written.clear()
            await self._traces_written.wait()

    async def _ask_child(self, cycle: int) -> CycleAttributed:
        arguments = (str(self._run_dir), str(cycle), str(os.getpid()))
        try:
            child = await asyncio.create_subprocess_exec(
                *command_for("nvrx_slurm.attribution.ended_cycle", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            return CycleAttributed(failed=f"its process cannot be started: {error}")
        try:
            said, complaint = await asyncio.wait_for(child.communicate(), _TIMEOUT_S)
        except asyncio.TimeoutError:
            return CycleAttributed(failed=f"it took longer than {_TIMEOUT_S:g} s")
        finally:
            if child.returncode is None:
                # With those that it has started to read dumps.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()
        try:
            return _decoder.decode(said)
        except msgspec.DecodeError:
            last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
            return CycleAttributed(failed=f"its process ended with {child.returncode}: {last[0][:400]}")
