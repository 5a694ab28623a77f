"""Unpickle the metadata of a checkpoint: nothing in it is executed."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError

_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_PLAIN = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
}


class StandIn:
    """In place of an object of a class that is not known here: does nothing, and has what the object had."""

    def __new__(cls, *_arguments: object, **_keywords: object) -> StandIn:
        return super().__new__(cls)

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of metadata, and no functions that a hostile pickle could call."""

    def __init__(self, file: Any, *, stand_ins: bool) -> None:
        super().__init__(file)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return super().find_class(module, name)
        if module in _MODULES and "." not in name:  # a dot would lead through what the module has imported
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        found = _of_the_program(module, name)
        if found is not None:
            return found
        if self._stand_ins:
            return StandIn
        raise pickle.UnpicklingError(
            f"{module}.{name} has no place in a checkpoint's metadata; name it by "
            "torch.serialization.add_safe_globals if you trust it, and import it before"
        )


def _of_the_program(module: str, name: str) -> Any:
    """Return a class of a planner of the user's: derived from torch's for metadata, or said to be safe."""
    found = getattr(sys.modules.get(module), name, None)  # nothing is imported because a file says so
    if isinstance(found, type) and issubclass(found, (Metadata, SavePlan)) and found.__module__ == module:
        return found
    for each in torch.serialization.get_safe_globals():
        known, as_name = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        if as_name == f"{module}.{name}":
            return known
    return None


def unpickle(path: Path | str, file: Any, *, stand_ins: bool = False) -> Any:
    """Return what is in an open file.

    Args:
        path: what it is, for the error.
        stand_ins: take a :class:`StandIn` for what is of classes that are not known, to look at the rest.

    Raises:
        CorruptCheckpointError: it can't be unpickled, or names what has no place in metadata.
    """
    try:
        return _MetadataUnpickler(file, stand_ins=stand_ins).load()
    except Exception as error:  # whatever a damaged pickle runs into
        raise CorruptCheckpointError(path, f"it can't be read: {error or 'it is cut off'}") from None
