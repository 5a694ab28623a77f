"""Work beside training, one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")


class InOrder:
    """A thread that does what it is given, in order; the end of the process does not wait for it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._todo: queue.SimpleQueue[Callable[[], None]] | None = None

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Return what ``work`` will return, or raise."""
        if self._todo is None:
            self._todo = queue.SimpleQueue()
            threading.Thread(target=_serve, args=[self._todo], name=self._name, daemon=True).start()
        future: Future[_T] = Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._todo.put(run)
        return future


def _serve(todo: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        todo.get()()
