"""Where an agent keeps heartbeat pages and the ranks' socket, when somebody clears or fills one place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

_YOUNG_S = 60.0
"""A directory without a lock may be that of an agent that is about to lock it."""
_held: list[int] = []
"""Descriptors with the locks."""
RAM_DIR_VARIABLE = "NVRX_RAM_DIR"
"""Tells ranks where they may keep checkpoints in memory."""


def new_private_dir(environ: Mapping[str, str], node: str | None = None) -> Path:
    """Make a directory of one agent alone, in memory where possible: heartbeat pages are written often.

    Removes what agents of this user have left there that were killed together with their guardians.

    Args:
        node: whose only agent of the job this is: what former ones have left there is removed at once.

    Raises:
        OSError: no place for it.
    """
    base = environ.get("NVRX_NODE_LOCAL_TMPDIR") or "/dev/shm"
    if not os.access(base, os.W_OK | os.X_OK):
        base = tempfile.gettempdir()
    ours = f"nvrx-{os.geteuid()}-"
    prefix = f"{ours}{environ.get('SLURM_JOB_ID', 'local')}-"
    if node is not None:
        # Short, for a socket's path may have 107 bytes at most.
        prefix += f"{zlib.crc32(node.encode()):08x}-"
        for place in {base, tempfile.gettempdir()}:
            remove_places(list(Path(place).glob(f"{prefix}*")))
    _remove_leftovers(Path(base), ours)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    _hold(made)
    return made


def ram_dir_for_checkpoints(environ: Mapping[str, str], node: str) -> Path | None:
    """Make, or find again, the directory in this node's memory where ranks of the job may keep checkpoints.

    It stays while agents of the job follow each other on the node. Agents of this user's other jobs remove it
    once no agent holds it.

    Returns:
        None: there is no place for it, or somebody else has taken the name.
    """
    place = ram_dir_path(environ, node)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        _hold(place)
        return place if _is_private(place) else None
    except OSError:
        return None


def ram_dir_path(environ: Mapping[str, str], node: str) -> Path:
    """Return the place of that directory, which may not be there."""
    name = f"nvrx-{os.geteuid()}-{environ.get('SLURM_JOB_ID', 'local')}-ram-{zlib.crc32(node.encode()):08x}"
    return Path("/dev/shm", name)


def staging_place(private_dir: Path, environ: Mapping[str, str]) -> Path | None:
    """Return where output may be staged: local disk that was named as such, this user's alone."""
    return private_dir if environ.get("NVRX_NODE_LOCAL_TMPDIR") else None


def _hold(place: Path) -> None:
    """Lock the directory for as long as this process or a child that it forks lives (flock(2))."""
    with contextlib.suppress(OSError):
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _held.append(fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_leftovers(base: Path, prefix: str) -> None:
    """Remove the directories of agents that are gone, unless they have only just been made."""
    for place in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_private(place) and time.time() - os.fstat(fd).st_mtime > _YOUNG_S:
                    shutil.rmtree(place, ignore_errors=True)
            finally:
                os.close(fd)


def release_places() -> None:
    """Let go of the locks in this process, a fork of the agent's launcher that is to outlive the agent."""
    while _held:
        os.close(_held.pop())


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
        _hold(place)
    if not _is_private(place):
        raise PermissionError(f"{place} is no directory of uid {os.geteuid()} alone")


def remove_places(places: Sequence[Path]) -> None:
    """Remove what is this user's own there."""
    for place in places:
        with contextlib.suppress(OSError):
            info = place.lstat()
            if info.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(info.st_mode):
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink()  # A rank has put it there.


def _is_private(place: Path) -> bool:
    info = os.lstat(place)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
