"""The Coordinator of one job: feeds the state machine, carries out what it says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_slurm import __version__, journal
from nvrx_slurm.coordinator import console, steps
from nvrx_slurm.coordinator.agents_step import AgentsStep
from nvrx_slurm.coordinator.app_log import AppLog
from nvrx_slurm.coordinator.charge import EXIT_REPLACED, Charge
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.cycle_info import CycleInfo, CycleInfos, write_cycle_info
from nvrx_slurm.coordinator.ft_state import adopt, save_ft_state
from nvrx_slurm.coordinator.handover import Handover, save_handover, shared_output
from nvrx_slurm.coordinator.hang_evidence import (
    evidence_event,
    gpu_memory_event,
    traces_event,
    write_evidence,
)
from nvrx_slurm.coordinator.iteration_file import IterationFile, IterationFileError
from nvrx_slurm.coordinator.job_end import leave_exit_code, nodes_to_exclude, start_again
from nvrx_slurm.coordinator.lease import Fence
from nvrx_slurm.coordinator.policy import EXIT_FAILED, EXIT_RESTART_ELSEWHERE, Policy
from nvrx_slurm.coordinator.progress import highest
from nvrx_slurm.coordinator.rank_logs import REORDER_S, RankLogs, last_lines
from nvrx_slurm.coordinator.returns import Returns
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.coordinator.server import AgentServer
from nvrx_slurm.coordinator.store import RendezvousStores, StoreError
from nvrx_slurm.coordinator.terminal import Terminal
from nvrx_slurm.coordinator.time_limit import watch_time_limit
from nvrx_slurm.coordinator.unhealthy import complaint_of, health_event
from nvrx_slurm.journal import JournalWriter, Record
from nvrx_slurm.journal.events import AnyEvent
from nvrx_slurm.slurm import (
    Job,
    SlurmClient,
    SlurmUnavailableError,
    UnknownJobError,
)
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc
from nvrx_slurm.wire.rank_channel import CheckpointEvent
from nvrx_slurm.wire.timeouts import Monitoring

_PROGRESS_INTERVAL_S = 5.0
_AGENTS_GRACE_S = 15.0
_LAST_OUTPUT_TIMEOUT_S = 30.0
_TERMINAL_GRACE_S = 2.0
_SRUN_GRACE_S = 2.0
_OUTPUT_QUEUE = 1024
_CULPRIT_LINES = 20
_LAST_LINES_TIMEOUT_S = 1.0
_DRAIN_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1)


@dataclass(frozen=True)
class Listening:
    """Where the Coordinator listens, if not on a free port of its own address with a token of its own."""

    address: str
    port: int
    token: str
    started: Callable[[int], None]
    """Told the port once agents can come."""


@dataclass(frozen=True)
class Succession:
    """What a Coordinator goes on from that takes over from another host."""

    fence: Fence
    token: str
    """The agents' own: they have it from the one before."""
    lost: str
    """That host."""
    silent_s: float
    restarts: int
    """Those that it had made."""
    excluded: Mapping[str, str]
    """Nodes that it had excluded, and why."""
    gone: frozenset[str]
    """Nodes that it had lost."""


@dataclass(frozen=True)
class JobSpec:
    """Everything that is decided before the job starts."""

    job_id: str
    restart_count: int
    submitted: int
    """When Slurm took the job, Unix seconds: a job id alone may be used again."""
    host: str
    address: str
    """Where agents and ranks reach this host."""
    policy: Policy
    welcome: msg.Welcome
    monitoring: Monitoring
    """What the ranks of the first cycle are held to."""
    keep_timeouts: bool
    """Write calculated time-outs to the run directory."""
    run_dir: RunDir
    slurm: SlurmClient | None = None
    """None: there is nobody who could start the job again."""
    step_argv: Sequence[str] = ()
    """Starts the agents; empty: they come by themselves."""
    step_environ: Mapping[str, str] = field(default_factory=dict)
    """Without what tells the agents where and who the Coordinator is: that is added here."""
    command: str = "nvrx-srun"
    """As the user knows it."""
    listening: Listening | None = None
    shows_rank_0: bool = True
    """Copy its output to standard output."""
    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    cycle_info_dir: Path | None = None
    """Where a file tells of each cycle; see :mod:`nvrx_slurm.coordinator.cycle_info`."""
    applog_prefix: Path | None = None
    """See :class:`AppLog`."""
    iteration_file: Path | None = None
    """Where the training keeps its newest checkpoint's step; ``policy`` says whether it does."""
    ends: int | None = None
    """When the job's time is over, Unix seconds; None: there is no limit."""
    time_limit_margin_s: float = 0.0
    """How long before that the ranks are asked to save; 0: not at all."""
    rejoin_argv: Callable[[str], Sequence[str]] | None = None
    """The srun line of a new agent on one node; None only if :attr:`Policy.rejoin_timeout_s` is 0."""
    standby: bool = False
    """If this host is lost, another goes on in the same allocation; otherwise it requeues the job."""
    succession: Succession | None = None

    @property
    def lease(self) -> Fence | None:
        """What this Coordinator holds; None where nobody could take over."""
        if self.succession is not None:
            return self.succession.fence
        return Fence(self.job_id, self.restart_count, 0) if self.step_argv and self.slurm else None

    @property
    def fence(self) -> str:
        """What an agent must have been started for; who comes by itself can know the job only."""
        return str(self.lease or self.job_id)

    def handover(self) -> Handover:
        """Return what another host needs to go on."""
        return Handover(
            job_id=self.job_id,
            restart_count=self.restart_count,
            submitted=self.submitted,
            policy=self.policy,
            welcome=self.welcome,
            monitoring=self.monitoring,
            keep_timeouts=self.keep_timeouts,
            standby=self.standby,
            iteration_file=None if self.iteration_file is None else str(self.iteration_file),
            ends=self.ends,
            time_limit_margin_s=self.time_limit_margin_s,
            output=shared_output(),
        )


class JobRunner:
    """Runs one job from its first cycle to its exit code. One instance, one :meth:`run`."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._machine = CycleMachine(spec.policy)
        self._monitoring = spec.monitoring
        self._journal = JournalWriter(spec.run_dir.journal, spec.job_id, spec.restart_count)
        self._token = rpc.new_token()
        if spec.listening is not None:
            self._token = spec.listening.token
        elif spec.succession is not None:
            self._token = spec.succession.token
        self._server = AgentServer(self._token, spec.fence, spec.welcome, self)
        bind = spec.listening.address if spec.listening else spec.address
        self._stores = RendezvousStores(spec.address, self._store_lost, bind)
        self._terminal = Terminal(spec.command)
        self._logs = RankLogs(spec.run_dir, self._show_line, _open_logs())
        self._app_log = None if spec.applog_prefix is None else AppLog(spec.applog_prefix)
        self._cycle_infos = CycleInfos(self._app_log.path if self._app_log else spec.run_dir.merged_log)
        self._log_queue: asyncio.Queue[tuple[str, msg.LogMessage]] = asyncio.Queue(_OUTPUT_QUEUE)
        self._timers: dict[steps.Timer, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        """Those of the tasks whose result is of no use once the job has ended."""
        self._ended: asyncio.Future[steps.End] | None = None
        self._returns: Returns | None = None
        self._complete: defaultdict[tuple[int, int], asyncio.Event] = defaultdict(asyncio.Event)
        """Set when all output of a rank, named by cycle and rank, has arrived."""
        self._asked_to_stop: int | None = None
        """The cycle whose ranks were asked to save and end."""
        self._step: int | None = None
        """The highest that is not in the journal yet."""
        self._step_written = 0.0
        self._iterations = None if spec.iteration_file is None else IterationFile(spec.iteration_file)
        self._told_of_iterations = False
        self._complained: set[str] = set()
        self._saving = asyncio.Lock()
        self._bad_nodes: set[str] = set(spec.succession.gone if spec.succession else ())
        """Nodes that the job should not get again."""
        self._charge: Charge | None = None
        if spec.lease is not None and spec.slurm is not None:
            self._charge = Charge(
                spec.run_dir, spec.lease, spec.host, spec.slurm, self._replaced, self._terminal.say
            )

    async def run(self) -> int:
        """Run to the end; return the exit code. No process of the job is left when it returns."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for sig in self._spec.stop_signals:
            # nohup(1) has SIGHUP ignored, and means it.
            if signal.getsignal(sig) is not signal.SIG_IGN:
                loop.add_signal_handler(sig, self._feed, steps.StopRequested(sig))
        for sig in set(_DRAIN_SIGNALS) - set(self._spec.stop_signals):
            loop.add_signal_handler(sig, self._feed, steps.DrainRequested(sig))
        port = await self._listen()
        environ = self._agents_environ(port)
        if self._charge is not None:
            save_handover(self._spec.run_dir.handover, self._spec.handover())
            self._charge.begin(environ[rpc.COORDINATOR_VARIABLE])
        self._announce()
        self._stores.start()
        writing = asyncio.create_task(self._write_logs())
        self._step_of_agents = step = AgentsStep(self._spec.step_argv, environ, self._terminal.say)
        self._returns = self._new_returns(environ)
        end = steps.End(EXIT_FAILED, "")
        if self._spec.time_limit_margin_s > 0:
            self._background.append(self._spawn(self._watch_time_limit()))
        try:
            self._carry_out(self._begin())
            if self._spec.step_argv:
                await self._start_step(step)
            end = await self._ended
        finally:
            await self._server.shut_down(_AGENTS_GRACE_S, end.code)
            if self._is_in_charge():
                await asyncio.gather(step.end(_SRUN_GRACE_S), self._end_returned())
            elif self._returns is not None:
                # The successor's agents live by these steps.
                await self._returns.stop_trying()
            await self._stores.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._log_queue.join(), _LAST_OUTPUT_TIMEOUT_S)
            for task in self._background:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=2 * _LAST_LINES_TIMEOUT_S)
            async with self._saving:
                pass
            writing.cancel()
            try:
                self._logs.close()
            except OSError as error:
                self._complain("output", error)
        code = await self._settle(end.code)
        await asyncio.gather(step.end(0.0), self._end_returned())
        if self._complained:
            self._terminal.say(
                f"WARNING: not everything could be written: {', '.join(sorted(self._complained))}"
            )
        self._journal.close()
        self._terminal.close(_TERMINAL_GRACE_S)
        return code

    def _begin(self) -> Sequence[steps.Command]:
        before = self._spec.succession
        if before is None:
            return self._machine.start()
        why = f"the Coordinator's host has been silent for {before.silent_s:.0f} s"
        return self._machine.take_over(time.monotonic(), before.lost, why, before.restarts, before.excluded)

    async def _settle(self, code: int) -> int:
        """Arrange with Slurm what is left to do; return the exit code."""
        charge, slurm = self._charge, self._spec.slurm
        if charge is not None and not charge.confirm():
            return await charge.follow()
        if code == EXIT_RESTART_ELSEWHERE:
            self._requeue()
        if charge is not None:
            await charge.end(code)
        if self._spec.succession is not None and slurm is not None and code != EXIT_RESTART_ELSEWHERE:
            leave_exit_code(slurm, self._spec.job_id, self._spec.succession.lost, code, self._record)
        return code

    def _is_in_charge(self) -> bool:
        return self._charge is None or self._charge.holds()

    def _replaced(self) -> None:
        """Another host has taken over: nothing that is heard or known here counts any more."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(steps.End(EXIT_REPLACED, "another host has taken over"))

    async def _listen(self) -> int:
        listening = self._spec.listening
        if listening is None:
            return await self._server.start(self._spec.address)
        port = await self._server.start(listening.address, listening.port)
        listening.started(port)
        return port

    def _requeue(self) -> None:
        """Have Slurm start the job again without the nodes that were lost. Slurm then ends this process."""
        if self._spec.slurm is None:
            why = f"{self._spec.command} starts no job again: whoever started this one can do so"
            self._record(journal.NotRequeued(why=why))
            return
        bad = self._bad_nodes | set(self._machine.proven_bad)
        without = nodes_to_exclude(bad, self._spec.policy.nodes, self._spec.host, self._terminal.say)
        self._record(start_again(self._spec.slurm, self._spec.job_id, without))

    def _announce(self) -> None:
        spec, policy, before = self._spec, self._spec.policy, self._spec.succession
        if before is not None:
            self._record(
                journal.CoordinatorLost(
                    host=before.lost,
                    successor=spec.host,
                    fence=spec.fence,
                    silent_s=round(before.silent_s, 3),
                )
            )
            return
        self._record(
            journal.JobStarted(
                nodes=list(policy.nodes),
                active_nodes=policy.active_nodes,
                spares=policy.max_nodes - policy.active_nodes,
                max_restarts=policy.max_restarts,
                argv=[spec.welcome.program.target, *spec.welcome.program.args],
                host=spec.host,
                fence=spec.fence,
                version=__version__,
                submitted=spec.submitted,
            )
        )
        self._terminal.say(f"job {spec.job_id}: run directory {spec.run_dir.path}")

    def _agents_environ(self, port: int) -> dict[str, str]:
        address = self._spec.address
        host = f"[{address}]" if ":" in address else address
        return {
            **self._spec.step_environ,
            rpc.COORDINATOR_VARIABLE: f"{host}:{port}",
            rpc.TOKEN_VARIABLE: self._token,
            rpc.FENCE_VARIABLE: self._spec.fence,
            "NVRX_RUN_DIR": str(self._spec.run_dir.path),
        }

    def _new_returns(self, environ: Mapping[str, str]) -> Returns | None:
        spec, rejoin_argv = self._spec, self._spec.rejoin_argv
        if rejoin_argv is None or spec.slurm is None:
            return None

        def new_step(node: str) -> AgentsStep:
            self._terminal.say(f"starting a new agent on {node}")
            return AgentsStep(rejoin_argv(node), environ, self._terminal.say)

        def stays_away(node: str, why: str) -> None:
            self._feed(steps.NodeStaysAway(node, why))

        return Returns(new_step, spec.slurm, spec.job_id, stays_away)

    async def _end_returned(self) -> None:
        if self._returns is not None:
            await self._returns.close(_SRUN_GRACE_S)

    async def _start_step(self, step: AgentsStep) -> None:
        try:
            await step.start()
        except OSError as error:
            self._feed(steps.StepEnded(f"srun cannot be started: {error}"))
            return

        async def watch() -> None:
            self._feed(steps.StepEnded(await step.wait()))

        if self._spec.succession is None:
            # Otherwise it holds this host's agent alone: the others come by themselves.
            self._spawn(watch())

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- events in -----------------------------------------------------------------------------------

    def joined(self, node: str, joined: msg.Joined, address: str) -> None:
        if self._returns is not None:
            self._returns.joined(node, address)
        if joined.health is not None:
            self._health_told(node, joined.health)
        self._feed(steps.NodeJoined(node, joined.slots, joined.place, joined.location))

    def unusable(self, node: str, why: str) -> None:
        self._feed(steps.NodeUnusable(node, why))

    def lost(self, node: str, why: str, by_signal: bool) -> None:
        self._feed(steps.NodeLost(node, why, by_signal))
        if by_signal:
            self._bad_nodes.discard(node)
        if self._charge is not None and self._is_alone():
            self._background.append(
                self._spawn(self._charge.while_alone(self._is_alone, self._step_of_agents.kill))
            )

    def _is_alone(self) -> bool:
        """Tell whether the job has other hosts than this, and none of them is connected."""
        spec, members = self._spec, self._machine.members
        others = any(node != spec.host for node in spec.policy.nodes[:2])
        return others and not members.has_others_than(spec.host)

    def message(self, node: str, message: msg.AgentMessage) -> None:
        match message:
            case msg.RankExited() as m:
                self._feed(steps.RankExited(node, m.cycle, m.rank, m.exit, m.after_stop, m.detail, m.oom))
            case msg.RankStalled() as m:
                self._feed(steps.RankStalled(node, m.cycle, m.rank, m.timeout_s, tuple(m.snapshots), m.why))
            case msg.Snapshots() as m:
                self._feed(steps.SnapshotsTaken(node, m.cycle, tuple(m.snapshots)))
            case msg.WorkersGone() as m:
                for left in m.gpus_left:
                    self._record(gpu_memory_event(node, left))
                self._feed(steps.NodeStopped(node, m.cycle, m.stalled_s))
            case msg.StartFailed() as m:
                self._feed(steps.StartFailed(node, m.cycle, m.why))
            case msg.RanksReady() as m:
                self._feed(steps.NodeReady(node, m.cycle))
            case msg.RanksStepping() as m:
                self._feed(steps.NodeStepping(node, m.cycle, m.step))
            case msg.ControlRequest() as m:
                self._feed(steps.ControlRequested(node, m.cycle, m.rank, m.action, m.why))
            case msg.NodeHealth() as m:
                self._health_told(node, m)
            case msg.Leaving() as m:
                self._feed(steps.NodeLeaving(node, m.why, m.by_signal))
            case msg.HangEvidence() as m:
                if m.cycle == self._machine.cycle and self._machine.has_rank(node, m.rank):
                    self._spawn(self._write_evidence(node, m))
            case msg.TracesKept() as m:
                if m.cycle <= self._machine.cycle:
                    self._record(traces_event(node, m), m.cycle)
            case msg.TimeoutsCalculated() as m:
                if m.cycle == self._machine.cycle:
                    self._timeouts_calculated(node, m)
            case msg.WorkersStarted() | msg.StepReached() | msg.CheckpointReport() as m:
                if m.cycle == self._machine.cycle:
                    self._note(node, m)
            case _:
                pass

    def _note(self, node: str, m: msg.WorkersStarted | msg.StepReached | msg.CheckpointReport) -> None:
        """Record what reports need, and tell the machine how far training is."""
        match m:
            case msg.WorkersStarted():
                self._record(
                    journal.WorkersStarted(
                        node=node, ranks=m.ranks, pids=m.pids, warm=m.warm, why_cold=m.why_cold
                    )
                )
            case msg.StepReached():
                self._step = highest(self._step, m.step)
                self._feed(steps.StepReached(node, m.cycle, m.step))
                if time.monotonic() - self._step_written >= _PROGRESS_INTERVAL_S:
                    self._record_progress(m.cycle)
            case msg.CheckpointReport(what=CheckpointEvent.SAVED):
                self._record(journal.CheckpointSaved(step=m.step, layer=m.layer, rank=m.rank))
                self._feed(steps.CheckpointSaved(node, m.cycle, m.step))
            case msg.CheckpointReport():
                self._record(journal.CheckpointLoaded(step=m.step, layer=m.layer, rank=m.rank))
                self._feed(steps.CheckpointLoaded(node, m.cycle, m.step))

    def _health_told(self, node: str, health: msg.NodeHealth) -> None:
        self._record(health_event(node, health))
        self._feed(steps.NodeHealth(node, complaint_of(health.findings)))

    def _timeouts_calculated(self, node: str, m: msg.TimeoutsCalculated) -> None:
        """Later cycles begin with them, and later jobs if they are to be kept."""
        try:
            adopted = adopt(self._monitoring, m.heartbeat, m.section)
        except ValueError as error:
            self._terminal.say(f"WARNING: time-outs that a rank on {node} calculated are ignored: {error}")
            return
        if adopted == self._monitoring:
            return
        self._monitoring = adopted
        heartbeat, section = adopted.heartbeat, adopted.section
        self._record(
            journal.TimeoutsCalculated(
                initial=heartbeat.initial,
                subsequent=heartbeat.subsequent,
                section=section.section,
                out_of_section=section.out_of_section,
            )
        )
        if self._spec.keep_timeouts:
            self._spawn(self._save_timeouts())

    async def _save_timeouts(self) -> None:
        async with self._saving:
            loop = asyncio.get_running_loop()
            path, now = self._spec.run_dir.ft_state, self._monitoring
            try:
                await loop.run_in_executor(None, save_ft_state, path, now.heartbeat, now.section)
            except OSError as error:
                self._complain("calculated time-outs", error)

    async def _write_evidence(self, node: str, m: msg.HangEvidence) -> None:
        path = self._spec.run_dir.rank_stacks(m.cycle, m.rank)
        loop = asyncio.get_running_loop()
        self._record(evidence_event(node, m, str(path.relative_to(self._spec.run_dir.path))), m.cycle)
        try:
            await loop.run_in_executor(None, write_evidence, path, node, m)
        except OSError as error:
            self._complain("stacks of a hung rank", error)

    async def output(self, node: str, message: msg.LogMessage) -> None:
        await self._log_queue.put((node, message))
        if isinstance(message, msg.LogEnd):
            self._complete[message.cycle, message.rank].set()

    def _store_lost(self, why: str) -> None:
        self._stores.start()
        self._feed(steps.StoreLost(self._spec.host, why))

    def _feed(self, event: steps.Event) -> None:
        if (self._ended is not None and self._ended.done()) or not self._is_in_charge():
            return
        try:
            commands = self._machine.handle(event, time.monotonic())
            if self._charge is None or not _needs_charge(commands) or self._charge.confirm():
                self._carry_out(commands)
        except Exception as error:
            # Logged and forgotten by the event loop, it would leave a job that waits for ever.
            traceback.print_exc()
            why = f"an error in {self._spec.command} itself: {error!r}"
            self._record(journal.JobEnded(code=EXIT_FAILED, why=why))
            self._carry_out([steps.End(EXIT_FAILED, why)])

    # --- commands out --------------------------------------------------------------------------------

    def _carry_out(self, commands: Sequence[steps.Command]) -> None:
        loop = asyncio.get_running_loop()
        for command in commands:
            match command:
                case steps.Write():
                    self._record(command.event, command.cycle)
                case steps.StartCycle():
                    self._step = None
                    for key in [key for key in self._complete if key[0] < command.cycle - 1]:
                        del self._complete[key]
                    self._spawn(self._start_cycle(command))
                case steps.StopCycle():
                    stop = msg.StopWorkers(
                        cycle=command.cycle,
                        hung=list(command.hung),
                        signal=command.signal,
                        grace_s=command.grace_s,
                        look_s=command.look_s,
                    )
                    self._send_all(command.nodes, stop)
                case steps.ProbeNodes():
                    self._send_all(command.nodes, msg.Probe(cycle=command.cycle))
                case steps.AskRanksToStop():
                    self._asked_to_stop = command.cycle
                    self._send_all(command.nodes, msg.AskToStop(cycle=command.cycle))
                case steps.ReadIteration():
                    self._background.append(self._spawn(self._read_iteration(command.cycle)))
                case steps.ConsultSlurm():
                    self._spawn(self._consult_slurm())
                case steps.Recall() if self._returns is not None:
                    self._returns.recall(command.node)
                case steps.Disconnect():
                    self._server.disconnect(command.node, command.why)
                case steps.Arm():
                    self._disarm(command.timer)
                    event = steps.TimerFired(command.timer)
                    self._timers[command.timer] = loop.call_later(command.seconds, self._feed, event)
                case steps.Disarm():
                    self._disarm(command.timer)
                case steps.End():
                    if self._ended is not None and not self._ended.done():
                        self._ended.set_result(command)

    def _disarm(self, timer: steps.Timer) -> None:
        handle = self._timers.pop(timer, None)
        if handle is not None:
            handle.cancel()

    def _send_all(self, nodes: Sequence[str], message: msg.CoordinatorMessage) -> None:
        for node in nodes:
            self._server.send(node, message)

    async def _start_cycle(self, command: steps.StartCycle) -> None:
        try:
            port = await self._stores.next_port()
        except StoreError:
            return  # _store_lost is called too, and knows why
        machine = self._machine
        if machine.cycle != command.cycle or machine.phase not in (Phase.RUNNING, Phase.DIAGNOSING):
            return
        for group_rank, node in enumerate(command.nodes):
            self._server.send(
                node,
                msg.StartWorkers(
                    cycle=command.cycle,
                    group_rank=group_rank,
                    group_world_size=len(command.nodes),
                    first_rank=group_rank * command.slots,
                    world_size=len(command.nodes) * command.slots,
                    master_addr=self._stores.address,
                    master_port=port,
                    monitoring=self._monitoring,
                ),
            )
        if self._asked_to_stop == command.cycle:
            # While the store was being opened: no agent knew of the cycle then.
            self._send_all(command.nodes, msg.AskToStop(cycle=command.cycle))

    async def _ask_slurm(self) -> Job:
        if self._spec.slurm is None:
            raise SlurmUnavailableError("there is no Slurm")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self._spec.slurm.job, self._spec.job_id)

    async def _consult_slurm(self) -> None:
        try:
            job = await self._ask_slurm()
            answer = steps.SlurmAnswered(job.state, job.preempted)
        except SlurmUnavailableError:
            answer = steps.SlurmAnswered(None)
        except UnknownJobError:
            answer = steps.SlurmAnswered("gone")
        self._feed(answer)

    async def _watch_time_limit(self) -> None:
        def near(why: str) -> None:
            self._feed(steps.DrainRequested(why=why))

        await watch_time_limit(self._spec.ends, self._spec.time_limit_margin_s, self._ask_slurm, near)

    async def _read_iteration(self, cycle: int | None) -> None:
        step = None
        if self._iterations is not None:
            try:
                step = await self._iterations.read()
            except IterationFileError as error:
                # Before the first checkpoint there may be none.
                if cycle is not None and not self._told_of_iterations:
                    self._told_of_iterations = True
                    path = self._spec.iteration_file
                    self._terminal.say(
                        f"WARNING: no iteration from {path}, cycles may not be scored: {error}"
                    )
        self._feed(steps.IterationRead(cycle, step))

    # --- journal, logs, console ----------------------------------------------------------------------

    def _record(self, event: AnyEvent, cycle: int | None = None) -> None:
        if not self._is_in_charge():
            return
        if cycle is None:
            cycle = self._machine.cycle
        if isinstance(event, journal.WorkersStopped | journal.JobEnded):
            self._record_progress(cycle)
        match event:
            case journal.NodeLost() | journal.NodeExcluded(on_trial=False):
                self._bad_nodes.add(event.node)
            case journal.NodeJoined():
                self._bad_nodes.discard(event.node)
            case _:
                pass
        try:
            record = self._journal.append(cycle, event)
        except OSError as error:
            self._complain("journal", error)
            record = Record(ts=time.time(), job="", attempt=0, cycle=cycle, event=event)
        info = self._cycle_infos.take(record)
        if info is not None and self._spec.cycle_info_dir is not None:
            self._spawn(self._write_cycle_info(self._spec.cycle_info_dir, info))
        line = console.line_for(record)
        if line is not None:
            self._terminal.say(line)
        if isinstance(event, journal.Verdict) and event.rank is not None:
            self._spawn(self._show_last_lines(record.cycle, event.rank))

    async def _write_cycle_info(self, directory: Path, info: CycleInfo) -> None:
        # The lock is fair: what comes first is written first.
        async with self._saving:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(None, write_cycle_info, directory, info)
            except OSError as error:
                self._complain("cycle info", error)

    def _record_progress(self, cycle: int) -> None:
        step, self._step = self._step, None
        if step is not None:
            self._step_written = time.monotonic()
            self._record(journal.Progress(step=step), cycle)

    async def _show_last_lines(self, cycle: int, rank: int) -> None:
        """Off the restart path: what the culprit said last, for whoever reads the job's output file."""
        complete = self._complete[cycle, rank]
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(complete.wait(), _LAST_LINES_TIMEOUT_S)
            await asyncio.wait_for(self._log_queue.join(), _LAST_LINES_TIMEOUT_S)
        for line in last_lines(self._spec.run_dir.rank_log(cycle, rank), _CULPRIT_LINES):
            self._terminal.say(f"  rank {rank} | {line}")

    async def _write_logs(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch: list[tuple[str, msg.LogMessage]] = []
            with contextlib.suppress(asyncio.TimeoutError):
                patience = REORDER_S if self._logs.waits else None
                batch.append(await asyncio.wait_for(self._log_queue.get(), patience))
            while not self._log_queue.empty() and len(batch) < _OUTPUT_QUEUE:
                batch.append(self._log_queue.get_nowait())
            error = await loop.run_in_executor(None, self._write_batch, batch)
            if error is not None:
                self._complain("output", error)
            for _ in batch:
                self._log_queue.task_done()

    def _write_batch(self, batch: Sequence[tuple[str, msg.LogMessage]]) -> Exception | None:
        """Write what can be written; return the last reason why something could not.

        Whatever goes wrong with one message, the next is taken: if nobody read the queue, every rank would
        soon wait in write(2).
        """
        now = time.time()
        failed: Exception | None = None
        for node, message in batch:
            try:
                self._logs.write(node, message, now)
            except Exception as error:
                failed = error
        try:
            self._logs.flush(now - REORDER_S)
            if self._app_log is not None:
                self._app_log.flush()
        except Exception as error:
            failed = error
        return failed

    def _show_line(self, cycle: int, rank: int, text: bytes) -> None:
        if self._app_log is not None:
            self._app_log.add(cycle, rank, self._machine.world_size, text)
        if rank == 0 and self._spec.shows_rank_0:
            # As it came, whatever this terminal's encoding.
            self._terminal.show(text + b"\n")

    def _complain(self, what: str, error: Exception) -> None:
        """Say once that something can't be written; training goes on."""
        if what not in self._complained:
            self._complained.add(what)
            self._terminal.say(f"WARNING: the {what} cannot be written to {self._spec.run_dir.path}: {error}")


def _needs_charge(commands: Sequence[steps.Command]) -> bool:
    """Tell whether a Coordinator that was replaced while it was suspended must not do this."""
    return any(isinstance(command, steps.StartCycle | steps.End) for command in commands)


def run_job(spec: JobSpec) -> int:
    """Run ``spec`` in a new event loop; return the exit code."""

    async def run() -> int:
        # grpc.aio binds its server to the loop that runs when it is made.
        return await JobRunner(spec).run()

    prepare_for_many_nodes()
    return asyncio.run(run())


def _open_logs() -> int:
    """How many of the ranks' logs may be open: a quarter of what this process may, for nodes need the rest.

    Opening is what costs, above all on a shared file system.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(256, soft // 4)


def prepare_for_many_nodes() -> None:
    """Raise what this process is held to by default and what thousands of streams would reach."""
    # Each node takes a descriptor.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Every stream is some hundred objects that stay: looking for garbage among them after each 700 new ones,
    # the default, took a sixth of the processor time of forming a cycle of 8,192 nodes.
    gc.set_threshold(50_000, 20, 50)
