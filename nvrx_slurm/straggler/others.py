"""The way to the other ranks, made anew when the process group of training is another one."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch.distributed as dist

from nvrx_slurm.straggler.exchange import Alone, Exchange, ExchangeError, OverTorch

_log = logging.getLogger(__name__)


class OtherRanks:
    """Whom this rank asks: all of the process group, or nobody when there is none or one of them is gone.

    The group of training is known by a weak reference: ours must not keep it after it was destroyed.

    Args:
        are_needed: whether reports need other ranks at all.
        timeout_s: how long they are waited for.
    """

    def __init__(self, are_needed: bool, timeout_s: float) -> None:
        self._are_needed = are_needed
        self._timeout_s = timeout_s
        self._exchange: Exchange = Alone(0)
        self._world: weakref.ref[Any] | None = None
        self._is_made = False
        self._of_parent: Exchange | None = None

    def have_changed(self) -> bool:
        """Tell, once, that the process group is another one than at the last call, or is gone."""
        world = _world()
        if world is self._known() and (world is None) == (self._world is None):
            return False
        self._world = None if world is None else weakref.ref(world)
        self._exchange = Alone(0 if world is None else dist.get_rank())
        self._is_made = False
        return True

    def exchange(self) -> Exchange:
        """Return the way to them.

        Raises:
            ExchangeError: it can't be made.
        """
        if self._world is not None and self._are_needed and not self._is_made:
            self._is_made = True
            self._exchange = OverTorch(self._timeout_s)
        return self._exchange

    def give_up(self, error: ExchangeError) -> None:
        """Ask nobody in this process group any more: who has missed one exchange would mistake the next."""
        self._exchange = Alone(self._exchange.rank)
        _log.warning(
            "one of the ranks did not take part in a report; until they meet anew this one reports on itself "
            "alone: %s",
            error,
        )

    def ask_nobody(self) -> None:
        """In a fork: the connections are the parent's."""
        # Kept, for a group that is given up waits for its threads, which a fork has not.
        self._of_parent = self._exchange
        self._exchange = Alone(self._exchange.rank)
        self._are_needed = False

    def close(self) -> None:
        """Give back what was made; the process group may be gone already."""
        world = _world()
        if isinstance(self._exchange, OverTorch) and world is not None and world is self._known():
            self._exchange.close()
        self._exchange = Alone(self._exchange.rank)

    def _known(self) -> Any:
        return None if self._world is None else self._world()


def _world() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
