"""How a rank comes to its part: from its own place, or from whoever has a good copy."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.completeness import Save, ids_of
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, NoReplicasAvailableError
from nvrx_slurm.checkpointing.local.ids import CkptID
from nvrx_slurm.checkpointing.local.part import Part, contents_of
from nvrx_slurm.checkpointing.local.replication.exchange import all_ranks
from nvrx_slurm.checkpointing.local.replication.plan import missing_text
from nvrx_slurm.checkpointing.local.resharding import Assembly
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
    part, is_foreign = _fetch(manager, manager.repl_strategy, save, ckpt_id)
    if is_foreign:
        _keep(manager, part)
    return part


def reshard(
    manager: BaseCheckpointManager, save: Save, like: BasicTensorAwareStateDict
) -> BasicTensorAwareStateDict:
    """Return this rank's state out of all parts of ``save``, one after the other. All ranks call this.

    Raises:
        NoReplicasAvailableError: no rank has a good copy of some part; on all ranks.
        CheckpointingException: it can't be sharded anew; on all ranks.
        ExchangeError: a rank did not take part in time.
    """
    if manager.repl_strategy is None:
        raise CheckpointingException("Without a replication strategy a rank has its own part only.")
    assembly, state, cause = Assembly(like), None, None
    for owner in range(save.world_size):
        part, _ = _fetch(manager, manager.repl_strategy, save, save.part(owner, manager.session_id))
        try:
            if cause is None:
                assembly.add(*contents_of(part))
        except CheckpointingException as failed:  # and go on: the others fetch the rest
            cause = failed
        manager._pool.give(part.buffer)
    try:
        state = assembly.result() if cause is None else None
    except CheckpointingException as failed:
        cause = failed
    everybody = all_ranks(manager._timeout).gather(str(cause or ""))
    if error := next(filter(None, everybody), None):
        raise CheckpointingException(
            f"Iteration {save.iteration} of {save.world_size} ranks can't be loaded by "
            f"{manager.world_size}: {error}"
        ) from cause
    assert state is not None
    return state


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
) -> tuple[Part, bool]:
    """Return a part, and whether it comes from another rank."""
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
        is_foreign = any(e.receiver == manager.rank != e.sender for e in plan.entries)
        return retrieved.parts[ckpt_id], is_foreign


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
