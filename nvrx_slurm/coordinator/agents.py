"""The ``srun`` steps that carry a job's agents: one for all at first, one for each node that comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.agents_step import AgentsStep
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.returns import Returns
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.wire import rpc

SRUN_GRACE_S = 2.0
"""For an srun to end by itself when its agents have."""


class Agents:
    """All agents of one job that are started here. Needs a running event loop.

    Args:
        coordinator: where and who the Coordinator is, for the agents' environment.
        feed: takes the machine's events.
        say: tells the person who watches the job.
    """

    def __init__(
        self,
        spec: JobSpec,
        coordinator: dict[str, str],
        feed: Callable[[steps.Event], None],
        tasks: Tasks,
        say: Callable[[str], None],
    ) -> None:
        self._spec = spec
        self._environ = {**spec.step_environ, **coordinator}
        self._feed = feed
        self._tasks = tasks
        self._say = say
        self._step = AgentsStep(spec.step_argv, self._environ, say)
        self._returns = self._new_returns()

    async def start(self) -> None:
        """Start the step of all, if there is one: otherwise they come by themselves."""
        if not self._spec.step_argv:
            return
        try:
            await self._step.start()
        except OSError as error:
            self._feed(steps.StepEnded(f"srun cannot be started: {error}"))
            return
        if self._spec.succession is None:
            # Otherwise it holds this host's agent alone: the others come by themselves.
            self._tasks.spawn(self._watch())

    def joined(self, node: str, address: str) -> None:
        """Note that an agent has come, whose connection is from ``address`` in gRPC's notation."""
        if self._returns is not None:
            self._returns.joined(node, address)

    def recall(self, node: str) -> None:
        """Bring a lost node back."""
        if self._returns is not None:
            self._returns.recall(node)

    def kill(self) -> None:
        """End the step of all at once."""
        self._step.kill()

    async def end(self, grace_s: float) -> None:
        """Try to bring no node back any more, and end every step; that of all has ``grace_s`` seconds."""
        closing = [] if self._returns is None else [self._returns.close(SRUN_GRACE_S)]
        await asyncio.gather(self._step.end(grace_s), *closing)

    async def leave(self) -> None:
        """Start no more agents; those that have come stay."""
        if self._returns is not None:
            await self._returns.stop_trying()

    async def _watch(self) -> None:
        self._feed(steps.StepEnded(await self._step.wait()))

    def _new_returns(self) -> Returns | None:
        spec, rejoin_argv = self._spec, self._spec.rejoin_argv
        if rejoin_argv is None or spec.slurm is None:
            return None

        def new_step(node: str) -> AgentsStep:
            self._say(f"starting a new agent on {node}")
            return AgentsStep(rejoin_argv(node), self._environ, self._say)

        def stays_away(node: str, why: str) -> None:
            self._feed(steps.NodeStaysAway(node, why))

        return Returns(new_step, spec.slurm, spec.job_id, stays_away)


def where_to_find(spec: JobSpec, port: int, token: str) -> dict[str, str]:
    """Return the part of an agent's environment that leads it to the Coordinator."""
    host = f"[{spec.address}]" if ":" in spec.address else spec.address
    return {
        rpc.COORDINATOR_VARIABLE: f"{host}:{port}",
        rpc.TOKEN_VARIABLE: token,
        rpc.FENCE_VARIABLE: spec.fence,
        "NVRX_RUN_DIR": str(spec.run_dir.path),
    }
