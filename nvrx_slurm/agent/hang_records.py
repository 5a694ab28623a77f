"""What is kept of a hang before anything is killed: the culprits' stacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from nvrx_slurm.agent.evidence import examine
from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.stacks import stacks_path

_EVIDENCE_S = 0.8
_EVIDENCE_GRACE_S = 0.15
"""Together below the second by which the search may delay the restart."""


class HangRecords:
    """Finds out in bounded time; whatever can't be found out is left out."""

    def __init__(self, py_spy: str | None, say: Callable[[msg.AgentMessage], None]) -> None:
        self._py_spy = py_spy
        self._say = say

    async def keep_stacks(self, cycle: LocalCycle, hung: Sequence[int]) -> None:
        """Tell the Coordinator what the ranks hang in."""
        await asyncio.gather(*(self._record_evidence(cycle, rank) for rank in hung))

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
