"""The directory of a checkpoint: on a file system, or at a URL."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nvrx_slurm.checkpointing.storage import objects
from nvrx_slurm.checkpointing.storage.durable import locked, remove_leftovers, write_bytes
from nvrx_slurm.regular_file import open_regular


@dataclass(frozen=True)
class FileInfo:
    """What is known of a file without reading it."""

    size: int
    """In bytes."""
    modified: float
    """Unix time."""


class Folder(Protocol):
    """Where the files of one checkpoint are."""

    def where(self, name: str) -> Path | str:
        """Return the path of a file in it."""

    def files(self) -> dict[str, FileInfo]:
        """Return what regular files there are; none if there is no such directory."""

    def info(self, name: str) -> FileInfo | None:
        """Return what is known of a file; None: there is none."""

    def read(self, name: str) -> bytes:
        """Return all of a file."""

    def read_part(self, name: str, start: int, end: int) -> bytes:
        """Return what is from one offset to another in a file."""

    def write(self, name: str, data: bytes) -> None:
        """Write or replace a file, whole and durably."""

    def remove(self, name: str) -> None:
        """Remove a file, which may be gone already."""

    def remove_leftovers(self) -> None:
        """Remove what killed writers have left."""

    def locked(self) -> AbstractContextManager[None]:
        """Return a context that only one process is in at a time, where there are locks."""


def folder_at(where: Path | str) -> Folder:
    """Return the directory at a path or URL; it need not exist."""
    return RemoteFolder(str(where)) if objects.is_url(where) else LocalFolder(Path(where))


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def where(self, name: str) -> Path:
        return self._path / name

    def files(self) -> dict[str, FileInfo]:
        if not self._path.is_dir():
            return {}
        found = ((path.name, self.info(path.name)) for path in self._path.iterdir() if not path.is_symlink())
        return {name: info for name, info in found if info is not None}

    def info(self, name: str) -> FileInfo | None:
        path = self._path / name
        if not path.is_file():
            return None
        stat = path.stat()
        return FileInfo(stat.st_size, stat.st_mtime)

    def read(self, name: str) -> bytes:
        with open(open_regular(self._path / name), "rb") as file:
            return file.read()

    def read_part(self, name: str, start: int, end: int) -> bytes:
        fd = open_regular(self._path / name)
        try:
            return os.pread(fd, end - start, start)
        finally:
            os.close(fd)

    def write(self, name: str, data: bytes) -> None:
        write_bytes(self._path / name, data)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def remove_leftovers(self) -> None:
        remove_leftovers(self._path)

    def locked(self) -> AbstractContextManager[None]:
        return locked(self._path)


class RemoteFolder:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def where(self, name: str) -> str:
        return f"{self.url}/{name}"

    def entries(self) -> list[dict[str, Any]]:
        """Return what fsspec says of each file and directory in it."""
        store, path = objects.open_store(self.url)
        try:
            found = store.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return [each for each in found if each["name"].strip("/") != path.strip("/")]

    def files(self) -> dict[str, FileInfo]:
        return {
            each["name"].rpartition("/")[2]: FileInfo(each["size"], objects.modified_at(each))
            for each in self.entries()
            if each["type"] == "file"
        }

    def info(self, name: str) -> FileInfo | None:
        store, path = objects.open_store(self.where(name))
        try:
            found = store.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileInfo(found["size"], objects.modified_at(found)) if found["type"] == "file" else None

    def read(self, name: str) -> bytes:
        return objects.read_object(self.where(name))

    def read_part(self, name: str, start: int, end: int) -> bytes:
        store, path = objects.open_store(self.where(name))
        return bytes(store.cat_file(path, start=start, end=end))

    def write(self, name: str, data: bytes) -> None:
        with objects.replacing_object(self.where(name)) as pending:
            pending.write(data)

    def remove(self, name: str) -> None:
        store, path = objects.open_store(self.where(name))
        if store.exists(path):
            store.rm_file(path)

    def remove_folder(self, name: str) -> None:
        """Remove a directory below with all that is in it; it may be gone already."""
        store, path = objects.open_store(self.where(name))
        with contextlib.suppress(FileNotFoundError):
            store.rm(path, recursive=True)

    def remove_leftovers(self) -> None:
        """There are none that can be seen."""

    def locked(self) -> AbstractContextManager[None]:
        """There are no locks."""
        return nullcontext()
