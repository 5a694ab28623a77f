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
from nvrx_slurm.agent.environment import rank_environment, server_environment
from nvrx_slurm.agent.evidence import examine, find_py_spy
from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.agent.oom import OomWatch
from nvrx_slurm.agent.output import OutputPump
from nvrx_slurm.agent.private_places import make_private, private_places
from nvrx_slurm.agent.rank_socket import RankSocket
from nvrx_slurm.agent.server_protocol import RankSpec
from nvrx_slurm.agent.throttle import Throttle
from nvrx_slurm.agent.workers import WorkerServerProcess
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rank_channel
from nvrx_slurm.wire.stacks import stacks_path

_log = logging.getLogger(__name__)
_PROGRESS_INTERVAL_S = 5.0
_KILL_TIMEOUT_S = 5.0
_SERVER_INTERVAL_S = 1.0
"""Worker servers are not started more often."""
_MAX_REASONS = 4
_EVIDENCE_S = 0.8
_EVIDENCE_GRACE_S = 0.15
"""Together below the second by which the search may delay the restart."""


class NodeWorkers:
    """One worker server, one cycle at a time.

    ``say`` queues a message to the Coordinator and returns at once.
    """

    def __init__(
        self,
        welcome: msg.Welcome,
        slots: int,
        private_dir: Path,
        environ: Mapping[str, str],
        output: OutputPump,
        say: Callable[[msg.AgentMessage], None],
    ) -> None:
        """Start the worker server. Needs a running event loop.

        Raises:
            OSError: no process can be started.
        """
        linux.become_subreaper()
        self._welcome = welcome
        self._slots = slots
        self._places = private_places(private_dir)
        self._environ = server_environment(environ, welcome, slots)
        self._output = output
        self._say = say
        self._throttle = Throttle(say)
        self._py_spy = find_py_spy(environ.get("PATH"))
        self._oom = OomWatch()
        self._cycle: LocalCycle | None = None
        self._all_exited = asyncio.Event()
        self._cleared = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._socket: RankSocket | None = None
        self._server = self._new_server()
        self._waits_for_server: tuple[LocalCycle, Path] | None = None
        """What to launch when there is a worker server again."""
        self._launched_by: WorkerServerProcess | None = None
        """The worker server that has the running cycle's ranks."""
        self._progress = asyncio.create_task(self._report_progress())

    def _new_server(self) -> WorkerServerProcess:
        return WorkerServerProcess(self._environ, self._welcome.warm_start, self._on_reply)

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
        if self._recovering is None:
            self._launch(cycle, socket)
        else:
            self._waits_for_server = cycle, socket

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

    def _launch(self, cycle: LocalCycle, socket: Path) -> None:
        specs: list[RankSpec] = []
        writers: list[int] = []
        try:
            for local_rank, rank in enumerate(cycle.ranks):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                writers.append(writer)
                self._output.add(reader, cycle.cycle, rank)
                env = rank_environment(cycle.start, local_rank, cycle.page_paths[rank], socket)
                specs.append(RankSpec(rank, env))
            self._launched_by = self._server
            # A server that has just died is told of by its last reply.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._server.start_ranks(self._welcome.program, specs, writers, warm=self._welcome.warm_start)
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

    def begin_stop(self, number: int, hung: Sequence[int] = ()) -> None:
        """Stop the cycle's ranks, the hung ones without grace.

        :class:`WorkersGone` follows when no process of them is left.
        """
        cycle = self._cycle
        if cycle is None or cycle.cycle != number:
            # It never started here: nothing to stop.
            self._say(msg.WorkersGone(cycle=number))
        elif not cycle.stopping:
            cycle.stopping = True
            self._stopping = asyncio.create_task(self._stop(cycle, hung))

    async def _stop(self, cycle: LocalCycle, hung: Sequence[int]) -> None:
        """SIGTERM; when all ranks have ended or the time is over, SIGKILL to what is left, orphans too."""
        self._tell_step(cycle)
        stalled = cycle.monitors.stalled_s()
        if self._recovering is not None:
            await self._cleared.wait()
        elif self._launched_by is self._server:
            self._cleared.clear()
            hung = [rank for rank in hung if rank in cycle.alive]
            others = [rank for rank in cycle.alive if rank not in hung]
            self._server.signal_ranks(signal.SIGTERM, others)
            # A rank that somebody has stopped hears SIGTERM only when it goes on.
            self._server.signal_ranks(signal.SIGCONT, others)
            await asyncio.gather(*(self._record_evidence(cycle, rank) for rank in hung))
            self._server.signal_ranks(signal.SIGKILL, hung)
            if cycle.alive:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._all_exited.wait(), self._welcome.stop_timeout_s)
            self._server.kill_everything()
            await self._cleared.wait()
        # Else the server that had the ranks is gone, and everything below it: the new one need not be asked.
        self._throttle.flush()
        self._tell_step(cycle)
        self._say(msg.WorkersGone(cycle=cycle.cycle, stalled_s=stalled))

    async def _record_evidence(self, cycle: LocalCycle, rank: int) -> None:
        """Tell the Coordinator what ``rank`` hangs in, if it can be found out in time."""
        pid = cycle.monitors.pid_of(rank)
        if pid is None:
            return
        began = time.monotonic_ns()
        reading = cycle.monitors.read(rank)
        examining = asyncio.get_running_loop().run_in_executor(
            None, examine, pid, stacks_path(cycle.page_paths[rank]), self._py_spy, _EVIDENCE_S
        )
        try:
            found = await asyncio.wait_for(examining, _EVIDENCE_S + _EVIDENCE_GRACE_S)
        except asyncio.TimeoutError:
            return
        self._say(
            msg.HangEvidence(
                cycle=cycle.cycle,
                rank=rank,
                pid=pid,
                heartbeats=reading.heartbeats,
                silent_s=(began - reading.last_sign_ns) / 1e9,
                sections={
                    cycle.monitors.sections[section.slot]: (began - section.opened_ns) / 1e9
                    for section in reading.sections
                },
                process_state=found.process_state,
                wchan=found.wchan,
                kernel_stack=found.kernel_stack,
                source=found.source,
                stacks=found.stacks,
                note=found.note,
                seconds=(time.monotonic_ns() - began) / 1e9,
            )
        )

    async def stop(self) -> None:
        """Stop the running cycle, if any, in good order."""
        if self._cycle is not None:
            self.begin_stop(self._cycle.cycle)
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

    async def close(self) -> None:
        """Leave no process, without grace."""
        for task in (self._stopping, self._recovering, self._progress):
            if task is not None:
                task.cancel()
        if self._cycle is not None:
            self._cycle.stopping = True
        self._server.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._server.wait(), _KILL_TIMEOUT_S)
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
                self._cleared.set()
            case _:
                pass

    def _rank_exited(self, cycle: LocalCycle, rank: int, code: int, detail: str = "") -> None:
        cycle.monitors.forget(rank)
        cycle.alive.discard(rank)
        pid = cycle.monitors.pid_of(rank)
        self._throttle.flush()
        killed = code == -signal.SIGKILL and pid is not None and not cycle.stopping
        self._say(
            msg.RankExited(
                cycle=cycle.cycle,
                rank=rank,
                exit=code,
                after_stop=cycle.stopping,
                detail=detail,
                oom=self._oom.evidence(pid) if killed and pid is not None else "",
            )
        )
        if not cycle.alive:
            self._all_exited.set()

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
        waits, self._waits_for_server = self._waits_for_server, None
        if waits is not None and waits[0] is self._cycle and not waits[0].stopping:
            self._launch(*waits)

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
        if cycle is None or request.cycle != cycle.cycle or request.rank not in cycle.page_paths:
            return
        match request:
            case rank_channel.MonitoringStarted():
                cycle.monitors.watch(request.rank)
                if request.rank not in cycle.ready:
                    cycle.ready.add(request.rank)
                    if len(cycle.ready) == len(cycle.ranks):
                        self._say(msg.RanksReady(cycle=cycle.cycle))
            case rank_channel.FirstHeartbeat():
                cycle.monitors.watch(request.rank)
                if request.rank not in cycle.stepping:
                    cycle.stepping.add(request.rank)
                    if len(cycle.stepping) == len(cycle.ranks):
                        step = cycle.monitors.lowest_step()
                        self._say(msg.RanksStepping(cycle=cycle.cycle, step=step))
            case rank_channel.Checkpoint():
                self._throttle.say(
                    request.rank,
                    (request.what, request.layer),
                    msg.CheckpointReport(
                        cycle=cycle.cycle,
                        rank=request.rank,
                        what=request.what,
                        step=request.step,
                        layer=request.layer,
                    ),
                )
            case rank_channel.Control():
                self._throttle.say(
                    request.rank,
                    request.action,
                    msg.ControlRequest(
                        cycle=cycle.cycle,
                        rank=request.rank,
                        action=request.action,
                        why=request.description,
                    ),
                )
            case rank_channel.TimeoutsChanged():
                self._timeouts_changed(cycle, request)

    def _timeouts_changed(self, cycle: LocalCycle, request: rank_channel.TimeoutsChanged) -> None:
        heartbeat, section = request.heartbeat, request.section
        try:
            cycle.monitors.change(request.rank, heartbeat, section)
        except ValueError as error:
            _log.warning("time-outs of rank %d are ignored: %s", request.rank, error)
            return
        # Every rank calculates the same; the first tells the Coordinator.
        if (heartbeat, section) != cycle.told_timeouts:
            cycle.told_timeouts = (heartbeat, section)
            self._throttle.say(
                request.rank,
                msg.TimeoutsCalculated,
                msg.TimeoutsCalculated(cycle=cycle.cycle, heartbeat=heartbeat, section=section),
            )

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
