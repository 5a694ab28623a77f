"""What the launcher's own output shows of this node's ranks, by torchrun's options."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

BOTH = "3"
_NONE = "0"
_ONE_STREAM = ("1", "2")
_MAX_LINE_BYTES = 64 * 1024


def parse_std(option: str, text: str) -> Mapping[int, bool] | bool:
    """Read ``0``, ``3`` or ``LOCAL_RANK:3,…``: for all ranks, or for each that is named.

    Raises:
        ValueError: anything else, stdout or stderr alone included.
    """
    accepted = "0, 3 or LOCAL_RANK:3,LOCAL_RANK:0,… is accepted"
    if text in (_NONE, BOTH):
        return text == BOTH
    chosen: dict[int, bool] = {}
    for pair in text.split(","):
        rank, colon, std = (word.strip() for word in pair.partition(":"))
        alone = std if colon else rank
        if alone in _ONE_STREAM:
            raise ValueError(
                f"{option}: {text!r}: {accepted}; a rank's standard output and error are one log here, in "
                "the order in which it wrote them"
            )
        if not (rank.isascii() and rank.isdigit()) or std not in (_NONE, BOTH):
            raise ValueError(f"{option}: {text!r}: {accepted}")
        chosen[int(rank)] = std == BOTH
    return chosen


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read ``0,1,2``; None, for all, if it is empty.

    Raises:
        ValueError: anything else.
    """
    if not text:
        return None
    ranks = [part.strip() for part in text.split(",")]
    if not all(rank.isascii() and rank.isdigit() for rank in ranks):
        raise ValueError(f"--local-ranks-filter: {text!r}: local ranks separated by commas are accepted: 0,1")
    return frozenset(map(int, ranks))


def _says(choice: Mapping[int, bool] | bool, local_rank: int) -> bool:
    return choice if isinstance(choice, bool) else choice.get(local_rank, False)


@dataclass(frozen=True)
class Shown:
    """What is shown, and how."""

    redirects: Mapping[int, bool] | bool = False
    """Ranks whose output is in the run directory only."""
    tee: Mapping[int, bool] | bool = False
    """Ranks whose lines are shown with a prefix, redirected or not."""
    only: Collection[int] | None = None
    role: str = "default"
    template: str | None = None
    """``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``: ``${role_name}``, ``${rank}`` and ``${local_rank}``."""

    def prefix(self, rank: int, local_rank: int) -> str:
        """Return what begins a line of a rank with ``tee``."""
        if self.template is None:
            return f"[{self.role}{local_rank}]:"
        return string.Template(self.template).safe_substitute(
            role_name=self.role, rank=rank, local_rank=local_rank
        )


class RankConsole:
    """Passes output on to ``write``: as it comes, or line by line with a prefix."""

    def __init__(self, shown: Shown, write: Callable[[bytes], None]) -> None:
        self._shown = shown
        self._write = write
        self._partial: dict[int, bytes] = {}

    def show(self, rank: int, local_rank: int, data: bytes) -> None:
        """Take output of one rank; empty: it is complete."""
        shown = self._shown
        if shown.only is not None and local_rank not in shown.only:
            return
        if _says(shown.tee, local_rank):
            self._lines(os.fsencode(shown.prefix(rank, local_rank)), local_rank, data)
        elif data and not _says(shown.redirects, local_rank):
            self._write(data)

    def _lines(self, prefix: bytes, local_rank: int, data: bytes) -> None:
        *lines, rest = (self._partial.pop(local_rank, b"") + data).split(b"\n")
        if rest and (not data or len(rest) > _MAX_LINE_BYTES):
            lines, rest = [*lines, rest], b""
        if rest:
            self._partial[local_rank] = rest
        if lines:
            self._write(b"".join(prefix + line + b"\n" for line in lines))
