"""What goes wrong with local checkpoints."""

from __future__ import annotations


class CheckpointingException(Exception):
    """A local checkpoint can't be saved, found or loaded."""


class SameMachineReplicationException(CheckpointingException):
    """Two running writers want to write the same part in the same directory."""

    def __init__(self, ckpt_id: object) -> None:
        super().__init__(f"Checkpoint '{ckpt_id}' already exists on the same machine.")


class NoReplicasAvailableError(CheckpointingException):
    """No rank holds a good copy of a part that is needed."""


class ExchangeError(CheckpointingException):
    """Not all ranks took part in an exchange within its time-out, or one of them left it."""
