"""What can be wrong with a checkpoint on disk."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.checkpointing.storage.objects import is_url


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is not what was written: torn, truncated, or with other bits in it."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path if is_url(path) else Path(path)
        self.why = why

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.why)
