"""The supervisor: a small process beside a rank that outlives it.

It sees the rank's death (a pidfd becomes readable), sees from the progress page that the rank hangs, passes
on what rank and hub tell each other, and runs the hub where it is asked to. It is started with descriptors
for the rank's socket pair and page, and with its settings as JSON; it ends when neither its rank nor, for the
hub, any member needs it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from dataclasses import replace

import msgspec

from nvrx_slurm import linux
from nvrx_slurm.supervisor import messages as msg
from nvrx_slurm.supervisor.deadlines import Judgement, Timeouts, Verdict, judge
from nvrx_slurm.supervisor.hub_server import HubServer
from nvrx_slurm.supervisor.last_words import LastWords
from nvrx_slurm.supervisor.page import ProgressPage, Reading
from nvrx_slurm.supervisor.stream import Stream

_CONNECT_TIMEOUT_S = 10.0
_log = logging.getLogger("nvrx_slurm.supervisor")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor is started with."""

    member: int
    soft_timeout_s: float
    hard_timeout_s: float
    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    termination_grace_s: float
    logfile: str = ""
    pidfile: str = ""
    rank_pid: int = -1
    channel_fd: int = -1
    page_fd: int = -1


class Supervisor:
    """One rank's supervisor, on one event loop."""

    def __init__(self, settings: Settings, last_words: LastWords) -> None:
        self._settings = settings
        self._last_words = last_words
        self._timeouts = Timeouts(int(settings.soft_timeout_s * 1e9), int(settings.hard_timeout_s * 1e9))
        self._selector = selectors.DefaultSelector()
        self._page = ProgressPage(settings.page_fd)
        self._pidfd: int | None = os.pidfd_open(settings.rank_pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._rank_died)
        self._channel = Stream(
            self._selector,
            socket.socket(fileno=settings.channel_fd),
            msg.ToSupervisor,
            self._rank_said,
            self._channel_closed,
        )
        self._hub: HubServer | None = None
        self._link: Stream | None = None
        self._heard_hub = 0.0
        self._next_beat = 0.0
        self._next_silence = 0.0
        self._iteration = -1
        self._last_interrupt = -1
        self._interrupted_ns = 0
        self._soft_told = self._stuck_told = False
        self._look_at_ns = 0
        self._went_on_ns = 0
        """When this process last went on after it had stood still, and its rank with it."""
        self._kill_reason = ""
        self._sigkill_at = 0.0
        self._is_rank_done = False
        """It ended, or said that it needs nothing more."""

    def run(self) -> None:
        """Serve until nobody needs this process."""
        while not self._is_over():
            now = time.monotonic()
            timeout = max(0.0, self._next_wake() - now)
            ready = self._selector.select(timeout)
            if time.monotonic() - now - timeout > self._settings.soft_timeout_s / 4:
                # The job was suspended, or its machine: the rank could not show progress either.
                self._went_on_ns = time.monotonic_ns()
            for key, _ in ready:
                key.data()
            self._tick()
        if self._hub is not None:
            self._hub.close()

    def _is_over(self) -> bool:
        if not self._is_rank_done:
            return False
        if self._link is not None and self._link.has_unsent:
            return False
        return self._hub is None or not self._hub.is_needed

    # --- time --------------------------------------------------------------------------------------------

    def _next_wake(self) -> float:
        wake = time.monotonic() + 60.0
        if self._link is not None:
            wake = min(wake, self._next_beat)
        if self._hub is not None:
            wake = min(wake, self._next_silence)
        if self._sigkill_at:
            wake = min(wake, self._sigkill_at)
        if not self._is_rank_done:
            wake = min(wake, self._look_at_ns / 1e9)
        return wake

    def _tick(self) -> None:
        now = time.monotonic()
        if self._link is not None and now >= self._next_beat:
            self._beat(now)
        if self._hub is not None and now >= self._next_silence:
            self._next_silence = self._hub.check_silence()
        if self._sigkill_at and now >= self._sigkill_at:
            self._sigkill_at = now + self._settings.termination_grace_s
            self._signal(signal.SIGCONT, signal.SIGKILL)
        if not self._is_rank_done and time.monotonic_ns() >= self._look_at_ns:
            self._look()

    def _beat(self, now: float) -> None:
        assert self._link is not None
        period = self._settings.heartbeat_interval_s
        late = now - self._next_beat > self._settings.heartbeat_timeout_s / 2
        self._next_beat = now + period
        if late:
            # This process itself stood still: what the hub said meanwhile is still to be read.
            self._heard_hub = now
        elif now - self._heard_hub > self._settings.heartbeat_timeout_s:
            self._lose_hub(f"nothing was heard of the hub for {self._settings.heartbeat_timeout_s:g} s")
            return
        self._link.send(msg.Beat())
        self._channel.send(msg.Beat())

    def _look(self) -> None:
        """Judge the rank's progress."""
        now = time.monotonic_ns()
        # Between two looks the rank may begin another phase: often enough to be in time for its time-outs.
        soonest = now + min(self._timeouts.soft_ns // 8, 1_000_000_000)
        if self._kill_reason:
            self._look_at_ns = soonest
            return
        reading = self._page.read()
        judgement = self._judge(reading, now)
        # Before a deadline that will have moved by then there is nothing to see.
        self._look_at_ns = min(judgement.look_again_ns, soonest)
        match judgement.verdict:
            case Verdict.SOFT if not self._soft_told:
                self._soft_told = True
                self._to_hub(msg.Fault(self._iteration, "SOFT_TIMEOUT", judgement.why))
            case Verdict.STUCK if not self._stuck_told:
                self._stuck_told = True
                self._to_hub(msg.Stuck(self._iteration))
            case Verdict.HARD:
                self._kill("HARD_TIMEOUT", judgement.why)
            case Verdict.FINE:
                self._stuck_told = False
            case _:
                pass

    def _judge(self, reading: Reading, now_ns: int) -> Judgement:
        is_running = linux.thread_state(self._settings.rank_pid, reading.main_thread) == "R"
        reading = replace(reading, since_ns=max(reading.since_ns, self._went_on_ns))
        return judge(reading, self._timeouts, now_ns, self._interrupted_ns, is_running)

    # --- the rank ----------------------------------------------------------------------------------------

    def _rank_said(self, message: msg.ToSupervisor) -> None:
        match message:
            case msg.Host():
                self._host(message)
            case msg.Connect():
                self._connect(message)
            case msg.Goodbye():
                self._rank_done()
            case msg.Enter():
                self._begin(message.iteration)
                self._to_hub(message)
            case _:
                self._to_hub(message)

    def _begin(self, iteration: int) -> None:
        self._iteration = iteration
        # An interruption may have been faster than the rank's own entry.
        if self._last_interrupt != iteration:
            self._interrupted_ns = 0
        self._soft_told = self._stuck_told = False
        self._look_at_ns = 0

    def _channel_closed(self, why: str) -> None:
        """The rank's threads are gone, or it closed the channel: without that nothing can be told to it."""
        if self._pidfd is None:
            self._rank_done()

    def _rank_died(self) -> None:
        assert self._pidfd is not None
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        kind, _, why = self._kill_reason.partition(":")
        self._to_hub(msg.Leave(self._iteration, kind or "TERMINATED", why or "its process ended"))
        self._rank_done()

    def _rank_done(self) -> None:
        self._is_rank_done = True
        self._last_words.close()
        self._sigkill_at = 0.0
        self._channel.close()
        if self._link is not None:
            self._to_hub(msg.Leave(self._iteration))

    def _kill(self, kind: str, why: str) -> None:
        if self._kill_reason:
            return
        self._last_words.say(self._settings.member, why)
        self._kill_reason = f"{kind}:{why}"
        self._to_hub(msg.Fault(self._iteration, kind, why))
        self._sigkill_at = time.monotonic() + self._settings.termination_grace_s
        self._signal(signal.SIGCONT, signal.SIGTERM)

    def _signal(self, *signals: signal.Signals) -> None:
        if self._pidfd is not None:
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    # --- the hub -----------------------------------------------------------------------------------------

    def _host(self, host: msg.Host) -> None:
        # Each member has a connection, and one more for the store while it uses that.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        try:
            self._hub = HubServer(self._selector, host, self._settings.heartbeat_timeout_s)
        except OSError as error:
            self._channel.send(msg.HubLost(f"the hub can't listen on port {host.port}: {error.strerror}"))
            return
        self._channel.send(msg.Hosting(self._hub.port))

    def _connect(self, connect: msg.Connect) -> None:
        if self._hub is not None:
            addresses: tuple[tuple[str, int], ...] = (("localhost", self._hub.port), *connect.addresses)
        else:
            addresses = connect.addresses
        refusals = []
        for address in addresses:
            try:
                connection = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
            except OSError as error:
                refusals.append(f"{address[0]}:{address[1]} {error.strerror or error}")
                continue
            now = time.monotonic()
            self._heard_hub, self._next_beat = now, now + self._settings.heartbeat_interval_s
            self._link = Stream(self._selector, connection, msg.FromHub, self._hub_said, self._lose_hub)
            self._link.send(connect.join)
            return
        self._channel.send(msg.HubLost("the hub of rank 0 can't be reached: " + ", ".join(refusals)))

    def _hub_said(self, message: msg.FromHub) -> None:
        self._heard_hub = time.monotonic()
        match message:
            case msg.Beat() | msg.StoreReply():
                return
            case msg.OthersWait():
                self._others_wait(message.iteration)
                return
            case msg.Interrupt():
                self._last_interrupt = message.iteration
                self._interrupted_ns = time.monotonic_ns()
                self._look_at_ns = 0
            case msg.Dismiss():
                self._channel.send(message)
                if self._link is not None:
                    self._link.close()
                    self._link = None
                return
            case _:
                pass
        self._channel.send(message)

    def _others_wait(self, iteration: int) -> None:
        if iteration != self._iteration or self._is_rank_done:
            return
        reading = self._page.read()
        judgement = self._judge(reading, time.monotonic_ns())
        if judgement.verdict in (Verdict.STUCK, Verdict.HARD):
            self._kill("HARD_TIMEOUT", f"{judgement.why}, and all others wait for it")
        else:
            self._stuck_told = False

    def _lose_hub(self, why: str) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._channel.send(msg.HubLost(why))

    def _to_hub(self, message: msg.Message) -> None:
        if self._link is not None:
            self._link.send(message)


def _detach(settings: Settings) -> LastWords:
    """Become a process of its own: no child that the rank's code could wait for, deaf to its signals."""
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    linux.set_process_name("nvrx-supervisor")
    os.chdir("/")
    log_fd = _open_users_files(settings)
    last_words = LastWords()
    sink = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(sink, fd)
    os.close(sink)
    if log_fd is not None:
        os.dup2(log_fd, 2)
    return last_words


def _open_users_files(settings: Settings) -> int | None:
    """Open what the user has asked for, while there is a standard error to complain to; return the log."""
    log_fd, name = None, "monitor_process_logfile"
    try:
        if settings.logfile:
            log = open(settings.logfile, "a")  # noqa: SIM115 - it lives as long as this process
            logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
            log_fd = log.fileno()
        name = "monitor_process_pidfile"
        if settings.pidfile:
            with open(settings.pidfile, "w") as file:
                file.write(f"{os.getpid()}\n")
    except OSError as error:
        sys.exit(f"nvrx_slurm.inprocess: {name} can't be written: {error}")
    return log_fd


def main() -> None:
    """Run the supervisor; ``sys.argv[2]`` has its settings."""
    settings = msgspec.json.decode(sys.argv[2].encode(), type=Settings)
    last_words = _detach(settings)
    with contextlib.suppress(ProcessLookupError):
        Supervisor(settings, last_words).run()
