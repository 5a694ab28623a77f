"""Calls that may never return, and must not hold up what comes after them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

from nvrx_slurm.inprocess.exception import TimeoutError

_T = TypeVar("_T")


def in_thread(function: Callable[[], _T], name: str) -> Future[_T]:
    """Run ``function`` in a thread of its own that doesn't keep the process alive."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        # The user has no more (ulimit -u): without a bound is better than not at all.
        run()
    return future


def call_with_timeout(function: Callable[[], _T], timeout: timedelta, what: str) -> _T:
    """Return what ``function`` returns, and raise what it raises; it runs in a thread.

    Raises:
        TimeoutError: it took longer than ``timeout``. It runs on, and nobody waits for it.
    """
    future = in_thread(function, what)
    wait([future], timeout.total_seconds())
    if not future.done():
        raise TimeoutError(f"{what} took longer than {timeout.total_seconds():g} s")
    return future.result()
