"""The GPUs of this job on this node, and none of somebody else's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

NO_DEVICES = ("", "-1", "NoDevFiles")
"""What stands for no GPU in ``CUDA_VISIBLE_DEVICES``; the last is Slurm's."""


class Gpu(Protocol):
    """One GPU, or one MIG instance."""

    @property
    def name(self) -> str:
        """Its UUID."""

    @property
    def pci_address(self) -> str:
        """As sysfs writes it, ``0000:3b:00.0``; empty: not known."""

    def used_mb(self) -> float:
        """Return the memory in use, MiB.

        Raises:
            GpuError: the driver can't tell.
        """

    def processes(self) -> Mapping[int, float]:
        """Return the processes that compute on it, and what each uses, MiB (0: not known).

        Raises:
            GpuError: the driver can't tell.
        """


class GpuError(Exception):
    """The driver refused, or is not there."""


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return what names this job's GPUs, in the order in which ranks count them; None: all there are.

    ``CUDA_VISIBLE_DEVICES`` as CUDA reads it: indices, or UUIDs of GPUs or MIG instances. Slurm sets it from
    the GRES of the step; where it is told not to, ``SLURM_STEP_GPUS`` or ``SLURM_JOB_GPUS`` says the same. A
    job of Slurm without any of them has no GPU.
    """
    for variable in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"):
        listed = environ.get(variable)
        if listed is not None:
            devices = [device.strip() for device in listed.split(",")]
            # CUDA takes what stands before the first that is none.
            ends = next((i for i, device in enumerate(devices) if device in NO_DEVICES), len(devices))
            return devices[:ends]
    return [] if "SLURM_JOB_ID" in environ else None
