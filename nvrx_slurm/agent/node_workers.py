"""The ranks of this node: started, watched, stopped; everything that happens is told to the Coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nvrx_slurm import linux
from nvrx_slurm.agent import server_protocol
from nvrx_slurm.agent.deadlines import Deadline
from nvrx_slurm.agent.environment import (
    cycle_environment,
    rank_environment,
    server_environment,
    virtual_local_rank,
)
from nvrx_slurm.agent.error_file import error_path, read_error
from nvrx_slurm.agent.evidence import find_py_spy
from nvrx_slurm.agent.flight_recorder import prefix_environment
from nvrx_slurm.agent.hang_records import HangRecords
from nvrx_slurm.agent.hardware_context import HardwareContext
from nvrx_slurm.agent.health_watch import HealthWatch
from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.agent.node_gpus import NodeGpus
from nvrx_slurm.agent.node_pace import NodePace
from nvrx_slurm.agent.oom import OomWatch
from nvrx_slurm.agent.output import OutputPump
from nvrx_slurm.agent.private_places import make_private, private_places
from nvrx_slurm.agent.rank_reports import RankReports
from nvrx_slurm.agent.rank_socket import RankSocket
from nvrx_slurm.agent.server_protocol import NumaBinding, RankSpec, StartOrder
from nvrx_slurm.agent.workers import WorkerServerProcess
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rank_channel

_log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 5.0
_KILL_TIMEOUT_S = 5.0
_SERVER_INTERVAL_S = 1.0
"""Worker servers are not started more often."""
_MAX_REASONS = 4
_FAILED_GRACE_S = 1.0
"""From the end of a rank's main thread to its exit: within it nobody has waited in vain."""
_LIVES_ON = "its main thread has failed, but threads or exit handlers keep its process"


class NodeWorkers:
    """One worker server, one cycle at a time.

    ``say`` queues a message to the Coordinator and returns at once.
    """

    def __init__(
        self,
        node: str,
        welcome: msg.Welcome,
        slots: int,
        private_dir: Path,
        environ: Mapping[str, str],
        output: OutputPump,
        say: Callable[[msg.AgentMessage], None],
        health: HealthWatch | None = None,
    ) -> None:
        """Start the worker server. Needs a running event loop.

        ``health`` is asked for a fresh verdict whenever a cycle is stopped.

        Raises:
            OSError: no process can be started.
        """
        linux.become_subreaper()
        self._welcome = welcome
        self._slots = slots
        self._places = private_places(private_dir)
        self._user = environ
        self._environ = server_environment(environ, welcome, slots)
        self._output = output
        self._say = say
        self._health = health
        context = HardwareContext(environ, health.complaints if health is not None else list)
        self._pace = NodePace(say, context.look)
        self._reports = RankReports(say, self._on_failed, self._pace)
        self._hang_records = HangRecords(node, welcome, find_py_spy(environ.get("PATH")), say)
        self._gpus = NodeGpus(environ, welcome.node, slots)
        self._oom = OomWatch()
        self._cycle: LocalCycle | None = None
        self._all_exited = asyncio.Event()
        self._cleared = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._socket: RankSocket | None = None
        self._server = self._new_server()
        self._launching: asyncio.Task[None] | None = None
        self._launched_by: WorkerServerProcess | None = None
        """The worker server that has the running cycle's ranks."""
        self._progress = asyncio.create_task(self._report_progress())

    def _new_server(self) -> WorkerServerProcess:
        preload = self._welcome.node.preload if self._welcome.warm_start else None
        return WorkerServerProcess(self._environ, preload, self._on_reply)

    # --- requests of the Coordinator -----------------------------------------------------------------

    def start(self, start: msg.StartWorkers) -> None:
        """Start the ranks of a cycle; the one before has been stopped."""
        if self._cycle is not None:
            self._cycle.close()
            self._cycle = None
        try:
            cycle, socket = self._prepare(start)
        except OSError as error:
            self._start_failed(start.cycle, str(error))
            return
        self._cycle = cycle
        self._all_exited.clear()
        self._launched_by = None
        self._launching = asyncio.create_task(self._launch_when_ready(cycle, socket))

    async def _launch_when_ready(self, cycle: LocalCycle, socket: Path) -> None:
        """Launch when it is known where ranks are bound, and there is a worker server."""
        try:
            bindings = await self._gpus.bindings()
        except OSError as error:
            self._start_failed(cycle.cycle, str(error))
            return
        while self._recovering is not None:
            await self._cleared.wait()
        if cycle is self._cycle and not cycle.stopping:
            self._launch(cycle, socket, bindings)

    def _prepare(self, start: msg.StartWorkers) -> tuple[LocalCycle, Path]:
        """Make pages and, if it is gone, the socket in the first place that has room.

        Raises:
            OSError: none has.
        """
        refusals = []
        for place in self._places:
            try:
                make_private(place)
                socket = self._listen(place / "ranks.sock")
                return LocalCycle(start, self._slots, place, self._on_stalled), socket
            except OSError as error:
                refusals.append(str(error))
        raise OSError("no place for heartbeat pages: " + "; ".join(refusals))

    def _listen(self, path: Path) -> Path:
        if self._socket is None or self._socket.path != path or not self._socket.is_there:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self._socket = RankSocket(path, self._on_rank_request)
        return path

    def _launch(self, cycle: LocalCycle, socket: Path, bindings: Sequence[NumaBinding | None]) -> None:
        specs: list[RankSpec] = []
        writers: list[int] = []
        try:
            for local_rank, rank in enumerate(cycle.ranks):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                writers.append(writer)
                self._output.add(reader, cycle.cycle, rank, local_rank)
                env = rank_environment(cycle.start, local_rank, cycle.page_paths[rank])
                if self._welcome.virtual_local_rank:
                    env.update(virtual_local_rank(local_rank, self._environ))
                specs.append(RankSpec(rank, env, bindings[local_rank]))
            order = StartOrder(
                program=self._welcome.program,
                env={
                    **cycle_environment(cycle.start, socket),
                    **prefix_environment(self._user, self._welcome.run_dir, cycle.cycle),
                },
                ranks=specs,
                warm=self._welcome.warm_start,
                exit_on_exception=self._welcome.node.install_exception_hook,
            )
            self._launched_by = self._server
            # A server that has just died is told of by its last reply.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._server.start_ranks(order, writers)
        except OSError as error:
            self._start_failed(cycle.cycle, str(error))
        finally:
            for writer in writers:
                os.close(writer)

    def _start_failed(self, number: int, why: str) -> None:
        if self._cycle is not None and self._cycle.cycle == number:
            self._cycle.alive.clear()
            self._all_exited.set()
        self._say(msg.StartFailed(cycle=number, why=why))

    def begin_stop(
        self,
        number: int,
        hung: Sequence[int] = (),
        sig: signal.Signals = signal.SIGTERM,
        grace_s: float | None = None,
        look_s: float = 0.0,
    ) -> None:
        """Stop the cycle's ranks with ``sig``, the hung ones without grace.

        While they are being stopped, a later call can only lengthen the grace.
        :class:`WorkersGone` follows when no process of them is left, and after a fresh verdict on the node's
        health if that comes within ``look_s``.
        """
        cycle = self._cycle
        if cycle is None or cycle.cycle != number:
            # It never started here: nothing to stop.
            self._say(msg.WorkersGone(cycle=number))
            return
        grace = self._welcome.stop_timeout_s if grace_s is None else grace_s
        cycle.stop_deadline = max(cycle.stop_deadline, time.monotonic() + grace)
        if not cycle.stopping:
            cycle.stopping = True
            if self._health is not None:
                self._health.refresh()
            self._stopping = asyncio.create_task(self._stop(cycle, hung, sig, look_s))

    async def _stop(self, cycle: LocalCycle, hung: Sequence[int], sig: signal.Signals, look_s: float) -> None:
        """Send ``sig``; when all ranks have ended or the time is over, SIGKILL what is left, orphans too."""
        self._tell_step(cycle)
        stalled = cycle.monitors.stalled_s()
        if self._recovering is not None:
            await self._cleared.wait()
        elif self._launched_by is self._server:
            self._cleared.clear()
            # Of all nodes: this one may have none of them.
            is_hang = bool(hung)
            hung = [rank for rank in hung if rank in cycle.alive]
            others = [rank for rank in cycle.alive if rank not in hung]
            stacks = await self._hang_records.keep(cycle, hung) if is_hang else None
            self._server.signal_ranks(sig, others)
            # A rank that somebody has stopped hears it only when it goes on.
            self._server.signal_ranks(signal.SIGCONT, others)
            if stacks is not None:
                await stacks
            self._server.signal_ranks(signal.SIGKILL, hung)
            while cycle.alive and (left := cycle.stop_deadline - time.monotonic()) > 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._all_exited.wait(), left)
            self._server.kill_everything(self._welcome.node.checkpoint_write_timeout_s)
            await self._cleared.wait()
        # Else the server that had the ranks is gone, and everything below it: the new one need not be asked.
        gpus_left = await self._gpus.reclaim(cycle.monitors.pids)
        self._reports.flush()
        self._tell_step(cycle)
        if look_s > 0 and self._health is not None:
            await self._health.settle(look_s)
        self._say(msg.WorkersGone(cycle=cycle.cycle, stalled_s=stalled, gpus_left=gpus_left))

    async def stop(self, sig: signal.Signals = signal.SIGTERM, grace_s: float | None = None) -> None:
        """Stop the running cycle, if any, in good order; a rank that catches ``sig`` sees ``should_stop``."""
        if self._cycle is not None:
            self.ask_to_stop(self._cycle.cycle)
            self.begin_stop(self._cycle.cycle, (), sig, grace_s)
        if self._stopping is not None:
            await self._stopping

    def probe(self, number: int) -> None:
        """Answer with what is known of the ranks right now."""
        if self._cycle is not None and self._cycle.cycle == number:
            self._say(msg.Snapshots(cycle=number, snapshots=self._cycle.monitors.snapshots()))

    def ask_to_stop(self, number: int) -> None:
        """Raise ``should_stop`` on every rank."""
        if self._cycle is not None and self._cycle.cycle == number:
            for page in self._cycle.pages.values():
                with contextlib.suppress(OSError):
                    page.request_stop()

    def give_scores(self, scores: msg.PaceScores) -> None:
        """Hand on to the ranks how they stood in the last report."""
        if self._cycle is not None and self._cycle.cycle == scores.cycle:
            self._pace.give(self._cycle, scores)

    async def close(self) -> None:
        """Leave no process, without grace."""
        self._gpus.close()
        self._pace.close()
        for task in (self._stopping, self._recovering, self._progress, self._launching):
            if task is not None:
                task.cancel()
        if self._cycle is not None:
            self._cycle.stopping = True
        self._server.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.wait(), _KILL_TIMEOUT_S)
        await self._hang_records.close()
        if self._socket is not None:
            self._socket.close()
        self._oom.close()
        if self._cycle is not None:
            self._cycle.close()
            self._cycle = None

    # --- replies of the worker server ----------------------------------------------------------------

    def _on_reply(self, reply: server_protocol.Reply | None) -> None:
        cycle = self._cycle
        match reply:
            case None:
                self._cleared.clear()
                self._recovering = asyncio.create_task(self._recover())
            case server_protocol.Started() if cycle is not None:
                cycle.monitors.started(dict(zip(cycle.ranks, reply.pids, strict=True)))
                self._oom.started(reply.pids)
                self._say(
                    msg.WorkersStarted(
                        cycle=cycle.cycle,
                        ranks=cycle.ranks,
                        pids=reply.pids,
                        warm=reply.warm,
                        why_cold=reply.why_cold,
                    )
                )
            case server_protocol.StartError() if cycle is not None:
                self._start_failed(cycle.cycle, reply.why)
            case server_protocol.Exited() if cycle is not None and reply.rank in cycle.alive:
                self._rank_exited(cycle, reply.rank, reply.exit)
            case server_protocol.Cleared():
                if reply.writers_killed:
                    _log.warning(
                        "killed what still wrote checkpoints after %g s: %d process(es)",
                        self._welcome.node.checkpoint_write_timeout_s,
                        reply.writers_killed,
                    )
                self._cleared.set()
            case _:
                pass

    def _rank_exited(self, cycle: LocalCycle, rank: int, code: int, detail: str = "") -> None:
        cycle.monitors.forget(rank)
        cycle.alive.discard(rank)
        self._tell_exit(cycle, rank, code, detail)
        if not cycle.alive:
            self._all_exited.set()

    def _tell_exit(self, cycle: LocalCycle, rank: int, code: int, detail: str) -> None:
        if rank in cycle.told_exits:
            return
        cycle.told_exits.add(rank)
        pid = cycle.monitors.pid_of(rank)
        self._reports.flush()
        killed = code == -signal.SIGKILL and pid is not None and not cycle.stopping
        self._say(
            msg.RankExited(
                cycle=cycle.cycle,
                rank=rank,
                exit=code,
                after_stop=cycle.stopping,
                detail=detail or (read_error(error_path(cycle.page_paths[rank])) if code else ""),
                oom=self._oom.evidence(pid) if killed and pid is not None else "",
            )
        )

    async def _recover(self) -> None:
        """The worker server was killed, and its ranks with it (PR_SET_PDEATHSIG): make a new one."""
        await asyncio.get_running_loop().run_in_executor(None, linux.kill_descendants)
        if self._cycle is not None and self._launched_by is self._server:
            for rank in sorted(self._cycle.alive):
                self._rank_exited(self._cycle, rank, -signal.SIGKILL, "the node's worker server was killed")
        # One that dies at once, for whatever reason, would do so again and again.
        await asyncio.sleep(max(0.0, self._server.started + _SERVER_INTERVAL_S - time.monotonic()))
        self._server = self._new_server()
        self._recovering = None
        self._cleared.set()

    # --- what ranks report ---------------------------------------------------------------------------

    def _on_stalled(self, rank: int, late: Sequence[Deadline]) -> None:
        cycle = self._cycle
        if cycle is None or cycle.stopping:
            return
        self._say(
            msg.RankStalled(
                cycle=cycle.cycle,
                rank=rank,
                timeout_s=late[0].timeout_s,
                snapshots=cycle.monitors.snapshots(),
                why=", ".join(deadline.what for deadline in late[:_MAX_REASONS]),
            )
        )

    def _on_rank_request(self, request: rank_channel.RankRequest) -> None:
        cycle = self._cycle
        if cycle is not None and request.cycle == cycle.cycle and request.rank in cycle.page_paths:
            if isinstance(request, rank_channel.InProcessRestart):
                # By which the Coordinator tells whether training gets further between two of them.
                self._tell_step(cycle)
            self._reports.take(cycle, request)

    def _on_failed(self, cycle: LocalCycle, rank: int, code: int) -> None:
        """Its process may be kept by threads or exit handlers for ever; the other ranks wait for it."""
        if rank in cycle.alive:
            asyncio.get_running_loop().call_later(_FAILED_GRACE_S, self._tell_failed, cycle, rank, code)

    def _tell_failed(self, cycle: LocalCycle, rank: int, code: int) -> None:
        if cycle is self._cycle and rank in cycle.alive and not cycle.stopping:
            said = read_error(error_path(cycle.page_paths[rank]))
            self._tell_exit(cycle, rank, code, "; ".join(filter(None, (said, _LIVES_ON))))

    async def _report_progress(self) -> None:
        """Off the restart path: a step number now and then, for reports."""
        while True:
            await asyncio.sleep(_PROGRESS_INTERVAL_S)
            self._oom.refresh()
            if self._cycle is not None:
                self._tell_step(self._cycle)

    def _tell_step(self, cycle: LocalCycle) -> None:
        step = cycle.new_step()
        if step is not None:
            self._say(msg.StepReached(cycle=cycle.cycle, step=step))
