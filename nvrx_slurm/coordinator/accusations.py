"""Telling Slurm which nodes this job holds to be the cause of its faults, in the job's own Comment.

The epilog on such a node looks closer then, and root drains it for what it finds itself; see
:mod:`nvrx_slurm.slurm.accusation`. Nothing waits for this, and nothing depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm import journal
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import SlurmClient, SlurmRefusedError, SlurmUnavailableError, UnknownJobError
from nvrx_slurm.slurm.accusation import Accusation, with_accusation

_TROUBLE = (SlurmRefusedError, SlurmUnavailableError, UnknownJobError, ValueError)
"""ValueError: the Comment is no text."""


class Accusations:
    """The accusations of one run of a job. Needs a running event loop.

    Args:
        run: how often the job was requeued before.
        say: tells the person who watches the job.
    """

    def __init__(self, slurm: SlurmClient, job_id: str, run: int, say: Callable[[str], None]) -> None:
        self._slurm = slurm
        self._job_id = job_id
        self._run = run
        self._say = say
        self._bad: dict[str, str] = {}
        self._told: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()
        self._complained = False

    def note(self, event: AnyEvent) -> bool:
        """Take from what happens who is to be accused; tell whether Slurm should hear of it."""
        match event:
            case journal.NodeExcluded():
                self._bad[event.node] = event.reason
            case journal.NodeSuspected():
                self._bad.setdefault(event.node, f"{event.faults} faults of its own")
            case journal.NodeLost():
                self._bad.setdefault(event.node, f"lost: {event.why}")
            case _:
                return False
        return self._bad != self._told

    def acquit(self, node: str) -> None:
        """Note that it is no fault of ``node`` that it went."""
        self._bad.pop(node, None)

    async def publish(self) -> None:
        """Write them into the Comment, beside what others keep there."""
        async with self._one_at_a_time:
            bad = dict(self._bad)
            if bad == self._told:
                return
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._write, bad)
                self._told = bad
            except _TROUBLE as error:
                if not self._complained:
                    self._complained = True
                    self._say(f"WARNING: the job's Comment cannot tell of {' '.join(bad)}: {error}")

    def _write(self, bad: dict[str, str]) -> None:
        before = self._slurm.comment(self._job_id)
        after = with_accusation(before, Accusation(self._run, bad))
        if after != before:
            self._slurm.update_job(self._job_id, Comment=after)
