"""What has to be remembered from one run of the checks to the next: small JSON files in one directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

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
            file = self.path / f"{name}.json"
            # Root must not believe what somebody else has put there.
            if file.stat().st_uid != os.geteuid() or file.stat().st_size > _MOST_BYTES:
                return None
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None

    def save(self, name: str, value: object) -> None:
        """Replace what was saved under ``name``, as a whole.

        Raises:
            UnavailableError: there is no state directory, or it can't be written.
        """
        if self.path is None:
            raise UnavailableError("there is no state directory", "--state-dir")
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self.path / f"{name}.json", msgspec.json.encode(value))
        except OSError as error:
            raise UnavailableError(f"cannot be written: {error.strerror}", str(self.path)) from error
