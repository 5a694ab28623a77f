"""The thread that aborts what the main thread is blocked in, and interrupts it by an exception there."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.inprocess.exception import RankShouldRestart
from nvrx_slurm.inprocess.link import Link
from nvrx_slurm.supervisor.page import Word

__all__ = ["MonitorThread", "RankShouldRestart"]

_log = logging.getLogger("nvrx_slurm.inprocess")
_FIRST_PAUSE_S = 0.025
_LONGEST_PAUSE_S = 2.0
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = [ctypes.c_ulong, ctypes.py_object]
_clear_async_exc = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


@dataclass(frozen=True)
class Returned:
    value: Any

    def result(self) -> Any:
        """Return or raise what the function did."""
        return self.value


@dataclass(frozen=True)
class Raised:
    error: BaseException

    def result(self) -> Any:
        """As above."""
        raise self.error


@dataclass(frozen=True)
class Interrupted:
    """By us, or the function raised ``RankShouldRestart`` itself."""

    error: RankShouldRestart | None

    def result(self) -> Any:
        """As above."""
        raise self.error or RankShouldRestart()


Outcome = Returned | Raised | Interrupted


class UserCode:
    """Runs code of the user in this thread, and lets another thread interrupt it: there and nowhere else.

    Exceptions are raised only between ``_armed = True`` and the end of :meth:`_disarm`; the thread that
    raises announces it (``_raising``) before it looks at ``_armed``, so each side sees the other (Dekker's
    algorithm; the interpreter lock orders the stores). ``_disarm`` may be interrupted anywhere, and is then
    repeated.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._armed = False
        self._raising = False

    def run(self, function: Callable[[], Any]) -> Outcome:
        """Call ``function``; whatever comes out of it is returned."""
        outcome: Outcome = Interrupted(None)
        try:
            self._armed = True
            outcome = self._call(function)
        except RankShouldRestart as late:
            outcome = Interrupted(late)
        while True:
            try:
                self._disarm()
                return outcome
            except RankShouldRestart as late:
                outcome = Interrupted(late)

    @staticmethod
    def _call(function: Callable[[], Any]) -> Outcome:
        try:
            return Returned(function())
        except RankShouldRestart as error:
            return Interrupted(error)
        except BaseException as error:
            return Raised(error)

    def _disarm(self) -> None:
        self._armed = False
        # The thread that raises is not there in a process that the function has forked.
        while self._raising and os.getpid() == self._process:
            time.sleep(0)
        _clear_async_exc(self._thread, None)

    def reraise(self, kind: type[RankShouldRestart]) -> None:
        """Raise ``kind`` in this thread as soon as our caller has returned to its own."""
        if self._armed:
            # In C, without a bytecode after it at which the exception would be let in here.
            for _ in map(_set_async_exc, (self._thread,), (kind,)):
                return

    def is_in(self, thread: int) -> bool:
        """Tell whether ``thread`` is the one that is interrupted."""
        return thread == self._thread

    def interrupt(self, kind: type[RankShouldRestart]) -> bool:
        """Raise ``kind`` in the other thread, at its next bytecode; tell whether it runs user code."""
        self._raising = True
        try:
            if self._armed:
                _set_async_exc(self._thread, kind)
            return self._armed
        finally:
            self._raising = False


class MonitorThread(threading.Thread):
    """Waits for interruptions of one call, aborts and interrupts.

    Args:
        link: tells of interruptions.
        user_code: is to be interrupted.
        atomic: held by the function while nothing may be aborted.
        abort: called once for each; its exceptions are logged.
        unblock: called again and again after it, until the main thread is out of the function: what that is
            blocked in may not have been there when ``abort`` ran.
        hard_timeout_s: after which a process without supervisor ends itself, if that does not help.
    """

    def __init__(
        self,
        link: Link,
        user_code: UserCode,
        atomic: threading.RLock,
        abort: Callable[[], None],
        unblock: Callable[[], None],
        hard_timeout_s: float,
    ) -> None:
        super().__init__(name="nvrx-inprocess-monitor", daemon=True)
        self._link = link
        self._user_code = user_code
        self._atomic = atomic
        self._abort = abort
        self._unblock = unblock
        self._hard_timeout_s = hard_timeout_s

    def run(self) -> None:
        while (trouble := self._link.next_trouble()) is not None:
            self._handle(trouble.iteration, trouble.message)

    def _handle(self, iteration: int, message: str) -> None:
        words = self._link.page.words
        with self._atomic:
            words[Word.ABORT_BEGUN] = time.monotonic_ns()
            try:
                self._abort()
            except BaseException:
                _log.exception("the abort of iteration %d failed; the restart goes on", iteration)
            words[Word.ABORT_ENDED] = time.monotonic_ns()
            self._link.aborted(iteration)
        self._interrupt_until_noticed(iteration, message)

    def _interrupt_until_noticed(self, iteration: int, message: str) -> None:
        """Raise again and again, ever more rarely: the function may swallow it."""
        kind = _exception(message)
        pause, patience = 0.0, time.monotonic() + self._hard_timeout_s
        with _no_del_swallows(self._user_code, kind):
            while not self._link.wait_noticed(iteration, pause):
                with self._atomic:
                    self._user_code.interrupt(kind)
                    if pause:
                        self._unblock()
                pause = min(max(_FIRST_PAUSE_S, pause * 2), _LONGEST_PAUSE_S)
                if self._link.is_unsupervised and time.monotonic() > patience:
                    _log.error("this rank hangs and its supervisor is gone: the process ends")
                    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def _no_del_swallows(user_code: UserCode, kind: type[RankShouldRestart]) -> Iterator[None]:
    """Have an exception that lands in a ``__del__``, which can't raise it, raised again right after."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, RankShouldRestart):
            before(unraisable)
        elif user_code.is_in(threading.get_ident()):
            user_code.reraise(kind)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        # Unless somebody else has put his own in front.
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _exception(message: str) -> type[RankShouldRestart]:
    """Return a class, for that is what can be raised in another thread, whose exceptions say ``message``."""

    def __init__(self: RankShouldRestart) -> None:
        BaseException.__init__(self, message)

    return type("RankShouldRestart", (RankShouldRestart,), {"__init__": __init__, "__module__": __name__})
