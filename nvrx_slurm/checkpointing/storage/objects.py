"""Files in object stores and other places that fsspec reaches by URL (``s3://bucket/name``). Needs no torch.

An object appears under its name when it is whole: a store has no half of one. What a killed writer had sent
of it stays unseen; a bucket's rule for incomplete uploads removes it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

_SEPARATOR = "://"
_LEAST_PART = 16 << 20
_MOST_PARTS = 9000  # S3 takes 10,000


def is_url(where: object) -> bool:
    """Whether a path is one for fsspec."""
    return isinstance(where, str) and _SEPARATOR in where


def open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path there.

    Raises:
        OSError: there is none for such URLs, or what it needs is not installed.
    """
    import fsspec

    try:
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        hint = " (pip install 'nvrx-slurm[s3]')" if url.startswith("s3:") else ""
        raise OSError(f"{url} can't be reached: {error}{hint}") from None
    return store, path


def read_object(url: str) -> bytes:
    """Return all of an object.

    Raises:
        OSError: it can't be read.
    """
    store, path = open_store(url)
    return bytes(store.cat_file(path))


@contextlib.contextmanager
def open_object(url: str) -> Iterator[Any]:
    """Yield an object as a file, of which only what is read is fetched.

    Raises:
        OSError: it can't be read.
    """
    store, path = open_store(url)
    with store.open(path, "rb") as file:
        yield file


class PendingObject:
    """An object that is being written; see :func:`replacing_object`."""

    def __init__(self, url: str) -> None:
        self._store, self._path = open_store(url)
        self._file: Any = None

    def _open(self, size: int) -> Any:
        if self._file is None:
            part = max(_LEAST_PART, -(-size // _MOST_PARTS))
            self._file = self._store.open(self._path, "wb", block_size=part, autocommit=False)
        return self._file

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of ``data``."""
        self._open(len(data)).write(data)

    def write_aligned(
        self,
        chunks: Iterable[memoryview],
        size: int,
        *,
        at_once: int = 1,
        pace: Callable[[int], None] | None = None,
    ) -> None:
        """Write all of it, the first ``size`` bytes of the chunks; they are sent one after another."""
        del at_once
        file, left = self._open(size), size
        for chunk in chunks:
            if pace is not None:
                pace(len(chunk))
            file.write(bytes(chunk[:left]))
            left -= min(left, len(chunk))

    def commit(self) -> None:
        file = self._open(0)
        file.close()
        file.commit()

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()


@contextlib.contextmanager
def replacing_object(url: str) -> Iterator[PendingObject]:
    """Yield an object that takes the place of the one at ``url`` when the context ends without an exception.

    Raises:
        OSError: the store can't be reached, or refuses.
    """
    pending = PendingObject(url)
    try:
        yield pending
    except BaseException:
        with contextlib.suppress(Exception):  # what was wrong is said by the other exception
            pending.discard()
        raise
    pending.commit()


def modified_at(info: dict[str, Any]) -> float:
    """Return when an object was written, in Unix time; 0.0 where the store doesn't say."""
    for key in ("LastModified", "last_modified", "mtime", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def absolute(where: str | os.PathLike[str]) -> str:
    """Return a path that means the same in another process; a URL as it is."""
    text = os.fspath(where)
    return text if is_url(text) else os.path.abspath(text)
