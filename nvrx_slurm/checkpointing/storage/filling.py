"""How far a piece of memory has been filled, for whoever writes it to a file meanwhile."""

from __future__ import annotations

import threading


class AbandonedError(RuntimeError):
    """Whoever filled the memory has given up."""


class Filling:
    """Memory that is filled from its beginning by one side, and read behind it by another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._up_to = 0
        self._is_whole = False
        self._failure: str | None = None

    @classmethod
    def complete(cls) -> Filling:
        """Return that of memory which is full."""
        filling = cls()
        filling.finish()
        return filling

    def advance(self, up_to: int) -> None:
        """Everything before ``up_to`` is there."""
        with self._changed:
            self._up_to = max(self._up_to, up_to)
            self._changed.notify_all()

    def finish(self) -> None:
        """Everything is there, and may count."""
        with self._changed:
            self._is_whole = True
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Nothing more comes, and what is there does not count; without effect when it is whole."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def wait_for(self, end: int) -> None:
        """Return when everything before ``end`` is there.

        Raises:
            AbandonedError: it never will be.
        """
        self._wait(end)

    def wait_until_whole(self) -> None:
        """Return when everything is there, and may count.

        Raises:
            AbandonedError: it never will be.
        """
        self._wait(None)

    def _wait(self, end: int | None) -> None:
        def is_there() -> bool:
            return self._is_whole or (end is not None and self._up_to >= end)

        with self._changed:
            self._changed.wait_for(lambda: is_there() or self._failure is not None)
            if not is_there():
                raise AbandonedError(self._failure)
