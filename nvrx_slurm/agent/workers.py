"""The agent's side of the worker server: start it, send requests, hear of exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from nvrx_slurm.agent import server_protocol as protocol
from nvrx_slurm.agent.server_protocol import RankSpec, Reply
from nvrx_slurm.interpreter import command_for
from nvrx_slurm.wire.messages import Program


class WorkerServerProcess:
    """One running worker server.

    ``on_reply`` is called in the event loop with every reply, and with None once the server is gone.
    """

    def __init__(
        self, environ: Mapping[str, str], preload: bool, on_reply: Callable[[Reply | None], None]
    ) -> None:
        """Start the server; with ``preload`` it imports torch while the caller goes on.

        Needs a running event loop.

        Raises:
            OSError: the interpreter cannot be started.
        """
        self.started = time.monotonic()
        self._on_reply = on_reply
        self._loop = asyncio.get_running_loop()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                command_for("nvrx_slurm.agent.worker_server", *([] if preload else [protocol.NO_PRELOAD])),
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_ranks(
        self, program: Program, ranks: Sequence[RankSpec], pipes: Sequence[int], *, warm: bool
    ) -> None:
        """Start one process per rank with its output on the pipe of the same position.

        Raises:
            OSError: the server is gone.
        """
        request = protocol.StartRanks(program=program, ranks=list(ranks), warm=warm)
        packet = protocol.encode(request)
        if len(packet) > protocol.MAX_PACKET_BYTES:
            limit = protocol.MAX_PACKET_BYTES
            raise OSError(f"the ranks' arguments take {len(packet)} bytes; {limit} are possible")
        socket.send_fds(self._channel, [packet], list(pipes))

    def signal_ranks(self, sig: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Signal the process groups of ``ranks``, by default of all."""
        self._send(protocol.SignalRanks(signal=sig, ranks=None if ranks is None else list(ranks)))

    def kill_everything(self) -> None:
        self._send(protocol.KillEverything())

    def close(self) -> None:
        """Let the server go: it kills everything below it, then exits."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._channel)
            self._channel.close()

    async def wait(self) -> None:
        """Wait until the server's process has ended."""
        await self._loop.run_in_executor(None, self._process.wait)

    def _send(self, request: protocol.Request) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(protocol.encode(request), socket.MSG_NOSIGNAL)

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
