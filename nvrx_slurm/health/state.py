"""What has to be remembered from one run of the checks to the next: small JSON files in one directory."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from nvrx_slurm.health.trust import why_untrusted_directory
from nvrx_slurm.health.unavailable import UnavailableError
from nvrx_slurm.whole_file import replace_file

_T = TypeVar("_T")
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class StateDir:
    """A directory of this user alone; None: nothing is remembered."""

    path: Path | None

    def load(self, name: str, kind: type[_T]) -> _T | None:
        """Return what was saved; None if nothing was, or if it can't be understood any more.

        Nothing is lost by that: what depends on it begins to look anew.
        """
        if self.path is None:
            return None
        try:
            if why_untrusted_directory(self.path):
                return None
            data = _read(self.path / f"{name}.json")
            return None if data is None else msgspec.json.decode(data, type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def save(self, name: str, value: object) -> None:
        """Replace what was saved under ``name``, as a whole.

        Raises:
            UnavailableError: there is no state directory, it can't be written, or others can.
        """
        if self.path is None:
            raise UnavailableError("there is no state directory", "--state-dir")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if why := why_untrusted_directory(self.path):
                raise UnavailableError(f"is not used: {why}", str(self.path))
            replace_file(self.path / f"{name}.json", msgspec.json.encode(value))
        except OSError as error:
            raise UnavailableError(f"cannot be written: {error.strerror}", str(self.path)) from error

    def forget(self, name: str) -> None:
        """Remove what was saved under ``name``, if that can be done: also on a full disk."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                (self.path / f"{name}.json").unlink()


def _read(path: Path) -> bytes | None:
    """Return a file of this user's own; None for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        return file.read() if ours and status.st_size <= _MOST_BYTES else None
