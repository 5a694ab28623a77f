"""Low-level pieces: files that are whole or absent, checksums in them, their verification.

``save`` and ``load`` need torch, everything else starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvrx_slurm.checkpointing.storage.checksums import Verification, checksum, verify_file
from nvrx_slurm.checkpointing.storage.durable import (
    leftovers,
    make_directory,
    remove_leftovers,
    replacing,
    sync_directory,
    write_bytes,
)
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from nvrx_slurm.checkpointing.storage.torch_file import load, save

__all__ = [
    "CorruptCheckpointError",
    "Verification",
    "checksum",
    "leftovers",
    "load",
    "make_directory",
    "remove_leftovers",
    "replacing",
    "save",
    "sync_directory",
    "verify_file",
    "write_bytes",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from nvrx_slurm.checkpointing.storage import torch_file

        return getattr(torch_file, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
