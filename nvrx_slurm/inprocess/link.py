"""A rank's connection to its supervisor: what has been heard of the iteration, and waiting for it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, format_interruption_records
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.progress_watchdog import ProgressWatchdog
from nvrx_slurm.interpreter import command_for
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.page import Phase, ProgressPage
from nvrx_slurm.supervisor.process import Settings

_START_TIMEOUT_S = 60.0
"""For a supervisor to come up on a busy machine."""
_READ_BYTES = 256 * 1024


@dataclass(frozen=True)
class Trouble:
    """Why the function is to be interrupted."""

    iteration: int
    message: str


class Link:
    """One call's supervisor process, and the thread that listens to it.

    Args:
        settings: of the supervisor; its process and descriptors are filled in here.
        tick_s: how often the main thread is asked for a sign of life.
    """

    def __init__(self, settings: Settings, tick_s: float) -> None:
        self.page = ProgressPage()
        self._tick_s = tick_s
        self._changed = threading.Condition()
        self._iteration = -1
        self._joined = False
        self.is_queued = False
        """The others have begun without this rank."""
        self._admitted: msg.Admitted | None = None
        self._port = 0
        self._interrupt: msg.Interrupt | None = None
        self._interrupted_at = 0.0
        self._release: msg.Release | None = None
        self._any_completed = self._done = -1
        self._aborted = self._noticed = self._handled = -1
        self._lost = ""
        self._is_closed = False
        self.is_unsupervised = False
        """The supervisor has ended before the call, or stands still: nobody else ends a rank that hangs."""
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair()
        self._send_lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="nvrx-inprocess-link", daemon=True)

    def start(self) -> None:
        """Start the supervisor.

        Raises:
            InternalError: it can't be started.
        """
        self.page.set_phase(Phase.WAITING, time.monotonic_ns())
        settings = msgspec.structs.replace(
            self._settings, rank_pid=os.getpid(), channel_fd=self._theirs.fileno(), page_fd=self.page.fd
        )
        try:
            self._process = subprocess.Popen(
                command_for("nvrx_slurm.supervisor.process", msgspec.json.encode(settings).decode()),
                pass_fds=(self._theirs.fileno(), self.page.fd),
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise InternalError(f"the supervisor can't be started: {error}") from error
        finally:
            self._theirs.close()
        self._thread.start()

    def close(self) -> None:
        """Let the supervisor go, and end the thread; the page stays. May be called again."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        # Afterwards: that the supervisor then ends is no trouble.
        self.send(msg.Goodbye())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._theirs.close()
        self._socket.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_START_TIMEOUT_S)

    def send(self, message: msg.Message) -> None:
        """Tell the supervisor; that it is gone is noticed where its answer is waited for."""
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(msg.frame(message))

    # --- finding the hub ---------------------------------------------------------------------------------

    def host(self, token: str, world_size: int, rejoin: bool) -> int:
        """Have the supervisor run the hub; return its port.

        Raises:
            InternalError: it can't.
        """
        self.send(msg.Host(token, world_size, rejoin=rejoin))
        self._wait(lambda: self._port > 0, _START_TIMEOUT_S, "to start the supervisor")
        return self._port

    def join(self, addresses: tuple[tuple[str, int], ...], join: msg.Join) -> None:
        """Have the supervisor go to the hub."""
        self.send(msg.Connect(addresses, join))

    def wait_joined(self, timeout_s: float) -> bool:
        """Wait until all ranks have joined, or have begun already; False: they have not in time.

        Raises:
            InternalError: they never will.
        """
        return self._wait(lambda: self._joined or self.is_queued, timeout_s)

    def wait_admitted(self) -> msg.Admitted | None:
        """Wait until the next iteration begins, for a rank that came later; None: the call has ended.

        Raises:
            InternalError: there is no hub any more.
        """
        self._wait(lambda: self._admitted is not None or self._done >= 0, None)
        return self._admitted

    # --- iterations --------------------------------------------------------------------------------------

    def enter(self, iteration: int, rank: int, world_size: int) -> None:
        """Begin an iteration."""
        with self._changed:
            self._iteration = iteration
        self.send(msg.Enter(iteration, rank, world_size))

    @property
    def is_interrupted(self) -> bool:
        """Whether the function should not run on."""
        return self._is_iteration_interrupted() or bool(self._lost)

    def _is_iteration_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.iteration == self._iteration

    @property
    def interrupted_at(self) -> float:
        """When this rank heard of the current iteration's interruption (time.monotonic())."""
        return self._interrupted_at

    def wait_aborted(self, timeout_s: float) -> bool:
        """Wait until the current iteration has been interrupted and its abort is over.

        Raises:
            InternalError: there is no hub any more.
        """
        return self._wait(lambda: self._aborted >= self._iteration, timeout_s)

    def wait_release(self, timeout_s: float) -> msg.Release | None:
        """Wait until all have arrived; None: they have not in time.

        Raises:
            InternalError: there is no hub any more.
        """
        self._wait(
            lambda: self._release is not None and self._release.iteration == self._iteration, timeout_s
        )
        release = self._release
        return release if release is not None and release.iteration == self._iteration else None

    def wait_any_completed(self) -> bool:
        """Wait until some rank's function has returned; False: the iteration is interrupted instead.

        Raises:
            InternalError: there is no hub any more.
        """
        self._wait(lambda: self._any_completed >= self._iteration or self._is_iteration_interrupted(), None)
        return self._any_completed >= self._iteration and not self._is_iteration_interrupted()

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until all have completed or the iteration is interrupted; False: neither in time.

        Raises:
            InternalError: there is no hub any more.
        """
        return self._wait(lambda: self.is_done or self._is_iteration_interrupted(), timeout_s)

    @property
    def is_done(self) -> bool:
        """Whether all have completed this iteration."""
        return self._done >= self._iteration

    # --- between the main thread and the one that interrupts it ------------------------------------------

    def next_trouble(self) -> Trouble | None:
        """Wait for the next interruption that has not been handled; None: the call is over."""
        with self._changed:
            while not self._is_closed:
                if self._lost and self._handled < 2**62:
                    self._handled = 2**62
                    return Trouble(self._iteration, self._lost)
                interrupt = self._interrupt
                if interrupt is not None and interrupt.iteration > self._handled:
                    self._handled = interrupt.iteration
                    return Trouble(interrupt.iteration, describe(interrupt.records))
                self._changed.wait()
            return None

    def aborted(self, iteration: int) -> None:
        """The abort of ``iteration`` is over."""
        with self._changed:
            self._aborted = iteration
            self._changed.notify_all()

    def notice(self) -> None:
        """The main thread knows of the interruption: it need not be interrupted any more."""
        with self._changed:
            self._noticed = self._iteration
            self._changed.notify_all()

    def wait_noticed(self, iteration: int, timeout_s: float) -> bool:
        """Wait until the main thread knows, or the call is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._noticed >= iteration or self._is_closed, timeout_s)

    # --- the thread --------------------------------------------------------------------------------------

    def _wait(self, is_there: Callable[[], bool], timeout_s: float | None, what: str = "") -> bool:
        with self._changed:
            came = self._changed.wait_for(lambda: is_there() or bool(self._lost), timeout_s)
            if self._lost and not is_there():
                raise InternalError(f"in-process restart has ended: {self._lost}")
        if not came and what:
            raise InternalError(f"it took more than {timeout_s:g} s {what}")
        return came

    def _listen(self) -> None:
        watchdog = ProgressWatchdog(self.page)
        reader: msg.FrameReader[msg.FromSupervisor] = msg.FrameReader(msg.FromSupervisor)
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        next_tick = time.monotonic()
        silence_s = self._settings.heartbeat_timeout_s
        # Beats begin once the supervisor has joined the hub, and end when it has lost that.
        heard = math.inf
        while not self._is_closed:
            left = next_tick - time.monotonic()
            if left <= 0:
                watchdog.tick()
                if -left > silence_s / 2:
                    # This process itself stood still: what the supervisor said is still to be read.
                    heard = max(heard, time.monotonic())
                elif time.monotonic() - heard > silence_s and not self._lost:
                    self._unsupervised(f"nothing was heard of this rank's supervisor for {silence_s:g} s")
                    return
                next_tick = time.monotonic() + self._tick_s
                continue
            if not poll.poll(left * 1000):
                continue
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self._unsupervised("this rank's supervisor process has ended")
                return
            for message in reader.feed(data):
                if isinstance(message, msg.Beat | msg.Joined):
                    heard = time.monotonic()
                self._take(message)

    def _unsupervised(self, why: str) -> None:
        self.is_unsupervised = not self._is_closed
        self._take(msg.HubLost(why))

    def _take(self, message: msg.FromSupervisor) -> None:
        with self._changed:
            match message:
                case msg.Hosting():
                    self._port = message.port
                case msg.Joined():
                    self._joined = True
                case msg.Queued():
                    self.is_queued = True
                case msg.Admitted():
                    self._admitted = message
                case msg.Interrupt():
                    self._interrupt = message
                    self._interrupted_at = time.monotonic()
                case msg.Release():
                    self._release = message
                case msg.AnyCompleted():
                    self._any_completed = message.iteration
                case msg.Done():
                    self._done = message.iteration
                case msg.Dismiss() | msg.HubLost():
                    self._lost = self._lost or message.why
                case _:
                    pass
            self._changed.notify_all()


def describe_with_reason(records: tuple[msg.Record, ...]) -> str:
    """Return what happened, and the reason of one rank, in one line."""
    # Exceptions may be what another rank's end has brought about.
    known = sorted(
        (record for record in records if record.why), key=lambda record: record.kind == "EXCEPTION"
    )
    if not known:
        return describe(records)
    return f"{describe(records)} (rank {known[0].rank}: {' '.join(known[0].why.split())})"


def describe(records: tuple[msg.Record, ...]) -> str:
    """Return what happened, in one line."""
    return format_interruption_records(
        InterruptionRecord(record.rank, Interruption[record.kind]) for record in records
    )
