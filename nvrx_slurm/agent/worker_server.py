"""The warm worker server: one process per node that has imported torch and forks the ranks.

A rank forked here runs the user's script at once, where a new interpreter spends seconds importing. The
server is single-threaded and initialises neither CUDA nor a process group, so a fork of it is a clean start;
if a preloaded module broke that, ranks are executed in new interpreters instead and the reason is told.

It is a subreaper: whatever a rank leaves behind becomes its child, and :class:`KillEverything` leaves
nothing. It dies with its agent, and the ranks die with it.

Started by the agent only.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from nvrx_slurm import interpreter, linux
from nvrx_slurm.agent import server_protocol as protocol
from nvrx_slurm.agent.become_rank import become_rank
from nvrx_slurm.agent.preload import preload, why_not_forkable
from nvrx_slurm.wire import checkpoint_writer
from nvrx_slurm.wire.messages import ProgramKind

_MAX_FDS = 253  # SCM_MAX_FD, linux/include/net/scm.h


class WorkerServer:
    """Forks ranks, tells of their exits, kills what they leave."""

    def __init__(self, channel: socket.socket, why_not_warm: str) -> None:
        self._channel = channel
        self._why_not_warm = why_not_warm
        self._ranks: dict[int, int] = {}
        """Rank of each rank process that has not been reaped."""
        self._whole_groups = False
        """The program is not Python: a shell, for instance, that waits for what it has started."""
        self._clearing = False
        self._writers_until = 0.0
        """While clearing: when the processes that write checkpoints are killed, too (monotonic)."""
        self._writers_killed: set[int] = set()
        self._wakeup_pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> Callable[[], None]:
        """Serve until the agent is gone (does not return then), or return what to run in a forked rank."""
        wakeup, wakeup_write = self._wakeup_pipe
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The agent decides; a signal to the whole job must not take the server before its ranks are stopped.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            readable, _, _ = select.select([self._channel.fileno(), wakeup], [], [], self._patience_s())
            if not readable:
                self._kill_some()
            if wakeup in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wakeup, 4096)
                self._reap()
            if self._channel.fileno() in readable:
                data, fds = self._receive()
                if not data:
                    linux.kill_descendants()
                    os._exit(0)
                in_rank = self._handle(protocol.decode_request.decode(data), fds)
                if in_rank is not None:
                    return in_rank

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            data, ancillary, _, _ = self._channel.recvmsg(
                protocol.MAX_PACKET_BYTES, socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
            )
        except ConnectionResetError:
            # The agent was killed before it had read what this server told it.
            return b"", []
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        for fd in fds:
            os.set_inheritable(fd, False)
        return data, list(fds)

    def _reply(self, reply: protocol.Reply) -> None:
        try:
            self._channel.send(protocol.encode(reply), socket.MSG_NOSIGNAL)
        except OSError:
            linux.kill_descendants()
            os._exit(0)

    def _handle(self, request: protocol.Request, fds: list[int]) -> Callable[[], None] | None:
        match request:
            case protocol.StartRanks():
                return self._start(fds)
            case protocol.SignalRanks():
                for pid, rank in self._ranks.items():
                    if request.ranks is None or rank in request.ranks:
                        self._signal(pid, signal.Signals(request.signal))
            case protocol.KillEverything():
                self._clearing = True
                self._writers_until = time.monotonic() + request.writers_s
                self._writers_killed.clear()
                self._kill_some()
        return None

    def _patience_s(self) -> float | None:
        """How long nothing may happen: until the writers' time is over, if they are what is left."""
        left = self._writers_until - time.monotonic()
        return left if self._clearing and left > 0 else None

    def _signal(self, pid: int, sig: signal.Signals) -> None:
        """Signal a rank: of a Python program the main process alone when it is asked to stop.

        Its data-loader workers would be gone before it has saved.
        """
        if self._whole_groups or sig in (signal.SIGKILL, signal.SIGCONT):
            _signal_group(pid, sig)
        else:
            os.kill(pid, sig)

    # --- starting ------------------------------------------------------------------------------------

    def _start(self, fds: list[int]) -> Callable[[], None] | None:
        pids: list[int] = []
        try:
            if not fds:
                raise OSError("the order has not come")
            order, outputs = protocol.read_order(fds[0]), fds[1:]
            why_cold = self._why_cold(order)
            self._whole_groups = order.program.kind is ProgramKind.EXECUTABLE
            if len(outputs) != len(order.ranks):
                raise OSError(f"{len(outputs)} output pipes for {len(order.ranks)} ranks")
            for spec, fd in zip(order.ranks, outputs, strict=True):
                pid = self._fork()
                if pid == 0:
                    return become_rank(order, spec, fd, cold=bool(why_cold))
                self._ranks[pid] = spec.rank
                pids.append(pid)
        except OSError as error:
            self._reply(protocol.StartError(why=f"cannot start ranks: {error}"))
        else:
            self._reply(protocol.Started(pids=pids, warm=not why_cold, why_cold=why_cold))
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
        return None

    def _why_cold(self, order: protocol.StartOrder) -> str:
        if order.program.kind is ProgramKind.EXECUTABLE:
            return "it is not a Python program"
        if not order.warm:
            return "warm start is switched off"
        return self._why_not_warm or why_not_forkable()

    def _fork(self) -> int:
        parent = os.getpid()
        # The child must not run our handlers, nor lose a signal that comes before it has its own.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        try:
            pid = os.fork()
            if pid == 0:
                os.setsid()
                linux.die_with_parent(signal.SIGKILL, parent)
                signal.set_wakeup_fd(-1)
                for sig in (signal.SIGCHLD, signal.SIGTERM):
                    signal.signal(sig, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._channel.close()
                for fd in self._wakeup_pipe:
                    os.close(fd)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    # --- ending --------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            rank = self._ranks.pop(pid, None)
            if rank is not None:
                self._reply(protocol.Exited(rank=rank, exit=os.waitstatus_to_exitcode(status)))
        if self._clearing:
            self._kill_some()

    def _kill_some(self) -> None:
        """Kill what is there; the next SIGCHLD comes back here until nothing is.

        A writer outlives its rank by ``writers_s`` at most, and is gone before anything of the next cycle
        starts: it is spared here, and :class:`Cleared` waits for it.
        """
        in_time = time.monotonic() < self._writers_until
        writers: set[int] = set()

        def is_writer(pid: int) -> bool:
            found = interpreter.runs(pid, checkpoint_writer.MODULE)
            if found:
                writers.add(pid)
            return found

        below = linux.descendants_of(os.getpid(), without=is_writer if in_time else None)
        alive = [pid for pid in below if linux.process_state(pid) not in ("", "Z")]
        if not in_time:
            self._writers_killed.update(filter(is_writer, alive))
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = alive or [pid for pid in writers if linux.process_state(pid) not in ("", "Z")]
        if not left and not self._ranks:
            self._clearing = False
            self._reply(protocol.Cleared(writers_killed=len(self._writers_killed)))


def _signal_group(pid: int, sig: int) -> None:
    """Signal the process group of a rank, which has not been reaped."""
    try:
        os.killpg(pid, sig)
    except ProcessLookupError:
        # It has not come to its setsid(2) yet.
        os.kill(pid, sig)


def main() -> NoReturn:
    """Entry point; the agent passes the socket and its own process id in the environment."""
    channel = socket.socket(fileno=int(os.environ.pop(protocol.FD_VARIABLE)))
    channel.set_inheritable(False)
    linux.die_with_parent(signal.SIGKILL, int(os.environ.pop(protocol.PARENT_VARIABLE)))
    linux.become_subreaper()
    linux.set_process_name("nvrx-warm")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # After the interpreter's own and the name of this module (nvrx_slurm.interpreter).
    modules = sys.argv[2:]
    why_not_warm = "" if protocol.NO_PRELOAD in modules else preload(modules)
    in_rank = WorkerServer(channel, why_not_warm).serve()
    in_rank()
    sys.exit(0)
