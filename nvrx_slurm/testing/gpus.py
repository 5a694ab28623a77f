"""A GPU that is a few Python objects."""

from __future__ import annotations

from collections.abc import Mapping

from nvrx_slurm.agent.gpus import GpuError


class FakeGpu:
    """A :class:`~nvrx_slurm.agent.gpus.Gpu` over values that a test sets; counts what it was asked."""

    def __init__(self, name: str = "GPU-0", pci_address: str = "", holders: Mapping[int, float] = {}) -> None:
        self.name = name
        self.pci_address = pci_address
        self.holders = dict(holders)
        """What each process holds, MiB."""
        self.unaccounted_mb = 0.0
        """Held by nobody in the list."""
        self.memory_queries = 0
        self.process_queries = 0
        self.broken = False
        self.hides_processes = False

    def used_mb(self) -> float:
        self.memory_queries += 1
        if self.broken:
            raise GpuError("GPU is lost")
        return self.unaccounted_mb + sum(self.holders.values())

    def processes(self) -> Mapping[int, float]:
        self.process_queries += 1
        if self.broken or self.hides_processes:
            raise GpuError("not supported")
        return dict(self.holders)
