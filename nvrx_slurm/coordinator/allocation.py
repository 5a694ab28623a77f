"""The job as Slurm has it: what Slurm says of it, and having Slurm start it again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.job_end import nodes_to_exclude, start_again
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.time_limit import watch_time_limit
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import Job, SlurmUnavailableError, UnknownJobError


class Allocation:
    """One job's, and which of its nodes it should not get again.

    Args:
        say: tells the person who watches the job.
    """

    def __init__(self, spec: JobSpec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say
        self._lost = set(spec.succession.gone if spec.succession else ())
        self._excluded: set[str] = set()

    def note(self, event: AnyEvent) -> None:
        """Take from what happens which nodes are bad."""
        match event:
            case journal.NodeLost():
                self._lost.add(event.node)
            case journal.NodeExcluded(on_trial=False):
                self._excluded.add(event.node)
            case journal.NodeJoined():
                self._lost.discard(event.node)
            case _:
                pass

    def acquit(self, node: str) -> None:
        """Note that it is no fault of ``node`` that it went."""
        self._lost.discard(node)

    async def consult(self) -> steps.SlurmAnswered:
        """Return what Slurm says of the job."""
        try:
            job = await self._ask()
            return steps.SlurmAnswered(job.state, job.preempted)
        except SlurmUnavailableError:
            return steps.SlurmAnswered(None)
        except UnknownJobError:
            return steps.SlurmAnswered("gone")

    async def watch_time_limit(self, near: Callable[[str], None]) -> None:
        """Call ``near`` with the words for it when the job's time is almost over."""
        await watch_time_limit(self._spec.ends, self._spec.time_limit_margin_s, self._ask, near)

    def requeue(self, proven_bad: Collection[str], held: str = "") -> AnyEvent:
        """Have Slurm start the job again without the bad nodes; return what to record. It ends us then.

        Args:
            held: why Slurm is to hold it until somebody releases it; empty: it starts by itself.
        """
        spec = self._spec
        if spec.slurm is None:
            return journal.NotRequeued(
                why=f"{spec.command} starts no job again: whoever started this one can do so"
            )
        excluded = self._excluded | set(proven_bad)
        without = nodes_to_exclude(excluded, self._lost, spec.policy.nodes, spec.host, self._say)
        return start_again(spec.slurm, spec.job_id, without, held=held)

    async def _ask(self) -> Job:
        if self._spec.slurm is None:
            raise SlurmUnavailableError("there is no Slurm")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._spec.slurm.job, self._spec.job_id)
