"""The agent's side of the worker server: start it, send requests, hear of exits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from nvrx_slurm.agent import server_protocol as protocol
from nvrx_slurm.agent.server_protocol import Reply
from nvrx_slurm.interpreter import command_for

_log = logging.getLogger(__name__)


class WorkerServerProcess:
    """One running worker server.

    ``on_reply`` is called in the event loop with every reply, and with None once the server is gone.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        preload: Sequence[str] | None,
        on_reply: Callable[[Reply | None], None],
    ) -> None:
        """Start the server; it imports torch and the modules ``preload``, None: nothing, meanwhile.

        Needs a running event loop.

        Raises:
            OSError: the interpreter cannot be started.
        """
        self.started = time.monotonic()
        self._on_reply = on_reply
        self._loop = asyncio.get_running_loop()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        modules = [protocol.NO_PRELOAD] if preload is None else preload
        with theirs:
            self._process = subprocess.Popen(
                command_for("nvrx_slurm.agent.worker_server", *modules),
                env={
                    **environ,
                    protocol.FD_VARIABLE: str(theirs.fileno()),
                    protocol.PARENT_VARIABLE: str(os.getpid()),
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._readable)
        self._open = True
        self._loop.add_signal_handler(signal.SIGCHLD, self._continue_if_stopped)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_ranks(self, order: protocol.StartOrder, pipes: Sequence[int]) -> None:
        """Start one process per rank with its output on the pipe of the same position.

        Raises:
            OSError: the server is gone.
        """
        written = protocol.write_order(order)
        try:
            socket.send_fds(self._channel, [protocol.encode(protocol.StartRanks())], [written, *pipes])
        finally:
            os.close(written)

    def signal_ranks(self, sig: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Signal ``ranks``, by default all; who gets it: see :class:`protocol.SignalRanks`."""
        self._send(protocol.SignalRanks(signal=sig, ranks=None if ranks is None else list(ranks)))

    def kill_everything(self, writers_s: float) -> None:
        """Kill all below the server; what writes checkpoints only after ``writers_s``, if it has not ended"""
        self._send(protocol.KillEverything(writers_s=writers_s))

    def close(self) -> None:
        """Let the server go: it kills everything below it, then exits."""
        if self._open:
            self._open = False
            self._loop.remove_signal_handler(signal.SIGCHLD)
            self._loop.remove_reader(self._channel)
            self._channel.close()

    async def wait(self) -> None:
        """Wait until the server's process has ended."""
        await self._loop.run_in_executor(None, self._process.wait)

    def _send(self, request: protocol.Request) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(protocol.encode(request), socket.MSG_NOSIGNAL)

    def _continue_if_stopped(self) -> None:
        """A server that a rank or a person has stopped would not notice exits; its parent is told of it.

        Not of one that a debugger has stopped: that is told instead.
        """
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None:
                _log.warning("somebody has stopped the worker server: continued")
                os.kill(self.pid, signal.SIGCONT)

    def _readable(self) -> None:
        try:
            data = self._channel.recv(protocol.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_reply(protocol.decode_reply.decode(data))
        else:
            self.close()
            self._on_reply(None)
