"""An NVLink fabric that is a few Python objects."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.agent.location import DomainError, GpuFabric


class FakeFabric:
    """A :class:`~nvrx_slurm.agent.location.Fabric` with the GPUs of a test; without any there is no NVML."""

    def __init__(self, *gpus: GpuFabric) -> None:
        self._gpus = gpus

    def gpus(self) -> Sequence[GpuFabric]:
        if not self._gpus:
            raise DomainError("NVML: Driver Not Loaded")
        return self._gpus
