"""The gRPC server that agents connect to; it decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Protocol

import grpc
import grpc.aio

from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc

_log = logging.getLogger(__name__)
_GREETING_TIMEOUT_S = 60.0
_FAREWELL_S = 2.0
_BROKEN = "its connection broke: the agent, the node or its network is gone"

# grpc.aio.ServicerContext, whose type parameters are generated messages; ours are not generated.
_Context = Any


class CannotListenError(OSError):
    """The address or the port can't be had."""


class Sink(Protocol):
    """Who is told; called in the event loop, returns at once."""

    def joined(self, node: str, joined: msg.Joined, address: str) -> None:
        """``address``: where the agent's connection comes from, as gRPC names it."""
        ...

    def unusable(self, node: str, why: str) -> None: ...

    def lost(self, node: str, why: str, by_signal: bool) -> None: ...

    def message(self, node: str, message: msg.AgentMessage) -> None: ...

    async def output(self, node: str, message: msg.LogMessage) -> None:
        """May wait: the agents' output streams then wait too."""
        ...


class _Connection:
    """An agent's stream. A task sends what there is in order, and lives no longer."""

    def __init__(self, context: _Context) -> None:
        self.leaving: msg.Leaving | None = None
        self.turned_away = False
        self._context = context
        self._handler = asyncio.current_task()
        self._outbox: deque[msg.CoordinatorMessage] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._farewell: asyncio.TimerHandle | None = None

    def send(self, message: msg.CoordinatorMessage) -> None:
        self._outbox.append(message)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    def turn_away(self, why: str) -> None:
        """Say why, and end the stream a moment later.

        The agent hangs up by itself: a write of its own into an ended stream would keep it from reading why.
        """
        self.turned_away = True
        self.send(msg.Refused(why=why))

    def close(self) -> None:
        """End what still waits to be sent."""
        if self._writing is not None:
            self._writing.cancel()
        if self._farewell is not None:
            self._farewell.cancel()

    async def _write(self) -> None:
        try:
            while self._outbox:
                await self._context.write(self._outbox.popleft())
        except Exception:
            self.turned_away = True  # the stream has broken
        self._writing = None
        if self.turned_away and self._handler is not None:
            self._farewell = asyncio.get_running_loop().call_later(_FAREWELL_S, self._handler.cancel)


class AgentServer:
    """Accepts a control stream and an output stream per agent; refuses whoever lacks the token or is old."""

    def __init__(self, token: str, fence: str, welcome: msg.Welcome, sink: Sink) -> None:
        self._token = token
        self._fence = fence
        self._welcome = welcome
        self._sink = sink
        self._connections: dict[str, _Connection] = {}
        self._open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: msg.Shutdown | None = None
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        handlers: dict[str, Any] = {
            rpc.CONTROL: grpc.stream_stream_rpc_method_handler(
                self._control,
                request_deserializer=rpc.decode_agent.decode,
                response_serializer=rpc.encode,
            ),
            rpc.LOGS: grpc.stream_unary_rpc_method_handler(
                self._logs,
                request_deserializer=rpc.decode_log.decode,
                response_serializer=lambda _: b"",
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(rpc.SERVICE, handlers),))

    async def start(self, address: str, port: int = 0) -> int:
        """Listen on ``port`` of ``address``, a free one if it is 0, and return it.

        Raises:
            CannotListenError
        """
        host = f"[{address}]" if ":" in address else address
        try:
            bound = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise CannotListenError(
                f"cannot listen on {host}:{port}: it is in use, or not of this host"
            ) from error
        await self._server.start()
        return int(bound)

    def send(self, node: str, message: msg.CoordinatorMessage) -> None:
        """Queue ``message``; nothing happens if the node is gone."""
        connection = self._connections.get(node)
        if connection is not None:
            connection.send(message)

    def disconnect(self, node: str, why: str) -> None:
        """Tell the node that it is out, and end its stream."""
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.turn_away(why)

    async def shut_down(self, grace_s: float, code: int = 0) -> None:
        """Tell every agent to end, wait until their streams have closed or the time is over, then stop.

        ``code`` is the job's exit code.
        """
        self._closing = msg.Shutdown(code=code)
        for connection in self._connections.values():
            connection.send(self._closing)
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except asyncio.TimeoutError:
            _log.warning("some agents did not end within %g s", grace_s)
        await self._server.stop(grace=0)

    # --- handlers ------------------------------------------------------------------------------------

    async def _authenticate(self, context: _Context) -> None:
        if not rpc.token_matches(context.invocation_metadata() or (), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "not an agent of this job")
        await context.send_initial_metadata((rpc.GREETING,))

    def _stream_opened(self) -> None:
        self._open_streams += 1
        self._idle.clear()

    def _stream_closed(self) -> None:
        self._open_streams -= 1
        if self._open_streams == 0:
            self._idle.set()

    async def _control(self, _requests: Any, context: _Context) -> None:
        await self._authenticate(context)
        self._stream_opened()
        try:
            # One time-out for the whole greeting: each is a task, and all nodes come at once.
            agent = await asyncio.wait_for(self._greet(context), _GREETING_TIMEOUT_S)
            if agent is not None:
                await self._connected(context, *agent)
        finally:
            self._stream_closed()

    async def _greet(self, context: _Context) -> tuple[str, msg.Joined] | None:
        """Return who comes, and with what; None: nobody that can take part."""
        hello = await context.read()
        if not isinstance(hello, msg.Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with Hello")
        if hello.version != msg.PROTOCOL_VERSION or hello.fence != self._fence:
            why = f"this is {self._fence} (protocol {msg.PROTOCOL_VERSION}), not {hello.fence}"
            await context.write(msg.Refused(why=why))
            return None
        await context.write(self._welcome)
        match await context.read():
            case msg.Joined() as joined:
                return hello.node, joined
            case msg.Leaving() as leaving:
                self._sink.unusable(hello.node, leaving.why)
        return None

    async def _connected(self, context: _Context, node: str, joined: msg.Joined) -> None:
        connection = _Connection(context)
        self.disconnect(node, "another agent of this node took its place")
        self._connections[node] = connection
        if self._closing is not None:
            connection.send(self._closing)
        self._sink.joined(node, joined, context.peer())
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if isinstance(message, msg.Leaving):
                    connection.leaving = message
                if self._connections.get(node) is connection:
                    self._sink.message(node, message)
        except asyncio.CancelledError:
            if not connection.turned_away:
                raise
        finally:
            connection.close()
            if self._connections.get(node) is connection:
                del self._connections[node]
                self._sink.lost(
                    node,
                    connection.leaving.why if connection.leaving else _BROKEN,
                    connection.leaving is not None and connection.leaving.by_signal,
                )

    async def _logs(self, _requests: Any, context: _Context) -> None:
        await self._authenticate(context)
        self._stream_opened()
        try:
            node = ""
            while (message := await context.read()) is not grpc.aio.EOF:
                if isinstance(message, msg.LogHello):
                    node = message.node
                else:
                    await self._sink.output(node, message)
        finally:
            self._stream_closed()
