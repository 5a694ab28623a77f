"""How a rank comes to its part: from its own place, or from whoever has a good copy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvrx_slurm.checkpointing.local.completeness import Save, ids_of
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, NoReplicasAvailableError
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part
from nvrx_slurm.checkpointing.local.replication.exchange import all_ranks
from nvrx_slurm.checkpointing.local.replication.plan import missing_text
from nvrx_slurm.checkpointing.storage import CorruptCheckpointError

if TYPE_CHECKING:
    from nvrx_slurm.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager
    from nvrx_slurm.checkpointing.local.replication.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)


def retrieve(manager: BaseCheckpointManager, save: Save, ckpt_id: CkptID) -> Part:
    """Return this rank's part of ``save``. All ranks call this.

    Raises:
        NoReplicasAvailableError: no rank has a good copy of some part; on all ranks.
        CheckpointingException: a part can't be read and there are no copies; on all ranks.
        ExchangeError: a rank did not take part in time.
    """
    if manager.repl_strategy is None:
        return _read_own(manager, save, ckpt_id)
    return _fetch(manager, manager.repl_strategy, save, ckpt_id)


def _read_own(manager: BaseCheckpointManager, save: Save, ckpt_id: CkptID) -> Part:
    part, error = None, ""
    try:
        part = manager._load(ckpt_id, save.save_id)
    except (CorruptCheckpointError, CheckpointingException, OSError) as failed:
        error = str(failed)
    errors = {r: each for r, each in enumerate(all_ranks(manager._timeout).gather(error)) if each}
    if errors or part is None:
        lost = [CkptID(save.iteration, rank, manager.session_id) for rank in errors]
        details = "; ".join(f"rank {rank}: {each}" for rank, each in errors.items())
        raise NoReplicasAvailableError(f"{missing_text(lost)} ({details})")
    return part


def _fetch(
    manager: BaseCheckpointManager, strategy: ReplicationStrategy, save: Save, ckpt_id: CkptID
) -> Part:
    available = ids_of(save, manager._holdings)
    while True:
        # Raises once the last good copy of a part is gone, so this ends: each round takes copies away.
        plan = strategy.retrieve_plan(available, [ckpt_id])
        parts, bad = {}, []
        for id_ in plan.required_ids():
            try:
                parts[id_] = manager._load(id_, save.save_id)
            except (CorruptCheckpointError, CheckpointingException, OSError) as failed:
                _log.warning("a copy is passed over: %s", failed)
                bad.append((manager.rank, id_))
        if _take_away(manager, available, bad):
            continue
        retrieved = strategy.retrieve_parts(plan, parts, manager._pool)
        arrived_bad = [(sender, id_) for id_, sender in retrieved.damaged.items()]
        if _take_away(manager, available, arrived_bad):
            continue
        part = retrieved.parts[ckpt_id]
        if any(e.receiver == manager.rank != e.sender for e in plan.entries):
            _keep(manager, part)
        return part


def _take_away(
    manager: BaseCheckpointManager,
    available: dict[int, set[CkptID]],
    bad: list[tuple[int, CkptID]],
) -> bool:
    """Have all ranks leave out the copies that any of them has found bad; whether there are some."""
    everybody = [found for each in all_ranks(manager._timeout).gather(bad) for found in each]
    for holder, id_ in everybody:
        available[holder].discard(id_)
    return bool(everybody)


def _keep(manager: BaseCheckpointManager, part: Part) -> None:
    """Have a copy here again: the next fault may come before the next save."""
    try:
        manager._save(part, part.id)
    except (CheckpointingException, OSError) as error:
        _log.warning("the part from another rank is used, but not kept here: %s", error)
