"""Write a file in aligned chunks, several at a time, past the page cache where the file system can."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def write_aligned(
    fd: int,
    chunks: Iterable[memoryview],
    size: int,
    *,
    at_once: int = 1,
    pace: Callable[[int], None] | None = None,
) -> None:
    """Write a whole file and cut it to ``size`` bytes.

    Args:
        chunks: each in page-aligned memory and a multiple of ``ALIGNMENT`` long; the last may reach
            beyond ``size``. A chunk must stay as it is until ``at_once`` more have been taken.
        at_once: writes in flight.
        pace: called before each write with its size; may wait.

    Space is not reserved first (fallocate(2)): it made writes a tenth slower on ext4 and on tmpfs.

    Raises:
        OSError: it could not be written.
    """
    with _direct(fd):
        if at_once == 1:
            for offset, chunk in _placed(chunks):
                _write(fd, chunk, offset, pace)
        else:
            _write_at_once(fd, chunks, at_once, pace)
    os.ftruncate(fd, size)


def _placed(chunks: Iterable[memoryview]) -> Iterator[tuple[int, memoryview]]:
    offset = 0
    for chunk in chunks:
        yield offset, chunk
        offset += len(chunk)


def _write_at_once(
    fd: int, chunks: Iterable[memoryview], at_once: int, pace: Callable[[int], None] | None
) -> None:
    in_flight: deque[Future[None]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        for offset, chunk in _placed(chunks):
            if len(in_flight) == at_once:
                in_flight.popleft().result()
            in_flight.append(pool.submit(_write, fd, chunk, offset, pace))
        for each in in_flight:
            each.result()


def _write(fd: int, chunk: memoryview, offset: int, pace: Callable[[int], None] | None) -> None:
    if pace is not None:
        pace(len(chunk))
    try:
        _write_all(fd, chunk, offset)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
        _set_direct(fd, False)
        _write_all(fd, chunk, offset)


def _write_all(fd: int, chunk: memoryview, offset: int) -> None:
    while chunk:
        count = os.pwrite(fd, chunk, offset)
        chunk, offset = chunk[count:], offset + count


@contextlib.contextmanager
def _direct(fd: int) -> Iterator[None]:
    _set_direct(fd, True)
    try:
        yield
    finally:
        _set_direct(fd, False)


def _set_direct(fd: int, wanted: bool) -> None:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if bool(flags & os.O_DIRECT) == wanted:
        return
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags ^ os.O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT_IO:
            raise
