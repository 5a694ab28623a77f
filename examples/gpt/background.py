"""Checkpoints that are written while training goes on: `--ckpt async`.

The copy is made during the next forward and backward pass; the optimizer's next step waits for it by itself.
Files are whole or absent as those of `checkpoints` are, and each tensor has a checksum.
"""

from collections import deque
from pathlib import Path
from typing import Any

from nvrx_slurm.checkpointing import storage
from nvrx_slurm.checkpointing.async_ckpt.core import AsyncSaveError
from nvrx_slurm.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

KEPT = 2
PATTERN = "async_step_*.pt"


def path_of(folder: Path, step: int) -> Path:
    return folder / f"async_step_{step:08d}.pt"


def load(path: Path) -> dict[str, Any]:
    """Read one checkpoint into CPU memory; `CorruptCheckpointError` unless it is exactly what was saved."""
    return storage.load(path, map_location="cpu")


def load_newest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """The newest readable checkpoint and its step; says which newer ones it had to skip."""
    for path in sorted(folder.glob(PATTERN), reverse=True):
        try:
            return int(path.stem.rpartition("_")[2]), load(path)
        except storage.CorruptCheckpointError as why:
            print(f"skipping checkpoint {why}", flush=True)
    return None


remove_leftovers = storage.remove_leftovers


class Saver:
    """For the one rank that writes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpoint = TorchAsyncCheckpoint()
        self._begun: deque[int] = deque()

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._checkpoint.async_save(state, path_of(self._folder, step))
        self._begun.append(step)

    def committed(self, *, wait: bool) -> list[int]:
        """The steps whose checkpoints are on disk since the last call, all of them with `wait`."""
        queue = self._checkpoint._get_async_calls_queue()
        steps = []
        while self._begun:
            try:
                self._checkpoint.finalize_async_save(blocking=wait)
            except AsyncSaveError as why:  # the next checkpoint may work again
                print(f"checkpoint of step {self._begun.popleft()}: {why}", flush=True)
                continue
            while len(self._begun) > queue.get_num_unfinalized_calls():
                steps.append(self._begun.popleft())
            break
        if steps:
            for old in sorted(self._folder.glob(PATTERN))[:-KEPT]:
                old.unlink(missing_ok=True)
        return steps

    def close(self) -> None:
        self._checkpoint.close()
