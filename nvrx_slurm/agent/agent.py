"""The node's agent: one stream to the Coordinator, from which it takes its orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec

from nvrx_slurm.agent import pulse
from nvrx_slurm.agent.environment import SlotsError, resolve_slots
from nvrx_slurm.agent.exit_codes import (
    EXIT_COORDINATOR_GONE,
    EXIT_COORDINATOR_SILENT,
    EXIT_EXCLUDED,
    EXIT_OK,
    EXIT_USAGE,
)
from nvrx_slurm.agent.health_watch import HealthWatch
from nvrx_slurm.agent.location import DomainError, Fabric, NvmlFabric, find_domain, locate
from nvrx_slurm.agent.node_workers import NodeWorkers
from nvrx_slurm.agent.output import OutputPump
from nvrx_slurm.agent.private_places import staging_place
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc
from nvrx_slurm.wire.node_options import NodeOptions

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 60.0
_LAST_OUTPUT_TIMEOUT_S = 10.0
_HANG_UP_TIMEOUT_S = 3.0
_DOMAIN_TIMEOUT_S = 10.0
_SILENT_S = 3.0
"""Who lives answers in less."""

# grpc.aio's calls; their type parameters are of no use with our own codecs.
_Control = Any
_STREAM_BROKEN = (grpc.aio.AioRpcError, asyncio.InvalidStateError)


class _UnreachableError(Exception):
    """The connection has failed before the Coordinator said anything."""


@dataclass(frozen=True)
class OwnLauncher:
    """What a launcher on this node decides for this node's ranks, where the agent came by itself."""

    program: msg.Program
    nproc_per_node: str
    role: str
    """Must be the Coordinator's."""
    warm_start: bool
    virtual_local_rank: bool
    term_timeout_s: float
    """From a signal to the agent, which the ranks get too, to SIGKILL."""
    connect_timeout_s: float
    """How long the Coordinator may take to be there."""
    show: Callable[[int, int, bytes], None]
    """Told of all output, with rank and local rank, and of its end; returns at once."""
    place: int | None = None
    """See :class:`Joined`."""

    def adapt(self, welcome: msg.Welcome) -> msg.Welcome:
        """Return what holds on this node.

        Raises:
            SlotsError: this node can't be of one job with the Coordinator's.
        """
        if self.role != welcome.role:
            raise SlotsError(f"--role is {self.role} here and {welcome.role} where the job is coordinated")
        return msgspec.structs.replace(
            welcome,
            program=self.program,
            nproc_per_node=self.nproc_per_node,
            warm_start=self.warm_start,
            virtual_local_rank=self.virtual_local_rank,
        )


@dataclass(frozen=True)
class AgentConfig:
    """Where the agent belongs."""

    coordinator: str
    """``host:port``."""
    token: str
    fence: str
    node: str
    private_dir: Path
    environ: Mapping[str, str]
    """The ranks' environment before anything of ours; holds no secret."""
    own: OwnLauncher | None = None
    """None: nvrx-srun has started this agent, and the Coordinator decides everything."""
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    """Those that ask it to go."""
    fabric: Fabric = field(default_factory=NvmlFabric)
    """Tells the NVLink domain, where segments are asked for."""


class Agent:
    """Runs until the Coordinator shuts it down, the connection is lost, or a signal comes."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._outbox: asyncio.Queue[msg.AgentMessage | None] = asyncio.Queue()
        self._signalled: asyncio.Future[signal.Signals] | None = None
        self._reading: asyncio.Task[int] | None = None
        self._signalled_again = asyncio.Event()
        self._parent = os.getppid()
        self.job_code: int | None = None
        """The job's exit code, once the Coordinator has told it."""
        self._closing = False
        """Nothing that the Coordinator says counts any more."""

    async def run(self) -> int:
        """Serve, and leave no process behind.

        Returns:
            0 after an orderly shutdown, 1 when the Coordinator is gone, 2 when this node can't be used as
            asked, 3 when the Coordinator excluded it, 4 when the host of the Coordinator has fallen silent,
            128 + signal after a signal.
        """
        loop = asyncio.get_running_loop()
        self._signalled = loop.create_future()
        for sig in self._config.signals:
            loop.add_signal_handler(sig, self._on_signal, sig)
        beating = asyncio.create_task(pulse.beat())
        try:
            return await self._serve()
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def _serve(self) -> int:
        address = self._config.coordinator
        async with grpc.aio.insecure_channel(address, options=rpc.CLIENT_OPTIONS) as channel:
            try:
                return await self._session(channel)
            except asyncio.TimeoutError:
                _log.error("the Coordinator at %s did not answer in %g s", address, self._patience_s)
            except grpc.aio.AioRpcError as error:
                _log.error("the Coordinator at %s is gone: %s", address, error.details())
            except asyncio.InvalidStateError:
                _log.error("the Coordinator at %s is gone", address)
            except _UnreachableError as error:
                _log.error("the Coordinator at %s is not reached: %s", address, error)
        assert self._signalled is not None
        silent = self._config.own is None and await _is_silent(address)
        if self._signalled.done():
            return 128 + self._signalled.result()
        return EXIT_COORDINATOR_SILENT if silent else EXIT_COORDINATOR_GONE

    @property
    def _patience_s(self) -> float:
        return self._config.own.connect_timeout_s if self._config.own else _CONNECT_TIMEOUT_S

    async def _session(self, channel: grpc.aio.Channel) -> int:
        assert self._signalled is not None
        own = self._config.own
        metadata = ((rpc.TOKEN_METADATA, self._config.token),)
        control: _Control = channel.stream_stream(
            f"/{rpc.SERVICE}/{rpc.CONTROL}",
            request_serializer=rpc.encode,
            response_deserializer=rpc.decode_coordinator.decode,
        )(metadata=metadata, wait_for_ready=own is not None)
        greeting = asyncio.ensure_future(control.initial_metadata())
        waited: set[asyncio.Future[Any]] = {greeting, self._signalled}
        await asyncio.wait(waited, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
        if self._signalled.done():
            return 128 + self._signalled.result()
        if rpc.GREETING not in tuple(await asyncio.wait_for(greeting, 0)):
            if await control.code() is grpc.StatusCode.UNAVAILABLE:
                # Nobody has turned this node away, and who is in charge is to be found out.
                raise _UnreachableError(await control.details())
            address = self._config.coordinator
            _log.error("not taken by the Coordinator at %s: %s", address, await control.details())
            return EXIT_COORDINATOR_GONE
        hello = msg.Hello(version=msg.PROTOCOL_VERSION, node=self._config.node, fence=self._config.fence)
        await control.write(hello)
        welcome = await asyncio.wait_for(control.read(), _CONNECT_TIMEOUT_S)
        if not isinstance(welcome, msg.Welcome):
            why = welcome.why if isinstance(welcome, msg.Refused) else "it closed the stream"
            _log.error("not taken by the Coordinator: %s", why)
            return EXIT_EXCLUDED
        try:
            welcome = own.adapt(welcome) if own else welcome
            slots = resolve_slots(welcome.nproc_per_node, self._config.environ)
            location = await self._locate(welcome)
        except SlotsError as error:
            _log.error("%s", error)
            await control.write(msg.Leaving(why=str(error), by_signal=False))
            await self._hang_up(control)
            return EXIT_USAGE
        staging = staging_place(self._config.private_dir, self._config.environ)
        output = OutputPump(self._config.node, own.show if own else None, staging)
        sending = asyncio.create_task(self._send_output(channel, metadata, output))
        try:
            joined = msg.Joined(slots=slots, place=own.place if own else None, location=location)
            return await self._work(control, welcome, joined, output)
        finally:
            output.finish()
            # The last lines of every rank, and whatever is in the outbox, before the connection goes.
            await asyncio.wait({sending}, timeout=_LAST_OUTPUT_TIMEOUT_S)
            sending.cancel()
            output.close()
            await self._hang_up(control)

    async def _locate(self, welcome: msg.Welcome) -> msg.NodeLocation:
        """Find out where this node is; the driver is asked for its NVLink domain if anybody wants to know."""
        environ, fabric = self._config.environ, self._config.fabric
        if welcome.segment <= 1:
            return locate(environ, domain="")
        finding = asyncio.get_running_loop().run_in_executor(None, find_domain, environ, fabric)
        try:
            domain = await asyncio.wait_for(finding, _DOMAIN_TIMEOUT_S)
        except DomainError as error:
            _log.warning("no NVLink domain: %s", error)
            domain = ""
        except asyncio.TimeoutError:
            _log.warning("no NVLink domain: NVML did not answer in %g s", _DOMAIN_TIMEOUT_S)
            domain = ""
        return locate(environ, domain)

    async def _work(
        self, control: _Control, welcome: msg.Welcome, joined: msg.Joined, output: OutputPump
    ) -> int:
        assert self._signalled is not None
        writing = asyncio.create_task(self._write(control))
        config = self._config
        health = self._watch_health(welcome.node)
        workers = NodeWorkers(
            config.node,
            welcome,
            joined.slots,
            config.private_dir,
            config.environ,
            output,
            self._outbox.put_nowait,
            health,
        )
        joining = asyncio.create_task(self._join(joined, health))
        self._reading = reading = asyncio.create_task(self._read(control, workers))
        try:
            waited: set[asyncio.Future[Any]] = {reading, writing, self._signalled}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._signalled.done() and not reading.done():
                received = self._signalled.result()
                joining.cancel()
                await asyncio.wait({joining})
                self._outbox.put_nowait(
                    msg.Leaving(why=f"the agent received {received.name}", by_signal=True)
                )
                await self._stop_for(received, workers, reading)
                return 128 + received
            return await reading if reading.done() else EXIT_COORDINATOR_GONE
        finally:
            self._closing = True
            joining.cancel()
            await workers.close()
            if health is not None:
                await health.close()
            self._outbox.put_nowait(None)
            await asyncio.wait({writing}, timeout=1.0)
            writing.cancel()

    async def _join(self, joined: msg.Joined, health: HealthWatch | None) -> None:
        """Tell the Coordinator that this node can be used, and what its checks say if they say it in time."""
        verdict = None
        try:
            if health is not None:
                verdict = await health.first_verdict()
        finally:
            # First of all, even if the agent goes again at once.
            self._outbox.put_nowait(msgspec.structs.replace(joined, health=verdict))

    def _watch_health(self, options: NodeOptions) -> HealthWatch | None:
        if not options.health:
            return None
        state, environ = self._config.private_dir / "health", self._config.environ
        return HealthWatch(options.health_config, state, environ, self._outbox.put_nowait)

    async def _stop_for(
        self, received: signal.Signals, workers: NodeWorkers, reading: asyncio.Task[int]
    ) -> None:
        """Let the ranks end, until their grace is over, another signal comes, or the Coordinator is lost."""
        own = self._config.own
        if own is None:
            await workers.stop()
            return
        # If the launcher was killed, nobody asked the ranks to save anything.
        grace = own.term_timeout_s if os.getppid() == self._parent else None
        stopping = asyncio.create_task(workers.stop(received, grace))
        again = asyncio.create_task(self._signalled_again.wait())
        waited: set[asyncio.Future[Any]] = {stopping, again, reading}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and not _is_coordinator_lost(reading):
            # The job has ended, or goes on without this node.
            await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, again):
            task.cancel()

    async def _hang_up(self, control: _Control) -> None:
        """End our side and hear the other's end: a connection that goes at once takes our last words with it.

        A read that is cancelled would cancel the whole call.
        """
        reading = self._reading
        if reading is None or reading.done():
            reading = asyncio.create_task(_hear_out(control))
        with contextlib.suppress(*_STREAM_BROKEN):
            await control.done_writing()
        await asyncio.wait({reading}, timeout=_HANG_UP_TIMEOUT_S)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    def _on_signal(self, sig: signal.Signals) -> None:
        if self._signalled is None:
            return
        if self._signalled.done():
            self._signalled_again.set()
        else:
            self._signalled.set_result(sig)

    async def _read(self, control: _Control, workers: NodeWorkers) -> int:
        while (message := await control.read()) is not grpc.aio.EOF:
            match message:
                case _ if self._closing:
                    pass
                case msg.StartWorkers():
                    workers.start(message)
                case msg.StopWorkers():
                    sig = signal.Signals(message.signal)
                    workers.begin_stop(message.cycle, message.hung, sig, message.grace_s, message.look_s)
                case msg.Probe():
                    workers.probe(message.cycle)
                case msg.AskToStop():
                    workers.ask_to_stop(message.cycle)
                case msg.PaceScores():
                    workers.give_scores(message)
                case msg.Refused():
                    _log.error("excluded by the Coordinator: %s", message.why)
                    return EXIT_EXCLUDED
                case msg.Shutdown():
                    self.job_code = message.code
                    return EXIT_OK
                case _:
                    _log.error("unexpected message %r", message)
        if not self._closing:
            _log.error("the Coordinator has closed the stream")
        return EXIT_COORDINATOR_GONE

    async def _write(self, control: _Control) -> None:
        while (message := await self._outbox.get()) is not None:
            try:
                rpc.encode(message)
            except (OverflowError, TypeError, ValueError) as error:
                # Whatever a rank has made of it, the stream must not end by it.
                _log.error("dropped a message that cannot be sent: %s: %.200r", error, message)
            else:
                await control.write(message)

    async def _send_output(
        self, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], output: OutputPump
    ) -> None:
        """Send output for as long as the Coordinator takes it; its end is noticed on the control stream."""
        messages = output.messages()
        # The stream costs the Coordinator as much as the control stream: it must not delay a large job's
        # first cycle, and a spare needs none.
        first = await anext(messages, None)
        if first is None:
            return
        with contextlib.suppress(*_STREAM_BROKEN):
            call: Any = channel.stream_unary(f"/{rpc.SERVICE}/{rpc.LOGS}", request_serializer=rpc.encode)(
                metadata=metadata
            )
            await call.write(first)
            async for message in messages:
                await call.write(message)
            await call.done_writing()
            await call


def _is_coordinator_lost(reading: asyncio.Task[int]) -> bool:
    return reading.exception() is not None or reading.result() == EXIT_COORDINATOR_GONE


async def _is_silent(address: str) -> bool:
    """Tell whether the Coordinator's host, or its process there, gives no sign of life.

    Where the process has died, the kernel refuses a connection; where it runs, it says at once that it speaks
    HTTP/2; where it stands still, the kernel takes the connection and nobody says anything.
    """
    host, _, port = address.rpartition(":")

    async def knock() -> None:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            await reader.read(1)
        finally:
            writer.close()

    try:
        await asyncio.wait_for(knock(), _SILENT_S)
    except ConnectionError:
        return False
    except (OSError, asyncio.TimeoutError):
        return True
    return False


async def _hear_out(control: _Control) -> int:
    with contextlib.suppress(*_STREAM_BROKEN):
        while await control.read() is not grpc.aio.EOF:
            pass
    return EXIT_COORDINATOR_GONE
