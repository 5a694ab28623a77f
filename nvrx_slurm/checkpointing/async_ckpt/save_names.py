"""Names of saves, the same on all ranks without asking each time; and which are of this job."""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from nvrx_slurm.checkpointing.storage.pending import SaveId


class _Alone:
    """Stands for the group of a process that has none."""


_sessions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By process group; all of its ranks plan the same saves in the same order."""
_numbers: dict[str, Iterator[int]] = {}


def next_save(group: Any) -> SaveId:
    """Return a name for the next save of a group; its ranks agree on a part of it the first time.

    Args:
        group: torch's ``_DistWrapper`` of it.
    """
    key = (group.group or dist.group.WORLD) if group.use_dist else _Alone
    if key not in _sessions:
        token = group.broadcast_object(secrets.token_hex(8) if group.is_coordinator else None)
        _sessions[key] = token
        _numbers[token] = itertools.count(1)
    session = _sessions[key]
    return SaveId(session, next(_numbers[session]))


def is_own(save: SaveId) -> bool:
    """Whether a save is of a process group of this process that still is: its coordinator commits it."""
    return any(session == save.session and _is_there(key) for key, session in list(_sessions.items()))


def _is_there(key: Any) -> bool:
    if key is _Alone:
        return True
    try:
        return bool(dist.get_process_group_ranks(key))
    except (KeyError, ValueError):  # destroyed, for a restart within the process
        return False
