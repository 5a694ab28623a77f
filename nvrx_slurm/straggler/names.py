"""One numbering of sections and kernels for all ranks: names travel once, when a rank has a new one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from nvrx_slurm.pace.names import MOST_NAMES
from nvrx_slurm.straggler.exchange import Exchange


class Names:
    """The same on every rank that takes part in the same calls of :meth:`agree`.

    There are :data:`~nvrx_slurm.pace.names.MOST_NAMES` at the most; the rest is left out.
    """

    def __init__(self) -> None:
        self._number: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def agree(self, own: Iterable[str], exchange: Exchange) -> None:
        """Number the names that some rank is the first to have; in the order of ranks, then as they come.

        Raises:
            ExchangeError
        """
        is_full = len(self._number) >= MOST_NAMES
        fresh = [] if is_full else [name for name in own if name not in self._number]
        nothing_new = exchange.smallest(torch.tensor([float(not fresh)], dtype=torch.float64))
        if bool(nothing_new):
            return
        for words in exchange.all_words(fresh):
            for name in words:
                if len(self._number) < MOST_NAMES:
                    self._number.setdefault(name, len(self._number))

    def row(self, values: Mapping[str, float], missing: float) -> torch.Tensor:
        """Return ``values`` by number, as far as they have one."""
        row = torch.full((len(self._number),), missing, dtype=torch.float64)
        numbered = {self._number[name]: value for name, value in values.items() if name in self._number}
        if numbered:
            row[list(numbered)] = torch.tensor(list(numbered.values()), dtype=torch.float64)
        return row
