"""What all ranks do together to save and to load, wherever parts are kept."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch.distributed as dist

from nvrx_slurm.checkpointing.local import completeness
from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict, trust
from nvrx_slurm.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from nvrx_slurm.checkpointing.local.buffers import BufferPool, SharedBuffer
from nvrx_slurm.checkpointing.local.ckpt_managers.retrieval import reshard, retrieve
from nvrx_slurm.checkpointing.local.completeness import Holdings, Save, saves_by_completeness
from nvrx_slurm.checkpointing.local.errors import (
    CheckpointingException,
    ExchangeError,
    NoReplicasAvailableError,
    SameMachineReplicationException,
)
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart, checked_iteration
from nvrx_slurm.checkpointing.local.in_order import InOrder
from nvrx_slurm.checkpointing.local.part import Part, stage, state_of
from nvrx_slurm.checkpointing.local.replication.exchange import DEFAULT_TIMEOUT, all_ranks
from nvrx_slurm.checkpointing.local.replication.strategies import ReplicationStrategy
from nvrx_slurm.checkpointing.local.space import Room, shortage, total_of
from nvrx_slurm.checkpointing.storage import checksum
from nvrx_slurm.fault_tolerance.checkpoint_reports import job_journal

if TYPE_CHECKING:
    from nvrx_slurm.checkpointing.async_ckpt.request import AsyncRequest

__all__ = ["BaseCheckpointManager", "CheckpointingException", "CkptID", "SameMachineReplicationException"]

_log = logging.getLogger(__name__)


@trust
class _Ready(NamedTuple):
    """What a rank says once it has made its copy."""

    error: str
    digest: str
    size: int
    members: list[int]
    room: Room | None


class BaseCheckpointManager(ABC):
    """Saves and loads local checkpoints; all ranks call the same methods in the same order.

    What one rank fails at, all ranks get as an error. One that does not come, or is gone, is an
    :class:`ExchangeError` on the others after ``timeout``.
    """

    def __init__(
        self,
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep: int = 1,
        timeout: timedelta = DEFAULT_TIMEOUT,
        layer: str = "local",
    ) -> None:
        """
        Args:
            session_id: tells apart jobs that share a place.
            repl_strategy: None: a rank keeps its own parts only.
            keep: iterations that stay when a new one is whole, itself included.
            timeout: for each exchange between ranks.
            layer: what the job's journal calls these checkpoints; empty: it is not told of them.

        Raises:
            ValueError: ``keep`` is below 1.
            TypeError: ``timeout`` is no timedelta.
        """
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep={keep!r}: a number from 1 is accepted")
        if not isinstance(timeout, timedelta):
            raise TypeError(f"timeout={timeout!r}: a datetime.timedelta is accepted")
        self.session_id = session_id
        self.repl_strategy = repl_strategy
        self.latest_iteration = -1
        """What ``find_latest`` has found; -1: it looks (again)."""
        self.globally_available_ids: dict[int, list[CkptID]] = {}
        """By rank, what it held when ``find_latest`` looked."""
        self.layer = layer
        self._keep = keep
        self._timeout = timeout
        self._sound = -1
        """The last iteration of which all copies were made: it stays until there is another such."""
        self._begun = -1
        """The newest iteration that this manager has begun to save."""
        self._pool = BufferPool()
        self._exchanges = InOrder("nvrx-ckpt-copies")
        self._holdings: Holdings = {}
        self._found: Save | None = None

    @property
    def rank(self) -> int:
        return int(dist.get_rank()) if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return int(dist.get_world_size()) if dist.is_initialized() else 1

    # --- what a place for parts must be able to do --------------------------------------------------------

    @abstractmethod
    def _held(self) -> list[HeldPart]:
        """Return the parts that are at hand, by their names and headers."""

    @abstractmethod
    def _load(self, ckpt_id: CkptID, save_id: str) -> Part:
        """Return a part that is at hand, verified."""

    @abstractmethod
    def _save(self, part: Part, ckpt_id: CkptID) -> None:
        """Keep a part."""

    @abstractmethod
    def _place_of(self, ckpt_id: CkptID) -> Path:
        """Return the file that keeps a part, for a checkpoint worker to write it."""

    @abstractmethod
    def _room(self) -> Room:
        """Return how much can be kept."""

    @abstractmethod
    def _cleanup(self, iteration: int, but: int = -1) -> None:
        """Remove what is older than ``iteration``, except iteration ``but``."""

    @abstractmethod
    def _cleanup_failed_save(self, iteration: int) -> None:
        """Remove what is of ``iteration``."""

    @abstractmethod
    def _in_background(self, work: Callable[[], None]) -> None:
        """Have something done that nobody waits for."""

    # --- finding and loading ------------------------------------------------------------------------------

    def find_latest(self) -> int:
        """Return the newest iteration of which a part of each rank is somewhere, -1 if there is none.

        One that another number of ranks has saved is not taken. Looks once: what it has found stays until
        the next save, or until ``latest_iteration`` is set to -1.

        Raises:
            CheckpointingException: a rank can't look into its directory; on all ranks.
            ExchangeError: a rank did not take part in time.
        """
        if self.latest_iteration == -1:
            self._look()
            self._found = completeness.find_latest(self._holdings, self.world_size)
            self.latest_iteration = self._found.iteration if self._found else -1
            if self._found is None and self.rank == 0 and (why := self._why_none()):
                _log.warning("no local checkpoint can be loaded: %s", why)
        return self.latest_iteration

    def whole_iterations(self) -> list[int]:
        """Return all iterations that ``find_latest`` would take, the newest first. It looks anew.

        Raises:
            ExchangeError: a rank did not take part in time.
        """
        self.latest_iteration = -1
        self.find_latest()
        return list(dict.fromkeys(save.iteration for save in self._whole()))

    def _whole(self) -> list[Save]:
        whole, _ = saves_by_completeness(self._holdings)
        return [save for save in whole if save.world_size == self.world_size]

    def load(self, iteration: int | None = None) -> tuple[TensorAwareStateDict, CkptID]:
        """Return this rank's state of the iteration that ``find_latest`` has found, and its id.

        A part that this rank lacks, or whose copy here is damaged, comes from a rank with a good copy, and is
        kept. The tensors are on the kind of device that they were on.

        Args:
            iteration: another one of ``whole_iterations``.

        Raises:
            NoReplicasAvailableError: no rank has a good copy of some part; names all of them, on all ranks.
            CheckpointingException: ``find_latest`` was not called, or a part can't be read.
            ExchangeError: a rank did not take part in time.
        """
        save = self._found if self.latest_iteration != -1 else None
        if iteration is not None:
            save = next((each for each in self._whole() if each.iteration == iteration), None)
        if save is None:
            self._refuse_to_load()
        ckpt_id = self._ckpt_id(save.iteration)
        part = retrieve(self, save, ckpt_id)
        state = state_of(part)
        state.restore_tensor_device(non_blocking=False)
        if self.layer and self.rank == 0:
            job_journal().report_checkpoint_loaded(save.iteration, self.layer)
        return state, ckpt_id

    def load_resharded(self, like: BasicTensorAwareStateDict) -> tuple[BasicTensorAwareStateDict, int]:
        """Return this rank's state of the newest whole iteration, and that; however many ranks saved it.

        Every rank goes through all parts, one at a time: for a change of the number of ranks, not for each
        restart. Needs a replication strategy.

        Args:
            like: the same keys as were saved, with DTensors as they are sharded now. What is no DTensor must
                be the same in all parts.

        Raises:
            CheckpointingException: there is none, or its parts don't fit; says what, on all ranks.
            ExchangeError: a rank did not take part in time.
        """
        self._look()
        save = completeness.find_latest(self._holdings, None)
        if save is None:
            self._refuse_to_load()
        return reshard(self, save, like), save.iteration

    def _refuse_to_load(self) -> NoReturn:
        if why := self._why_none():
            raise NoReplicasAvailableError(f"No local checkpoint can be loaded: {why}.")
        raise CheckpointingException("load needs a find_latest before it that has found an iteration.")

    def _why_none(self) -> str:
        """Say what is there that is not enough; nothing where there is nothing."""
        whole, partial = saves_by_completeness(self._holdings)
        reasons = [
            f"iteration {save.iteration} was saved by {save.world_size} ranks, there are {self.world_size}"
            for save in whole
            if save.world_size != self.world_size
        ]
        return "; ".join([*reasons, *map(str, partial)])

    def _look(self) -> None:
        held, cause = [], None
        try:
            held = self._held()
        except Exception as failed:  # whatever it is: the others wait to hear of it
            cause = failed
        if self.repl_strategy is None:
            held = [part for part in held if part.id.rank == self.rank]
        everybody = all_ranks(self._timeout).gather((held, _text_of(cause) if cause else ""))
        if errors := _errors([error for _, error in everybody]):
            raise CheckpointingException(
                f"Local checkpoints can't be looked for: {_reasons(errors)}."
            ) from cause
        self._holdings = {rank: parts for rank, (parts, _) in enumerate(everybody)}
        self.globally_available_ids = {
            rank: [part.id for part in parts] for rank, parts in self._holdings.items()
        }

    def _ckpt_id(self, iteration: int) -> CkptID:
        return CkptID(checked_iteration(iteration), self.rank, self.session_id)

    # --- saving -------------------------------------------------------------------------------------------

    def save(
        self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False
    ) -> AsyncRequest | None:
        """Save the state as it is now; what happens to it later makes no difference.

        Args:
            state_dict: stays as it is.
            iteration: above the one that was loaded.
            is_async: copy the state, agree with the other ranks that all have, and return. A thread gives
                copies to other ranks, and the request that is returned has them written by a worker, once
                ``AsyncCallsQueue.schedule_async_request`` has taken it. It is saved when that is finalized;
                what went wrong with copies or files on any rank is raised there.

        Raises:
            CheckpointingException: on all ranks, if one of them could not copy, if a part could not be
                written anywhere, or if there is too little room. Nothing of this iteration is left then.
            ExchangeError: a rank did not take part in time.
        """
        ckpt_id = self._ckpt_id(iteration)
        if self.latest_iteration >= iteration:
            raise CheckpointingException(
                f"Iteration {iteration} can't be saved: iteration {self.latest_iteration} is there already."
            )
        part = self._agree_on(state_dict, ckpt_id)
        # What is written must be found by a look at the place, and not be what was found before.
        self.latest_iteration, self._found = -1, None
        self._begun = max(self._begun, iteration)
        if is_async:
            return self._request(part, iteration)
        errors: list[str] = []
        parts = self._replicate(part, errors, go_on=False)
        for each in parts:
            try:
                self._save(each, each.id)
            except Exception as failed:  # whatever it is: the others wait to hear of it
                errors.append(_text_of(failed))
        self._pool.give(*(each.buffer for each in parts))
        self._finalize(iteration, errors, in_background=False)
        return None

    def _request(self, part: Part, iteration: int) -> AsyncRequest:
        from nvrx_slurm.checkpointing.async_ckpt.ready_writes import ReadyFile, ReadyWrites
        from nvrx_slurm.checkpointing.async_ckpt.request import AsyncRequest

        errors: list[str] = []

        def ready(each: Part) -> ReadyFile:
            assert isinstance(each.buffer, SharedBuffer), "parts for saves are staged or received in these"
            return ReadyFile(self._place_of(each.id), each.buffer, each.size)

        def files() -> list[ReadyFile]:
            return list(map(ready, self._replicate(part, errors)))

        if self.repl_strategy is None or self.repl_strategy.works_in_background:
            future = self._exchanges.submit(files)
        else:
            future = Future()
            future.set_result(files())
        writes = ReadyWrites(future, self._pool, errors.append)
        return AsyncRequest(writes, (), [partial(self._finalize, iteration, errors, in_background=True)])

    def _agree_on(self, state: TensorAwareStateDict, ckpt_id: CkptID) -> Part:
        """Copy the state; return the copy when all ranks have made theirs."""
        staged, cause, room = None, None, None
        try:
            room = self._room()
            staged = stage(state, ckpt_id, self._pool)
        except Exception as failed:  # whatever it is: the others wait to hear of it
            cause = failed
        size = staged.header.size if staged else 0
        members = self.repl_strategy.members() if self.repl_strategy else [self.rank]
        mine = _Ready(
            _text_of(cause) if cause else "",
            staged.digest if staged else "",
            size,
            members,
            room,
        )
        everybody: list[_Ready] = all_ranks(self._timeout).gather(mine)
        errors = {rank: each.error for rank, each in enumerate(everybody) if each.error}
        if not errors:
            sizes = {rank: each.size for rank, each in enumerate(everybody)}
            rooms = {rank: each.room for rank, each in enumerate(everybody) if each.room}
            needed = {rank: total_of(each.members, sizes) for rank, each in enumerate(everybody)}
            if lack := shortage(rooms, sizes, needed):
                errors = {-1: lack}
        if errors or staged is None:
            if staged:
                self._pool.give(staged.buffer)
            raise CheckpointingException(
                f"Local checkpoint of iteration {ckpt_id.iteration} was not saved: {_reasons(errors)}."
            ) from cause
        digests = "".join(each.digest for each in everybody)
        return staged.seal(self.world_size, f"{checksum(digests.encode()):016x}")

    def _replicate(self, part: Part, errors: list[str], *, go_on: bool = True) -> list[Part]:
        """Exchange parts; with an error this rank has its own only, which is worth keeping all the same.

        Args:
            go_on: even if a rank is missing; else nothing more is waited for.
        """
        if self.repl_strategy is None:
            return [part]
        try:
            return self.repl_strategy.replicate_part(part, self._pool)
        except Exception as failed:  # whatever it is: the others hear of it when the save is finalized
            if isinstance(failed, ExchangeError) and not go_on:
                raise
            errors.append(_text_of(failed))
            return [part]

    def _finalize(self, iteration: int, own_errors: Sequence[str], *, in_background: bool) -> None:
        """Look whether all ranks have written, then remove what is older, or what is of no use."""
        errors = _errors(all_ranks(self._timeout).gather("; ".join(own_errors)))
        self._look()
        own = self._whole()
        validated = max((save.iteration for save in own if save.iteration <= iteration), default=-1)
        later: Callable[[Callable[[], None]], None] = self._in_background if in_background else _now
        if validated < iteration:
            later(partial(self._cleanup_failed_save, iteration))
            why = f": {_reasons(errors)}" if errors else ""
            raise CheckpointingException(
                f"Failure during saving local checkpoint from iteration {iteration} "
                f"(last valid iteration is {validated}){why}"
            )
        if errors and self.rank == 0:
            _log.warning("iteration %d is whole, but not all copies are: %s", iteration, _reasons(errors))
        if own[0].iteration > max(iteration, self._begun) and self.rank == 0:
            _log.warning(
                "iteration %d was saved, and %d is newer still: a restart would load that",
                iteration,
                own[0].iteration,
            )
        if self.layer and self.rank == 0:
            job_journal().report_checkpoint_saved(iteration, self.layer)
        kept = sorted({save.iteration for save in own if save.iteration <= iteration})[-self._keep :]
        if not errors:
            self._sound = iteration
        later(partial(self._cleanup, kept[0], self._sound))


def _now(work: Callable[[], None]) -> None:
    work()


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _errors(everybody: Sequence[str]) -> dict[int, str]:
    return {rank: error for rank, error in enumerate(everybody) if error}


def _reasons(errors: dict[int, str]) -> str:
    return "; ".join(f"rank {rank}: {error}" if rank >= 0 else error for rank, error in errors.items())
