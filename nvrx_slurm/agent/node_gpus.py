"""This job's GPUs on this node: opened in a thread, to bind ranks and to wait for their memory."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from nvrx_slurm.agent.gpu_memory import GpuMemory
from nvrx_slurm.agent.gpus import Gpu, GpuError, visible_devices
from nvrx_slurm.agent.numa import NumaError, gpus_per_node, node_of_device, plan_bindings, usable_nodes
from nvrx_slurm.agent.nvml import open_gpus
from nvrx_slurm.agent.server_protocol import NumaBinding
from nvrx_slurm.wire.messages import GpuMemoryLeft
from nvrx_slurm.wire.node_options import NodeOptions

_log = logging.getLogger(__name__)

OpenGpus = Callable[[Sequence[str] | None], list[Gpu]]


class NodeGpus:
    """Asks the driver once at the start, then after each cycle for the memory in use; never without GPUs."""

    def __init__(
        self,
        environ: Mapping[str, str],
        options: NodeOptions,
        slots: int,
        *,
        open_gpus: OpenGpus = open_gpus,
        sysfs: Path = Path("/sys"),
    ) -> None:
        """Needs a running event loop."""
        self._options = options
        self._slots = slots
        self._sysfs = sysfs
        self._open_gpus = open_gpus
        self._given_up = threading.Event()
        self._memory: GpuMemory | None = None
        self._problem = ""
        self._bindings: list[NumaBinding | None] = [None] * slots
        devices = visible_devices(environ)
        try:
            self._per_node = gpus_per_node(environ)
        except NumaError as error:
            self._per_node, self._problem = None, str(error)
        self._binds = options.numa_bind or self._per_node is not None
        wanted = options.gpu_memory_reclaim_timeout_s > 0 or (self._binds and self._per_node is None)
        self._opening: asyncio.Future[None] | None = None
        if devices != [] and wanted:
            self._opening = asyncio.get_running_loop().run_in_executor(None, self._open, devices)
        elif self._binds:
            self._bind([])

    def _open(self, devices: Sequence[str] | None) -> None:
        gpus: list[Gpu] = []
        try:
            gpus = self._open_gpus(devices)
        except GpuError as error:
            if devices:
                _log.warning("GPUs of this job cannot be asked for their memory or place: %s", error)
        if gpus:
            self._memory = GpuMemory(gpus, self._options.gpu_memory_tolerance_mb)
        if self._binds:
            self._bind(gpus)

    def _bind(self, gpus: Sequence[Gpu]) -> None:
        self._bindings = plan_bindings(
            self._slots,
            usable_nodes(self._sysfs, frozenset(os.sched_getaffinity(0))),
            [node_of_device(self._sysfs, gpu.pci_address) for gpu in gpus],
            self._per_node,
            self._options.numa_bind_strict,
        )
        unbound = [local_rank for local_rank, binding in enumerate(self._bindings) if binding is None]
        if unbound:
            ranks = " ".join(map(str, unbound))
            _log.warning(
                "local ranks %s are not bound: this node does not say where, or allows no CPU there", ranks
            )

    async def opened(self) -> None:
        """Wait until the driver has answered, which takes seconds where it has to be loaded first."""
        if self._opening is not None:
            await asyncio.wait({self._opening})

    async def bindings(self) -> list[NumaBinding | None]:
        """Return where each local rank is bound.

        Raises:
            OSError: the environment asks for what can't be.
        """
        if self._binds:
            await self.opened()
        if self._problem:
            raise OSError(self._problem)
        return self._bindings

    async def reclaim(self, ours: Collection[int]) -> list[GpuMemoryLeft]:
        """Wait until the memory that ``ours`` held is free; return the GPUs where it is not in the end."""
        memory, timeout_s = self._memory, self._options.gpu_memory_reclaim_timeout_s
        if memory is None or timeout_s <= 0:
            return []
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, memory.wait, ours, timeout_s, self._given_up)

    def close(self) -> None:
        """End a wait that goes on."""
        self._given_up.set()
