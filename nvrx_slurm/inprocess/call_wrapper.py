"""What a wrapped function is given: its side of the restart machinery."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store import HubStore
from nvrx_slurm.inprocess.timings import RestartTimings
from nvrx_slurm.supervisor.page import ProgressPage, Word

if TYPE_CHECKING:
    from nvrx_slurm.inprocess.wrap import Wrapper

_clock = time.monotonic_ns
_POLL_S = 0.005
_PING = int(Word.PING)


class CallWrapper:
    """One call of a wrapped function, through all its iterations.

    A parameter of the function that is annotated ``CallWrapper`` or ``Optional[CallWrapper]`` receives it.
    """

    def __init__(self, wrapper: Wrapper, state: State, page: ProgressPage, store: HubStore) -> None:
        self.wrapper = wrapper
        """Whose function this is."""
        self.state = state
        """Where this rank stands."""
        self.store = store
        """A key-value store that all ranks share and that outlives every rank; keys stay for the call."""
        self.last_restart: RestartTimings | None = None
        """What the restart took that began this iteration; None in the first one."""
        self.lock = threading.RLock()
        self._words: memoryview[int] | list[int] = page.words
        self.is_copy = False
        """This is a process that the function has forked: it takes no part."""
        _alive.add(self)

    @property
    def base_store(self) -> HubStore:
        """The same as ``store``."""
        return self.store

    @property
    def iteration(self) -> int:
        """How often the function has been restarted; 0 in the first iteration."""
        return self.state.iteration

    def ping(self) -> None:
        """Show progress.

        From the first ping of an iteration on they must come more often than ``soft_timeout``.
        """
        self._words[_PING] = _clock()

    def atomic(self) -> AbstractContextManager[None]:
        """Have no abort and no interruption begin inside; may be nested. Time-outs apply there, too."""
        return _Atomic(self.lock)

    @contextmanager
    def disable_hang_protection(self) -> Iterator[None]:
        """Have ``soft_timeout`` and ``hard_timeout`` not apply inside; may be nested.

        Afterwards they begin anew, pings too. Everything else that ends an iteration still does.
        """
        self._words[Word.PROTECTION_OFF] += 1
        try:
            yield
        finally:
            self.reset_progress()
            self._words[Word.PROTECTION_OFF] -= 1

    def end(self) -> None:
        """The call is over: whoever keeps this object may go on pinging."""
        self._words = [0] * len(Word)

    def reset_progress(self) -> None:
        """Begin the time-outs anew; pings are not expected until the next one."""
        self._words[Word.PING] = 0
        self._words[Word.SINCE] = _clock()


_alive: weakref.WeakSet[CallWrapper] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked process: its pings are no progress of the rank, and no thread releases the lock here."""
    for call in _alive:
        call.is_copy = True
        call.end()
        call.lock = threading.RLock()


os.register_at_fork(after_in_child=_leave_to_parent)


class _Atomic:
    """Holds a lock that the thread that aborts and interrupts holds while it does."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        # While an abort holds it this thread must come back to Python code, to be interrupted.
        while not self._lock.acquire(timeout=_POLL_S):
            pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lock.release()


def release_all(lock: threading.RLock) -> None:
    """Release what an interruption right after ``acquire`` may have left to this thread."""
    while lock._is_owned():  # type: ignore[attr-defined]
        lock.release()
