"""Local checkpoints as they lie on one node: the parts of a save, in the directories of some ranks."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nvrx_slurm.checkpointing.local.completeness import ranks_text
from nvrx_slurm.checkpointing.local.ids import parse_part_name
from nvrx_slurm.checkpointing.local.part_format import Header, check_file, read_header
from nvrx_slurm.checkpointing.storage.errors import CorruptCheckpointError


@dataclass(frozen=True)
class LocalSave:
    """All files of one save that are here."""

    iteration: int
    world_size: int
    owners: frozenset[int]
    """Ranks of which a good part is here, as far as headers tell."""
    files: tuple[Path, ...]
    size: int
    modified: float
    damaged: str = ""
    """What is wrong with one of them."""
    is_unreadable: bool = False
    """For this user; ``damaged`` says why."""

    @property
    def what_is_here(self) -> str:
        if len(self.owners) == self.world_size:
            return (
                f"the parts of all {self.world_size} ranks" if self.world_size > 1 else "the only rank's part"
            )
        here = ranks_text(self.owners) if self.owners else "no rank"
        return f"the parts of {here}, of {self.world_size} ranks: the others are on other nodes, or lost"


def is_part(path: Path) -> bool:
    """Whether a file is named as a part is."""
    return parse_part_name(path.name) is not None and path.is_file() and not path.is_symlink()


def find(folder: Path) -> list[LocalSave]:
    """Return the saves in the directories of ranks in ``folder``, or in the one that it is; oldest first.

    Headers are read, nothing else. A file whose header is damaged stands for a save of its own.

    Raises:
        OSError: the directory can't be read.
    """
    saves: dict[tuple[int, int, str], list[tuple[Path, Header]]] = defaultdict(list)
    found = []
    for path in _files(folder):
        try:
            header = read_header(path)
        except FileNotFoundError:
            continue  # removed meanwhile
        except PermissionError as error:
            found.append(replace(_bad(path, str(error)), is_unreadable=True))
            continue
        except (CorruptCheckpointError, OSError) as error:
            found.append(_bad(path, str(error)))
            continue
        saves[header.iteration, header.world_size, header.save_id].append((path, header))
    for (iteration, world_size, _), parts in saves.items():
        stats = {path: stat for path, _ in parts if (stat := _stat(path)) is not None}
        if not stats:
            continue
        found.append(
            LocalSave(
                iteration,
                world_size,
                frozenset(header.rank for _, header in parts),
                tuple(stats),
                sum(stat.st_size for stat in stats.values()),
                max(stat.st_mtime for stat in stats.values()),
            )
        )
    return sorted(found, key=lambda save: (save.iteration, save.modified))


def verify(save: LocalSave, read: Callable[[int], None]) -> str:
    """Read all files of a save; return what is wrong with the first damaged one, nothing if all are good.

    Args:
        read: is told of the bytes of each file when they have been read.

    Raises:
        PermissionError: one can't be read by this user.
    """
    for path in save.files:
        try:
            read(check_file(path).size)
        except PermissionError:
            raise
        except (CorruptCheckpointError, OSError) as error:
            return str(error)
    return save.damaged


def _files(folder: Path) -> Iterator[Path]:
    below = [path for path in folder.iterdir() if path.name.isdecimal() and _is_folder(path)]
    for each in (folder, *sorted(below)):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # of those below
            yield from (Path(each, name) for name in sorted(os.listdir(each)) if is_part(Path(each, name)))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:
        return False


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # removed meanwhile
        return None


def _bad(path: Path, why: str) -> LocalSave:
    iteration, _ = parse_part_name(path.name) or (0, 0)
    stat = _stat(path)
    size, modified = (stat.st_size, stat.st_mtime) if stat else (0, 0.0)
    return LocalSave(iteration, 0, frozenset(), (path,), size, modified, why)
