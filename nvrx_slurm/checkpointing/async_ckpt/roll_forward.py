"""Commit a save that all ranks have written and none has committed: the ranks were killed before."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorStorageMetadata

from nvrx_slurm.checkpointing.async_ckpt import save_names
from nvrx_slurm.checkpointing.async_ckpt.metadata_pickle import unpickle
from nvrx_slurm.checkpointing.storage import manifest
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError
from nvrx_slurm.checkpointing.storage.folders import folder_at
from nvrx_slurm.checkpointing.storage.pending import Note, Plan, SaveId, encode_plan
from nvrx_slurm.checkpointing.storage.torch_internals import require

CURRENT_DCP_VERSION = require("torch.distributed.checkpoint.filesystem", "CURRENT_DCP_VERSION")

_log = logging.getLogger(__name__)


def pieces_of(metadata: Any) -> set[Any]:
    """Return the indices of all that a checkpoint with this metadata consists of."""
    pieces = set()
    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            pieces |= {MetadataIndex(name, chunk.offsets) for chunk in value.chunks}
        else:
            pieces.add(MetadataIndex(name))
    return pieces


def finish_abandoned_save(folder: Path) -> SaveId | None:
    """As :func:`finish_written_save`, but leave the saves of this process's own job to its coordinator."""
    return finish_written_save(folder, but=save_names.is_own)


def finish_written_save(folder: Path, but: Callable[[SaveId], bool] = lambda _: False) -> SaveId | None:
    """Commit the newest save in a directory that is whole and newer than what is committed.

    Any number of processes may do so at a time; a trainer that comes later finds its save committed. What
    can't be committed is left as it is.

    Args:
        but: which saves are not to be committed.

    Returns:
        The save; None: there is none.
    """
    try:
        found = manifest.unfinished(folder)
    except (CorruptCheckpointError, OSError):
        return None  # whoever reads what is committed hears of it
    for plan, notes in found:
        if but(plan.save):
            continue
        try:
            if _are_own_files(folder, plan, notes) and _commit(folder, plan, notes):
                _log.warning("%s: all ranks had written a checkpoint when they ended: committed now", folder)
                return plan.save
        except Exception as error:  # whatever a plan holds, what is committed can be read
            _log.warning("%s: what all ranks had written can't be committed: %s", folder, error)
    return None


def _are_own_files(folder: Path, plan: Plan, notes: dict[str, Note]) -> bool:
    """Whether this user has written them: who has could not read what another one, even root, commits."""
    names = [encode_plan(plan)[0], *notes]
    return {(folder / name).stat().st_uid for name in names} == {os.geteuid()}


def _commit(folder: Path, plan: Plan, notes: dict[str, Note]) -> bool:
    metadata = unpickle(folder / "its plan", io.BytesIO(plan.metadata))
    places: dict[Any, Any] = {}
    for name, note in notes.items():
        there = dict(unpickle(folder / name, io.BytesIO(note.places)))
        if any(place.relative_path != name for place in there.values()):
            raise CorruptCheckpointError(folder / name, "it names pieces in other files")
        places.update(there)
    if not pieces_of(metadata) <= places.keys():
        return False
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = places
    metadata.storage_meta = StorageMeta(str(folder))
    marks = manifest.marks_of(folder_at(folder), notes)
    manifest.commit(folder, pickle.dumps(metadata), marks, plan.save, plan.sequence)
    return True
