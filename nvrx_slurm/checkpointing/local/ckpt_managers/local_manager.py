"""Parts in files on this node: on its disk, or in its memory (``/dev/shm``)."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

from nvrx_slurm.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager
from nvrx_slurm.checkpointing.local.errors import CheckpointingException, SameMachineReplicationException
from nvrx_slurm.checkpointing.local.ids import CkptID, HeldPart, parse_part_name, part_name
from nvrx_slurm.checkpointing.local.part import Part, read_part
from nvrx_slurm.checkpointing.local.part_format import Header, read_header
from nvrx_slurm.checkpointing.local.replication.exchange import DEFAULT_TIMEOUT
from nvrx_slurm.checkpointing.local.replication.strategies import ReplicationStrategy
from nvrx_slurm.checkpointing.local.space import Room, look_at
from nvrx_slurm.checkpointing.storage import (
    CorruptCheckpointError,
    make_directory,
    remove_leftovers,
    replacing,
)

_log = logging.getLogger(__name__)
_CHUNK = 16 << 20
_Stamp = tuple[int, int, int]
"""Of a file: inode, time of its last change, length."""


class LocalCheckpointManager(BaseCheckpointManager):
    """Each rank's parts in a directory of its own, ``ROOT/SESSION/RANK/``, a file for each.

    With replication the files of all directories of the session on this node are at hand: a rank that has
    come to another place in the job finds there what its predecessor has left.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
        *,
        keep: int = 1,
        timeout: timedelta = DEFAULT_TIMEOUT,
        layer: str = "local",
    ) -> None:
        """
        Args:
            root_local_ckpt_dir: on this node; made when it is needed.
            session_id: tells apart jobs that share the directory.
            repl_strategy: None: a rank keeps its own parts only, and a lost node is a lost checkpoint.
            keep: iterations that stay when a new one is whole, itself included.
            timeout: for each exchange between ranks.
            layer: what the job's journal calls these checkpoints; empty: it is not told of them.

        Raises:
            ValueError: ``keep`` is below 1, or ``session_id`` is no name of a directory.
        """
        if "/" in session_id or session_id in (".", "..") or "\0" in session_id:
            raise ValueError(f"session_id {session_id!r} can't be the name of a directory")
        super().__init__(session_id, repl_strategy, keep=keep, timeout=timeout, layer=layer)
        self.root_local_ckpt_dir = Path(root_local_ckpt_dir)
        self._headers: dict[Path, tuple[_Stamp, Header | None]] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="nvrx-ckpt-cleanup")

    @property
    def local_ckpt_dir(self) -> Path:
        """This rank's directory; it exists afterwards.

        Raises:
            CheckpointingException: it or the session's is a link, another user's, or others can write there.
            OSError: it can't be made.
        """
        directory = self._session_dir / str(self.rank)
        make_directory(directory)
        for each in (self._session_dir, directory) if self.session_id else (directory,):
            found = os.lstat(each)
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
                raise CheckpointingException(f"{each} is no directory of uid {os.geteuid()} alone.")
        return directory

    @property
    def _session_dir(self) -> Path:
        return self.root_local_ckpt_dir / self.session_id if self.session_id else self.root_local_ckpt_dir

    def _filename_from_template(self, iteration: int | str, rank: int | str) -> str:
        return part_name(iteration, rank)

    def _filename_to_id(self, name: str) -> CkptID:
        """
        Raises:
            CheckpointingException: ``name`` is none of a part.
        """
        parsed = parse_part_name(name)
        if parsed is None:
            raise CheckpointingException(f"{name} is not named as a part of a local checkpoint is.")
        return CkptID(*parsed, self.session_id)

    def _local_ckpt_path_from_id(self, ckpt_id: CkptID) -> Path:
        iteration, rank, _ = ckpt_id
        return self.local_ckpt_dir / part_name(iteration, rank)

    def _held(self) -> list[HeldPart]:
        remove_leftovers(self.local_ckpt_dir)
        seen = dict(self._headers)
        self._headers = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                found = path.stat()
                stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
                known = seen.get(path)
                header = known[1] if known and known[0] == stamp else _header_of(path)
                self._headers[path] = (stamp, header)
        return sorted({header.held for _, header in self._headers.values() if header})

    def _load(self, ckpt_id: CkptID, save_id: str) -> Part:
        wanted = (CkptID(*ckpt_id), save_id)
        paths = [
            path
            for path, (_, header) in self._headers.items()
            if header and (header.held.id, header.save_id) == wanted
        ]
        paths.sort(key=lambda path: path.parent != self.local_ckpt_dir)
        error: Exception | None = None
        for path in paths:
            try:
                return read_part(path, self._pool)
            except (CorruptCheckpointError, OSError) as failed:
                error = failed
        raise error or CheckpointingException(
            f"File {self._local_ckpt_path_from_id(ckpt_id)} does not exist!"
        )

    def _save(self, part: Part, ckpt_id: CkptID) -> None:
        write_part(part, self._local_ckpt_path_from_id(ckpt_id))

    def _place_of(self, ckpt_id: CkptID) -> Path:
        return self._local_ckpt_path_from_id(ckpt_id)

    def _room(self) -> Room:
        return look_at(self.local_ckpt_dir, self._pool.spare)

    def _cleanup(self, iteration: int, but: int = -1) -> None:
        for path in self._files():
            parsed = parse_part_name(path.name)
            if parsed and parsed[0] < iteration and parsed[0] != but:
                _remove(path)

    def _cleanup_failed_save(self, iteration: int) -> None:
        for path in self._files():
            parsed = parse_part_name(path.name)
            if parsed and parsed[0] == iteration:
                _remove(path)

    def _in_background(self, work: Callable[[], None]) -> None:
        self._background.submit(work)

    def _files(self) -> Iterator[Path]:
        """The files of parts: in this rank's directory, with replication in all of this node's."""
        directories = [self.local_ckpt_dir]
        if self.repl_strategy is not None:
            directories += [
                each for each in sorted(self._session_dir.glob("[0-9]*")) if each.name.isdecimal()
            ]
        for directory in dict.fromkeys(directories):
            with contextlib.suppress(OSError):
                for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
                    if parse_part_name(entry.name) and _is_own_file(entry):
                        yield Path(entry.path)


def write_part(part: Part, path: Path) -> None:
    """Write a part durably; until it is whole, ``path`` stays what it was.

    Raises:
        SameMachineReplicationException: another process is writing the same file.
        OSError: it can't be written.
    """
    remove_leftovers(path.parent)
    if any(map(_is_locked, path.parent.glob(f".{path.name}.*"))):
        raise SameMachineReplicationException(tuple(part.id))
    padded = part.buffer.memory
    with replacing(path) as pending, memoryview(padded) as view:
        whole = -(-part.size // 4096) * 4096
        chunks = (view[begin : min(begin + _CHUNK, whole)] for begin in range(0, whole, _CHUNK))
        pending.write_aligned(chunks, part.size)


def _is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file; where there are no locks nobody does (flock(2))."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # it is done by now
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def _header_of(path: Path) -> Header | None:
    """Return what a file is by its first page, None: damaged, or not what its name says."""
    try:
        header = read_header(path)
    except (CorruptCheckpointError, OSError) as error:
        _log.warning("a file is passed over: %s", error)
        return None
    if parse_part_name(path.name) != (header.iteration, header.rank):
        _log.warning(
            "a file is passed over: %s holds iteration %d of rank %d", path, header.iteration, header.rank
        )
        return None
    return header


def _is_own_file(entry: os.DirEntry[str]) -> bool:
    found = entry.stat(follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("an old local checkpoint stays: %s", error)
