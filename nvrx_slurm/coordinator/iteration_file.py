"""The file in which training keeps the iteration of its newest checkpoint (Megatron-LM writes such a one).

It is on a shared file system, which may hang: then a thread hangs, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from nvrx_slurm.regular_file import open_regular

TIMEOUT_S = 30.0
_MOST_BYTES = 64


class IterationFileError(RuntimeError):
    """There is no iteration to be had from the file; the message says why."""


def read_iteration(path: Path) -> int:
    """Return the one integer that the file holds.

    Raises:
        IterationFileError: it can't be read, or holds something else.
    """
    try:
        opened = open_regular(path, follow_link=True)
        try:
            text = os.read(opened, _MOST_BYTES + 1)
        finally:
            os.close(opened)
    except OSError as error:
        raise IterationFileError(error.strerror or str(error)) from error
    digits = text.strip()
    if len(text) > _MOST_BYTES or not digits.isdigit() or int(digits) >= 2**63:
        raise IterationFileError(f"it holds {text[:20]!r}: one integer of 0 or more is accepted")
    return int(digits)


class IterationFile:
    """The job's one reader of the file. Needs a running event loop."""

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._reader: threading.Thread | None = None

    async def read(self) -> int:
        """Read it in a thread.

        Raises:
            IterationFileError: it can't be read, not in time, or holds something else.
        """
        if self._reader is not None and self._reader.is_alive():
            raise IterationFileError("an earlier attempt to read it still hangs")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[int | IterationFileError] = loop.create_future()

        def give(result: int | IterationFileError) -> None:
            if not answer.done():
                answer.set_result(result)

        def read() -> None:
            result: int | IterationFileError
            try:
                result = read_iteration(self._path)
            except IterationFileError as error:
                result = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(give, result)

        # Not of the loop's executor: the interpreter would not exit before such a thread has ended.
        self._reader = threading.Thread(target=read, daemon=True, name="nvrx-iteration-file")
        self._reader.start()
        try:
            result = await asyncio.wait_for(answer, self._timeout_s)
        except asyncio.TimeoutError:
            raise IterationFileError(f"it could not be read in {self._timeout_s:g} s") from None
        if isinstance(result, IterationFileError):
            raise result
        return result
