"""What an agent knows of the processes that write checkpoints: stopping ranks loses no finished copy."""

from __future__ import annotations

MODULE = "nvrx_slurm.checkpointing.async_ckpt.worker"
"""Runs in an interpreter of its own; its command line names it from the first instant."""

GRACE_VARIABLE = "NVRX_CHECKPOINT_WRITE_TIMEOUT"
"""Seconds for which a writer may go on once its rank has gone."""

DEFAULT_GRACE_S = 10.0
