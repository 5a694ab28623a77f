"""What an agent is told about how to treat its node, the same in every cycle."""

from __future__ import annotations

import msgspec

from nvrx_slurm.wire.checkpoint_writer import DEFAULT_GRACE_S

MOST_COUNT = 2**31 - 1
"""Of whatever a user counts: messages and the journal carry 64 bits."""


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults are those of the command line."""

    preload: list[str] = []
    """Modules that the worker server imports after torch."""
    install_exception_hook: bool = False
    """End a rank at once after the traceback of an exception that nobody caught."""
    gpu_memory_reclaim_timeout_s: float = 50.0
    """How long at most a stop waits for the memory of this job's GPUs; 0: it does not."""
    gpu_memory_tolerance_mb: float = 512.0
    """A GPU of which no more is used (MiB) is free."""
    checkpoint_write_timeout_s: float = DEFAULT_GRACE_S
    """How long at most a stop waits for checkpoints that are copied and being written; 0: it does not."""
    numa_bind: bool = False
    """Bind each rank to the NUMA node of its GPU."""
    numa_bind_strict: bool = True
    """Its memory to this node, too, not only its CPUs."""
    health: bool = True
    """Look at the node's health: before its first cycle, between cycles and beside training."""
    health_config: str = ""
    """A file on the node; empty: ``/etc/nvrx/health.yaml``, if it is there."""
