"""Checkpoints in layers: near and often, far and seldom; at the start the newest that is whole anywhere."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from nvrx_slurm.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvrx_slurm.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, ExchangeError
from nvrx_slurm.fault_tolerance.checkpoint_reports import job_journal

if TYPE_CHECKING:
    from nvrx_slurm.checkpointing.async_ckpt.core import AsyncCallsQueue

_log = logging.getLogger(__name__)


class Journal(Protocol):
    """Where it is said what was saved and loaded: a ``RankMonitorClient``."""

    def report_checkpoint_saved(self, step: int, layer: str = ...) -> None: ...

    def report_checkpoint_loaded(self, step: int, layer: str = ..., why: str = ...) -> None: ...


@dataclass(frozen=True)
class Layer:
    """One place for checkpoints."""

    name: str
    """As the journal calls it."""
    manager: BaseCheckpointManager
    every: int
    """Steps between saves."""
    required: bool = True
    """Whether a save that fails is an error. If not it is logged, and training goes on without that one."""


@dataclass(frozen=True)
class Candidate:
    """A whole checkpoint in a layer."""

    layer: str
    step: int


@dataclass(frozen=True)
class Loaded:
    """Where training goes on."""

    state: TensorAwareStateDict
    step: int
    layer: str
    why: str


def by_preference(whole: Sequence[tuple[str, Sequence[int]]]) -> list[Candidate]:
    """Return what can be loaded, the best first: the newest, of the same step that of the first layer.

    Args:
        whole: each layer with the steps that are whole there.
    """
    candidates = [Candidate(layer, step) for layer, steps in whole for step in steps]
    return sorted(candidates, key=lambda candidate: -candidate.step)  # stable: layers stay in order


def why_chosen(
    chosen: Candidate, whole: Sequence[tuple[str, Sequence[int]]], failed: Sequence[tuple[Candidate, str]]
) -> str:
    """Say what else there was, and why it was not taken."""
    others = [
        f"{layer} has step {max(steps)}" if steps else f"{layer} has none"
        for layer, steps in whole
        if layer != chosen.layer
    ]
    passed = [f"{each.layer} step {each.step} can't be loaded: {why}" for each, why in failed]
    return "; ".join(
        ["the newest that is whole" if not passed else "the newest that loads", *others, *passed]
    )


class CheckpointLadder:
    """Several layers as one. All ranks call the same methods in the same order.

    Example::

        cliques = LazyCliqueReplicationStrategy()
        local = LocalCheckpointManager(os.environ["NVRX_RAM_DIR"], repl_strategy=cliques, keep=2)
        shared = LocalCheckpointManager("/lustre/me/run1", keep=3)
        ladder = CheckpointLadder.of(local, shared, local_every=10, shared_every=200, journal=client)
        if loaded := ladder.load():
            restore(loaded.state.state_dict)
        for step in range(loaded.step if loaded else 0, steps):
            ...
            ladder.save_if_due(step + 1, lambda: BasicTensorAwareStateDict(state()))
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        *,
        journal: Journal | None = None,
        queue: AsyncCallsQueue | None = None,
    ) -> None:
        """
        Args:
            layers: the quickest to load from first.
            journal: is told of every checkpoint, by rank 0; by default the job's, where there is one.
            queue: saves are written in its background; it is this ladder's alone. Then call ``finalize``
                between steps. None: a save returns when it is durable.

        Raises:
            ValueError: no layer, two of one name, or ``every`` below 1.
            TypeError: something else than a Layer.
        """
        if strangers := [layer for layer in layers if not isinstance(layer, Layer)]:
            raise TypeError(f"{strangers[0]!r} is no Layer: give Layer(name, manager, every)")
        names = [layer.name for layer in layers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"layers {names}: one or more are accepted, each with a name of its own")
        for layer in layers:
            if not isinstance(layer.every, int) or layer.every < 1:
                raise ValueError(f"layer {layer.name}: every={layer.every!r}, a number from 1 is accepted")
        self._layers = list(layers)
        self._journal = journal or job_journal()
        for layer in layers:
            layer.manager.layer = ""  # the ladder tells, by its own names
        self._queue = queue
        self._pending: deque[Layer] = deque()

    @classmethod
    def of(
        cls,
        local: BaseCheckpointManager,
        shared: BaseCheckpointManager,
        *,
        local_every: int,
        shared_every: int,
        journal: Journal | None = None,
        queue: AsyncCallsQueue | None = None,
    ) -> CheckpointLadder:
        """Return the usual ladder of two layers. Training goes on when a local save fails."""
        layers = [
            Layer("local", local, local_every, required=False),
            Layer("shared", shared, shared_every),
        ]
        return cls(layers, journal=journal, queue=queue)

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is whole in some layer and can be read; None: there is none.

        Raises:
            ExchangeError: a rank did not take part in time.
        """
        managers = {layer.name: layer.manager for layer in self._layers}
        whole = [(name, manager.whole_iterations()) for name, manager in managers.items()]
        failed: list[tuple[Candidate, str]] = []
        for candidate in by_preference(whole):
            try:
                state, _ = managers[candidate.layer].load(candidate.step)
            except ExchangeError:
                raise
            except CheckpointingException as error:  # the same on all ranks
                failed.append((candidate, str(error)))
                continue
            why = why_chosen(candidate, whole, failed)
            self._begin_anew()
            if self._first:
                self._journal.report_checkpoint_loaded(candidate.step, candidate.layer, why)
            return Loaded(state, candidate.step, candidate.layer, why)
        self._begin_anew()
        if failed and self._first:
            _log.error("no checkpoint can be loaded: %s", "; ".join(why for _, why in failed))
        return None

    def save_if_due(self, step: int, state: Callable[[], TensorAwareStateDict]) -> list[str]:
        """Save in the layers whose turn it is; return their names.

        Args:
            state: is called once for each of them.

        Raises:
            CheckpointingException: a layer that is required could not be saved to; on all ranks.
            ExchangeError: a rank did not take part in time.
        """
        return self._save(step, state, [layer for layer in self._layers if step % layer.every == 0])

    def save(self, step: int, state: Callable[[], TensorAwareStateDict]) -> list[str]:
        """Save in all layers, before a stop for instance; as :meth:`save_if_due`."""
        return self._save(step, state, self._layers)

    def finalize(self, *, blocking: bool = False) -> None:
        """End saves that have been written in the background.

        Args:
            blocking: wait for all.

        Raises:
            CheckpointingException, AsyncSaveError: one has failed in a layer that is required; on all ranks.
        """
        queue = self._queue
        while queue is not None and self._pending:
            try:
                queue.maybe_finalize_async_calls(blocking)
            except ExchangeError:
                raise
            except (CheckpointingException, RuntimeError) as error:  # AsyncSaveError is a RuntimeError
                failed = self._take_finalized(queue)
                if failed is None or failed.required:
                    raise
                self._go_on_without(failed, error)
                continue
            self._take_finalized(queue)
            return

    def _take_finalized(self, queue: AsyncCallsQueue) -> Layer | None:
        """Forget the saves that the queue has finalized; return the layer of the last one."""
        last = None
        while len(self._pending) > queue.get_num_unfinalized_calls():
            last = self._pending.popleft()
        return last

    def _save(self, step: int, state: Callable[[], TensorAwareStateDict], due: Sequence[Layer]) -> list[str]:
        if not callable(state):
            raise TypeError(
                f"state is of type {type(state).__name__}: give a function that returns the state"
            )
        saved = []
        for layer in due:
            try:
                request = layer.manager.save(state(), step, is_async=self._queue is not None)
            except ExchangeError:
                raise
            except CheckpointingException as error:  # the same on all ranks
                if layer.required:
                    raise
                self._go_on_without(layer, error)
                continue
            saved.append(layer.name)
            if request is None or self._queue is None:
                self._report_saved(step, layer.name)
            else:
                request.add_finalize_fn(partial(self._report_saved, step, layer.name))
                self._queue.schedule_async_request(request)
                self._pending.append(layer)
        return saved

    def _go_on_without(self, layer: Layer, error: Exception) -> None:
        if self._first:
            _log.warning("training goes on without a %s checkpoint: %s", layer.name, error)

    def _report_saved(self, step: int, layer: str) -> None:
        if self._first:
            self._journal.report_checkpoint_saved(step, layer)

    def _begin_anew(self) -> None:
        """What was not taken may be saved over."""
        for layer in self._layers:
            layer.manager.latest_iteration = -1

    @property
    def _first(self) -> bool:
        return self._layers[0].manager.rank == 0
