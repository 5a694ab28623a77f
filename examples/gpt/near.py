"""Checkpoints in the nodes' memory, with copies on other nodes; for --ckpt ladder on shared disk, too."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvrx_slurm.checkpointing.local.ladder import CheckpointLadder, Layer
from nvrx_slurm.checkpointing.local.replication.strategies import LazyCliqueReplicationStrategy

SHARED_EVERY = 5  # local checkpoints to one on shared disk


class NearCheckpoints:
    """All ranks call the same methods. Each saves its own state."""

    def __init__(self, local_dir: str | None, shared_dir: Path | None, every: int, journal: Any) -> None:
        if not local_dir:
            sys.exit("--local-dir is needed outside nvrx-srun: a folder on the node itself")
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        # Two copies of everything. An odd node would have no partner.
        copies = None if nodes % 2 else LazyCliqueReplicationStrategy(replication_factor=2)
        local = LocalCheckpointManager(local_dir, "train_gpt", copies, keep=2)
        layers = [Layer("local", local, every, required=shared_dir is None)]
        if shared_dir is not None:
            layers.append(Layer("shared", LocalCheckpointManager(shared_dir, keep=2), SHARED_EVERY * every))
        self._ladder = CheckpointLadder(layers, journal=journal)

    def load(self) -> dict[str, Any] | None:
        loaded = self._ladder.load()
        return loaded.state.state_dict if loaded else None

    def save(self, step: int, state: Callable[[], dict[str, Any]], *, last: bool) -> None:
        """Save where it is due, and everywhere if it is the last time."""
        save = self._ladder.save if last else self._ladder.save_if_due
        save(step, lambda: BasicTensorAwareStateDict(state()))
