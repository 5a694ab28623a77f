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


@dataclass(frozen=True)
class Part:
    """What a line adds to the traceback that it is part of."""

    frame: str = ""
    """Where, if it names a frame."""
    is_user: bool = False
    """It is the user's own code."""
    file: bytes = b""
    function: bytes = b""
    """How a line shows that its frame is this one, and none whose name differs in a number."""

    def is_of(self, line: bytes) -> bool:
        """Tell whether a line with the same skeleton as the one that was taken apart is the same part."""
        return not self.frame or (self.file in line and line.endswith(self.function))


_NOTHING = Part()


@dataclass
class _Open:
    line: int
    lines: int = 0
    user: str = ""
    innermost: str = ""

    def add(self, part: Part) -> None:
        if part.frame:
            self.innermost = part.frame
            if part.is_user:
                self.user = part.frame


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

    def frame_of(self, rank: int | None) -> str | None:
        """Return where the rank's innermost traceback has come to; None: it has none."""
        stack = self.unfinished.get(rank)
        return stack[-1].user or stack[-1].innermost if stack else None

    def take_part(self, rank: int | None, part: Part) -> bool | None:
        """Offer a line that is known to be ``part`` of any traceback; tell whether the rank has one.

        None: its traceback has become too long.
        """
        stack = self.unfinished.get(rank)
        if not stack:
            return False
        top = stack[-1]
        if top.lines >= _MAX_LINES:
            return None
        top.lines += 1
        top.add(part)
        return True

    def take(self, rank: int | None, text: str) -> tuple[bool, Part | None, Raised | None]:
        """Offer a line, its prefixes taken off.

        Returns:
            Whether the line belongs to a traceback; what it adds, if lines that differ in numbers alone add
            the same; and the exception if it ends one.
        """
        stack = self.unfinished.get(rank)
        if not stack:
            return False, None, None
        top = stack[-1]
        top.lines += 1
        if top.lines > _MAX_LINES:
            self.close(rank)
            return False, None, None
        frame = _FRAME.match(text)
        if frame:
            path, _, function = frame.groups()
            where = f"{path.rpartition('/')[2]}:{function.strip()}"
            before, _, file = path.rpartition("/")
            shown = f'{"/" if before or "/" in path else chr(34)}{file}", line '
            part = Part(where, not _LIBRARY.search(path), shown.encode(), f", in {function}".encode())
            top.add(part)
            return True, part, None
        if not text.strip() or text.startswith(_CONTINUED):
            return True, _NOTHING, None
        found = _EXCEPTION.match(text)
        if found is None or (top.innermost == "" and ":" not in text) or " " in found.group(1):
            self.close(rank)
            return False, None, None
        self.close(rank)
        kind, message = found.group(1).rpartition(".")[2], (found.group(2) or "").strip()
        return True, None, Raised(top.line, kind, message, top.user or top.innermost, text.strip())

    def close(self, rank: int | None) -> None:
        """End the innermost traceback of the rank."""
        stack = self.unfinished.get(rank)
        if stack:
            stack.pop()
        if not stack:
            self.unfinished.pop(rank, None)
