"""Where an agent keeps heartbeat pages and the ranks' socket, when somebody clears or fills one place."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path


def new_private_dir(environ: Mapping[str, str], node: str | None = None) -> Path:
    """Make a directory of one agent alone, in memory where possible: heartbeat pages are written often.

    Args:
        node: whose only agent of the job this is: what former ones have left there is removed.

    Raises:
        OSError: no place for it.
    """
    base = environ.get("NVRX_NODE_LOCAL_TMPDIR") or "/dev/shm"
    if not os.access(base, os.W_OK | os.X_OK):
        base = tempfile.gettempdir()
    prefix = f"nvrx-{os.getuid()}-{environ.get('SLURM_JOB_ID', 'local')}-"
    if node is not None:
        # Short, for a socket's path may have 107 bytes at most.
        prefix += f"{zlib.crc32(node.encode()):08x}-"
        for place in {base, tempfile.gettempdir()}:
            remove_places(list(Path(place).glob(f"{prefix}*")))
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def private_places(private_dir: Path) -> list[Path]:
    """Return ``private_dir`` and where to go instead: the same name, which nobody guesses, in the temporary
    directory.
    """
    places = [private_dir]
    with contextlib.suppress(OSError):
        places.append(Path(tempfile.gettempdir(), private_dir.name))
    return list(dict.fromkeys(places))


def make_private(place: Path) -> None:
    """Make the directory if it is gone.

    Raises:
        OSError: it can't be made, or something else is there; names ``place``.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    if not _is_private(place):
        raise PermissionError(f"{place} is no directory of uid {os.geteuid()} alone")


def remove_places(places: Sequence[Path]) -> None:
    """Remove what is this user's own there."""
    for place in places:
        with contextlib.suppress(OSError):
            if place.lstat().st_uid == os.geteuid():
                shutil.rmtree(place, ignore_errors=True)


def _is_private(place: Path) -> bool:
    info = os.lstat(place)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
