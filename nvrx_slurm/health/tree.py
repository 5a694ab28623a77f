"""Small kernel files below one root: ``/`` on a node, any directory in a test."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.health.unavailable import UnavailableError

_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Tree:
    """Reads ``/sys``, ``/proc`` and the like; paths are absolute, as on the node."""

    root: Path = Path("/")

    def at(self, path: str) -> Path:
        """Return where ``path`` really is."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str:
        """Return a file's text, without white space around it; bytes that are no text are replaced.

        Raises:
            UnavailableError: it can't be read.
        """
        try:
            with self.at(path).open("rb") as file:
                return file.read(_MOST_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise UnavailableError(f"cannot be read: {error.strerror}", path) from error

    def number(self, path: str) -> int:
        """Return the number that a file holds.

        Raises:
            UnavailableError: it can't be read, or holds none.
        """
        text = self.text(path)
        # int() takes 1_000 and digits of other scripts, which no kernel writes; counters have 64 bits.
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
            raise UnavailableError(f"holds no number: {text[:40]!r}", path, expected=True)
        return int(text)

    def names(self, path: str) -> list[str]:
        """Return what a directory holds, sorted; nothing if there is no such directory.

        Raises:
            UnavailableError: there is one, and it can't be read.
        """
        try:
            return sorted(os.listdir(self.at(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise UnavailableError(f"cannot be listed: {error.strerror}", path) from error

    def exists(self, path: str) -> bool:
        return self.at(path).exists()

    def resolve(self, path: str) -> str:
        """Follow links; return the path as on the node.

        Raises:
            UnavailableError: there is no such file.
        """
        try:
            resolved = self.at(path).resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise UnavailableError(f"leads nowhere: {error}", path) from error
        root = self.root.resolve()
        return "/" + str(resolved.relative_to(root)) if resolved.is_relative_to(root) else str(resolved)
