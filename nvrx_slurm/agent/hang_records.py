"""What is kept of a hang before anything is killed: every rank's Flight Recorder, the culprits' stacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from nvrx_slurm import linux
from nvrx_slurm.agent import flight_recorder
from nvrx_slurm.agent.evidence import examine
from nvrx_slurm.agent.flight_recorder import NoTraceError, Trace
from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.flight_recorder import trace_socket_path
from nvrx_slurm.wire.stacks import stacks_path

_TRACE_S = 0.4
_EVIDENCE_S = 0.5
_EVIDENCE_GRACE_S = 0.1
"""Together a second, by which a hang may delay the restart."""
_WRITE_TIMEOUT_S = 5.0


class HangRecords:
    """Finds out in bounded time; whatever can't be found out is left out, and the reason told."""

    def __init__(
        self, node: str, welcome: msg.Welcome, py_spy: str | None, say: Callable[[msg.AgentMessage], None]
    ) -> None:
        self._node = node
        self._welcome = welcome
        self._py_spy = py_spy
        self._say = say
        self._writing: asyncio.Task[None] | None = None

    # --- Flight Recorder -----------------------------------------------------------------------------

    async def keep(
        self, cycle: LocalCycle, hung: Sequence[int]
    ) -> asyncio.Future[list[BaseException | None]]:
        """Fetch the trace of every live rank; return what finds out the stacks of the hung ones meanwhile.

        In this order, for the question for its stacks can wake a rank from what it hangs in. But one that was
        stopped answers only when it goes on, as it does for its stacks. Traces are written during the stop.
        """
        began = time.monotonic()
        ranks = sorted(cycle.alive)
        stopped = [
            rank for rank in ranks if linux.process_state(cycle.monitors.pid_of(rank) or 0) in ("T", "t")
        ]
        fetched = await self._fetch_all(cycle, [rank for rank in ranks if rank not in stopped])
        # A node on which no thread can be started is to be stopped all the same.
        stacks = asyncio.gather(
            *(self._record_evidence(cycle, rank) for rank in hung), return_exceptions=True
        )
        fetched.update(await self._fetch_all(cycle, stopped))
        seconds = time.monotonic() - began
        self._writing = asyncio.create_task(self._write(cycle.cycle, fetched, seconds))
        return stacks

    async def _fetch_all(self, cycle: LocalCycle, ranks: Sequence[int]) -> dict[int, Trace | str]:
        """Return the trace of each rank, or why there is none."""
        answers = await asyncio.gather(*(self._fetch(cycle, rank) for rank in ranks), return_exceptions=True)
        return {
            rank: answer if isinstance(answer, Trace) else str(answer)
            for rank, answer in zip(ranks, answers, strict=True)
        }

    async def _fetch(self, cycle: LocalCycle, rank: int) -> Trace:
        pid = cycle.monitors.pid_of(rank)
        if pid is None:
            raise NoTraceError("it has not started")
        return await flight_recorder.fetch_trace(
            rank, pid, trace_socket_path(cycle.page_paths[rank]), _TRACE_S
        )

    async def _write(self, cycle: int, fetched: Mapping[int, Trace | str], seconds: float) -> None:
        """The run directory may be slow, or be what the ranks hang in: nothing waits for it."""
        folder = flight_recorder.traces_dir(self._welcome.run_dir, cycle)

        def write(answer: Trace | str) -> str:
            if isinstance(answer, str):
                return answer
            try:
                flight_recorder.write_trace(folder, answer, self._node, self._welcome.job_id, cycle)
            except OSError as error:
                return f"it cannot be written: {error}"
            return ""

        loop = asyncio.get_running_loop()
        writing = [loop.run_in_executor(None, write, answer) for answer in fetched.values()]
        problems = dict(zip(fetched, await asyncio.gather(*writing), strict=True))
        self._say(
            msg.TracesKept(
                cycle=cycle,
                ranks=[rank for rank, problem in problems.items() if not problem],
                missing={rank: problem for rank, problem in problems.items() if problem},
                seconds=seconds,
            )
        )

    async def close(self) -> None:
        """Wait for what is being written, but not for long."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=_WRITE_TIMEOUT_S)
            self._writing.cancel()

    # --- stacks --------------------------------------------------------------------------------------

    async def _record_evidence(self, cycle: LocalCycle, rank: int) -> None:
        pid = cycle.monitors.pid_of(rank)
        if pid is None:
            return
        began = time.monotonic_ns()
        reading = cycle.monitors.read(rank)
        examining = asyncio.get_running_loop().run_in_executor(
            None, examine, pid, stacks_path(cycle.page_paths[rank]), self._py_spy, _EVIDENCE_S
        )
        try:
            found = await asyncio.wait_for(examining, _EVIDENCE_S + _EVIDENCE_GRACE_S)
        except asyncio.TimeoutError:
            return
        self._say(
            msg.HangEvidence(
                cycle=cycle.cycle,
                rank=rank,
                pid=pid,
                heartbeats=reading.heartbeats,
                silent_s=(began - reading.last_sign_ns) / 1e9,
                sections={
                    cycle.monitors.sections[section.slot]: (began - section.opened_ns) / 1e9
                    for section in reading.sections
                },
                process_state=found.process_state,
                wchan=found.wchan,
                kernel_stack=found.kernel_stack,
                source=found.source,
                stacks=found.stacks,
                note=found.note,
                seconds=(time.monotonic_ns() - began) / 1e9,
            )
        )
