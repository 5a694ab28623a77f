"""What a node had when it was known to be good; later runs compare with it."""

from __future__ import annotations

import msgspec

from nvrx_slurm.health.state import StateDir

_NAME = "baseline"


class PortBaseline(msgspec.Struct, frozen=True):
    """One port of a network adapter."""

    state: str
    """As in sysfs, without the number: ``ACTIVE``."""
    rate_gbps: float | None
    counters: dict[str, int]


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """Counters start anew with a boot; what was there does not."""

    boot_id: str
    taken: float
    """Unix seconds."""
    kernel_log_sequence: int | None = None
    """The last record of the kernel log then: what came before has been dealt with."""
    gpus: list[str] | None = None
    """UUIDs; None: NVML did not answer."""
    uncorrected_ecc: dict[str, int] = {}
    """By UUID."""
    gpu_memory_used: dict[str, int] = {}
    """Bytes, by UUID, with no process on the GPU."""
    nvlinks: dict[str, list[int]] = {}
    """Active links by UUID."""
    ports: dict[str, PortBaseline] = {}
    """By ``device/port``."""

    @staticmethod
    def load(state: StateDir) -> Baseline | None:
        """Return the last one; None if there is none that can be understood."""
        return state.load(_NAME, Baseline)

    def save(self, state: StateDir) -> None:
        """Replace the last one.

        Raises:
            UnavailableError: the state directory can't be written.
        """
        state.save(_NAME, self)
