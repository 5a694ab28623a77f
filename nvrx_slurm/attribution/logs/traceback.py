"""Put tracebacks together, those of many ranks whose lines are mixed included."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

HEADER = "traceback (most recent call last)"
_MAX_LINES = 400
_MAX_OPEN = 4096
_FRAME = re.compile(r'\s{0,40}[|+ ]{0,12}File "([^"]{1,400})", line (\d{1,9}), in (.{1,120})')
_EXCEPTION = re.compile(r"([A-Za-z_][\w.]{0,200})(?:: ?(.*))?$", re.S)
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3|/lib64/python3|<frozen |importlib|/torch/|/ray/|runpy\.py|"
    r"/nvrx_slurm/|contextlib\.py|threading\.py"
)
_CONTINUED = ("  ", "\t", "During handling", "The above exception", "+-", "| ", "    ")


@dataclass(frozen=True)
class Raised:
    """One exception, with where the user's own code raised it."""

    line: int
    """Of the header."""
    type: str
    message: str
    frame: str
    """``train.py:forward``, the innermost frame of the user's; of a library if there is none."""
    text: str
    """The exception's line."""


@dataclass
class _Open:
    line: int
    lines: int = 0
    user: str = ""
    innermost: str = ""


@dataclass
class Tracebacks:
    """The tracebacks that have begun and not ended, one stack per rank."""

    unfinished: dict[int | None, list[_Open]] = field(default_factory=dict)
    """By rank; empty while no traceback is being read."""

    def begin(self, rank: int | None, line: int) -> None:
        if len(self.unfinished) < _MAX_OPEN:
            stack = self.unfinished.setdefault(rank, [])
            # Without ranks, the lines of several tracebacks may be mixed; else a new one replaces a torn one.
            if rank is not None or len(stack) >= 8:
                stack.clear()
            stack.append(_Open(line))

    def take(self, rank: int | None, text: str) -> tuple[bool, Raised | None]:
        """Offer a line, its prefixes taken off.

        Returns:
            Whether the line belongs to a traceback, and the exception if it ends one.
        """
        stack = self.unfinished.get(rank)
        if not stack:
            return False, None
        top = stack[-1]
        top.lines += 1
        if top.lines > _MAX_LINES:
            self._close(rank)
            return False, None
        frame = _FRAME.match(text)
        if frame:
            path, _, function = frame.groups()
            top.innermost = f"{path.rpartition('/')[2]}:{function.strip()}"
            if not _LIBRARY.search(path):
                top.user = top.innermost
            return True, None
        if not text.strip() or text.startswith(_CONTINUED):
            return True, None
        found = _EXCEPTION.match(text)
        if found is None or (top.innermost == "" and ":" not in text) or " " in found.group(1):
            self._close(rank)
            return False, None
        self._close(rank)
        kind, message = found.group(1).rpartition(".")[2], (found.group(2) or "").strip()
        return True, Raised(top.line, kind, message, top.user or top.innermost, text.strip())

    def _close(self, rank: int | None) -> None:
        stack = self.unfinished.get(rank)
        if stack:
            stack.pop()
        if not stack:
            self.unfinished.pop(rank, None)
