"""Work in a child process that may hang, crash or never die, without the parent doing any of that.

A process in the kernel's D state (a dead NFS server, a GPU that is gone) does not even hear SIGKILL. So a
child that is late is killed and never waited for; the kernel reaps it when our process is gone. It holds
nothing of ours, not even standard output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

_T = TypeVar("_T")
_HEADER = struct.Struct("=I")
_CHUNK = 64 * 1024
_MOST_BYTES = 16 << 20
_EXIT_S = 0.5
_DEATH_S = 0.02
"""Of a process that is killed, unless the kernel holds it."""
Emit = Callable[[object], None]


class Child:
    """One forked process; what it emits arrives as JSON messages."""

    def __init__(self, work: Callable[[Emit], None], limit_s: float) -> None:
        """Fork; ``work`` runs in the child, which ends itself after ``limit_s`` should the parent be gone.

        Raises:
            OSError: no process or pipe is to be had.
        """
        self.descriptor, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.descriptor)
            os.close(writer)
            raise
        if self.pid == 0:
            _serve(work, writer, limit_s)
        os.close(writer)
        self._buffer = b""
        self._killed = False
        self.ended = False
        """Nothing comes any more."""

    def receive(self) -> list[bytes]:
        """Return the messages that are complete; to be called when the descriptor is readable."""
        chunk = os.read(self.descriptor, _CHUNK)
        self.ended = not chunk
        self._buffer += chunk
        messages = []
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > _MOST_BYTES:
                self.kill()
                self.ended = True
                break
            if len(self._buffer) < _HEADER.size + length:
                break
            messages.append(self._buffer[_HEADER.size : _HEADER.size + length])
            self._buffer = self._buffer[_HEADER.size + length :]
        return messages

    def kill(self) -> None:
        """End it, without waiting for its end."""
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> str:
        """Kill what is left; return how the process ended, as far as that is known."""
        # Its end of the pipe is closed a moment before it can be waited for.
        settled = self.ended and _ends(self.pid, _EXIT_S)
        self.kill()
        os.close(self.descriptor)
        if not settled:
            _ends(self.pid, _DEATH_S)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return "does not end"
        code = os.waitstatus_to_exitcode(status)
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _ends(pid: int, patience_s: float) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], patience_s)[0])
    finally:
        os.close(descriptor)


def _serve(work: Callable[[Emit], None], writer: int, limit_s: float) -> None:
    """Never return."""
    code = 1
    try:
        writer = _let_go_of_all_but(writer)
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE):
            signal.signal(sig, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.setitimer(signal.ITIMER_REAL, limit_s)

        def emit(value: object) -> None:
            message = msgspec.json.encode(value)
            view = memoryview(_HEADER.pack(len(message)) + message)
            while view:
                view = view[os.write(writer, view) :]

        work(emit)
        code = 0
    finally:
        os._exit(code)


def _let_go_of_all_but(writer: int) -> int:
    """Close what came from the parent, and return the descriptor that ``writer`` is now.

    A child that can't die would keep the parent's pipes open for ever, and whoever reads what the parent
    prints would wait for ever: slurmd, or an agent.
    """
    writer = fcntl.fcntl(writer, fcntl.F_DUPFD_CLOEXEC, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.closerange(3, writer)
    os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
    return writer


@dataclass(frozen=True)
class Answer(Generic[_T]):
    """What came of one call: a value, or why there is none."""

    value: _T | None
    late: bool = False
    trouble: str = ""


class _Reply(msgspec.Struct):
    error: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")


def call_isolated(
    calls: Mapping[str, Callable[[], object]], timeout_s: float, kind: type[_T]
) -> dict[str, Answer[_T]]:
    """Make every call in a child process of its own, all at the same time; return within ``timeout_s``.

    ``kind`` is the type of what they return, and must be one that JSON can carry.
    """
    answers: dict[str, Answer[_T]] = {}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        children: dict[str, Child] = {}
        for name, call in calls.items():
            try:
                children[name] = Child(_emitting(call), timeout_s + 1.0)
            except OSError as error:
                answers[name] = Answer(None, trouble=f"no process for it: {error.strerror}")
            else:
                selector.register(children[name].descriptor, selectors.EVENT_READ, name)
        while children and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                name = key.data
                child = children[name]
                for message in child.receive():
                    answers[name] = _answer(message, kind)
                if child.ended:
                    selector.unregister(child.descriptor)
                    how = children.pop(name).close()
                    answers.setdefault(name, Answer(None, trouble=f"its process {how}"))
        for name, child in children.items():
            child.close()
            answers.setdefault(name, Answer(None, late=True, trouble=f"no answer within {timeout_s:g} s"))
    return answers


def _emitting(call: Callable[[], object]) -> Callable[[Emit], None]:
    def work(emit: Emit) -> None:
        try:
            reply = _Reply(value=msgspec.Raw(msgspec.json.encode(call())))
        except Exception as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            reply = _Reply(error=said or type(error).__name__)
        emit(reply)

    return work


def _answer(message: bytes, kind: type[_T]) -> Answer[_T]:
    reply = msgspec.json.decode(message, type=_Reply)
    if reply.error:
        return Answer(None, trouble=reply.error)
    return Answer(msgspec.json.decode(reply.value, type=kind))
