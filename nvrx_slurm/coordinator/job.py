"""The Coordinator of one job: feeds the state machine, carries out what it says."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
import traceback
from collections.abc import Sequence

from nvrx_slurm import __version__, journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.accusations import Accusations
from nvrx_slurm.coordinator.adopted_timeouts import AdoptedTimeouts
from nvrx_slurm.coordinator.agent_messages import AgentMessages
from nvrx_slurm.coordinator.agents import SRUN_GRACE_S, Agents, where_to_find
from nvrx_slurm.coordinator.allocation import Allocation
from nvrx_slurm.coordinator.app_log import AppLog
from nvrx_slurm.coordinator.attribution_service import AttributionService, user_name
from nvrx_slurm.coordinator.attributor import Attributor, finding_of
from nvrx_slurm.coordinator.charge import EXIT_REPLACED, Charge
from nvrx_slurm.coordinator.cycle import CycleMachine, Phase
from nvrx_slurm.coordinator.cycle_info import CycleInfos
from nvrx_slurm.coordinator.handover import save_handover
from nvrx_slurm.coordinator.iteration_file import IterationFile, IterationFileError
from nvrx_slurm.coordinator.job_end import leave_exit_code
from nvrx_slurm.coordinator.job_files import JobFiles
from nvrx_slurm.coordinator.job_spec import JobSpec
from nvrx_slurm.coordinator.pace_reports import PaceReports
from nvrx_slurm.coordinator.policy import EXIT_FAILED, EXIT_OK, EXIT_RESTART_ELSEWHERE
from nvrx_slurm.coordinator.rank_output import LAST_LINES_TIMEOUT_S, RankOutput
from nvrx_slurm.coordinator.recorder import Recorder
from nvrx_slurm.coordinator.server import AgentServer
from nvrx_slurm.coordinator.store import RendezvousStores, StoreError
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.coordinator.terminal import Terminal
from nvrx_slurm.journal import JournalWriter, Record
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rpc

_AGENTS_GRACE_S = 15.0
_TERMINAL_GRACE_S = 2.0
_DRAIN_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1)


class JobRunner:
    """Runs one job from its first cycle to its exit code. One instance, one :meth:`run`."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._machine = CycleMachine(spec.policy)
        self._token = _token_of(spec)
        self._server = AgentServer(self._token, spec.fence, spec.welcome, self)
        bind = spec.listening.address if spec.listening else spec.address
        self._stores = RendezvousStores(spec.address, self._store_lost, bind)
        self._terminal = Terminal(spec.command)
        self._tasks = Tasks()
        self._files = JobFiles(spec.run_dir.path, self._terminal.say)
        app_log = None if spec.applog_prefix is None else AppLog(spec.applog_prefix)
        self._output = self._new_output(app_log)
        self._recorder = self._new_recorder(app_log)
        self._record = self._recorder.record
        self._allocation = Allocation(spec, self._terminal.say)
        ft_state = spec.run_dir.ft_state if spec.keep_timeouts else None
        self._timeouts = AdoptedTimeouts(
            spec.monitoring, ft_state, self._files, self._tasks, self._terminal.say
        )
        self._messages = AgentMessages(
            self._machine,
            self._feed,
            self._recorder,
            self._timeouts,
            spec.run_dir,
            self._files,
            self._tasks,
            PaceReports(self._machine, self._feed, self._record, self._server.send, self._tasks),
        )
        self._attributor: Attributor | None = None
        if spec.attribution:
            self._attributor = Attributor(spec.run_dir.path, self._output.settle, self._record)
        self._service: AttributionService | None = None
        if spec.attribution_endpoint:
            log_of = app_log.path if app_log else spec.run_dir.merged_log
            self._service = AttributionService(
                spec.attribution_endpoint, log_of, user_name(), spec.job_id, self._record
            )
        self._agents: Agents | None = None
        self._timers: dict[steps.Timer, asyncio.TimerHandle] = {}
        self._ended: asyncio.Future[steps.End] | None = None
        self._asked_to_stop: int | None = None
        """The cycle whose ranks were asked to save and end."""
        self._iterations = None if spec.iteration_file is None else IterationFile(spec.iteration_file)
        self._told_of_iterations = False
        self._accusations: Accusations | None = None
        if spec.slurm is not None:
            self._accusations = Accusations(spec.slurm, spec.job_id, spec.restart_count, self._terminal.say)
        self._charge: Charge | None = None
        if spec.lease is not None and spec.slurm is not None:
            self._charge = Charge(
                spec.run_dir, spec.lease, spec.host, spec.slurm, self._replaced, self._terminal.say
            )

    def _new_output(self, app_log: AppLog | None) -> RankOutput:
        return RankOutput(
            self._spec.run_dir,
            app_log,
            world_size=lambda: self._machine.world_size,
            show=self._terminal.show if self._spec.shows_rank_0 else None,
            complain=self._files.complain,
        )

    def _new_recorder(self, app_log: AppLog | None) -> Recorder:
        spec = self._spec
        return Recorder(
            JournalWriter(spec.run_dir.journal, spec.job_id, spec.restart_count),
            cycle=lambda: self._machine.cycle,
            may_write=self._is_in_charge,
            cycle_infos=CycleInfos(app_log.path if app_log else spec.run_dir.merged_log),
            cycle_info_dir=spec.cycle_info_dir,
            files=self._files,
            tasks=self._tasks,
            say=self._terminal.say,
            told=self._recorded,
        )

    async def run(self) -> int:
        """Run to the end; return the exit code. No process of the job is left when it returns."""
        self._ended = asyncio.get_running_loop().create_future()
        self._handle_signals()
        where = where_to_find(self._spec, await self._listen(), self._token)
        if self._charge is not None:
            save_handover(self._spec.run_dir.handover, self._spec.handover())
            self._charge.begin(where[rpc.COORDINATOR_VARIABLE])
        self._announce()
        self._stores.start()
        self._output.start()
        self._agents = agents = Agents(self._spec, where, self._feed, self._tasks, self._terminal.say)
        end = steps.End(EXIT_FAILED, "")
        if self._spec.time_limit_margin_s > 0:
            self._tasks.spawn_until_end(self._allocation.watch_time_limit(self._time_is_short))
        try:
            self._carry_out(self._begin())
            await agents.start()
            end = await self._ended
        finally:
            await self._wind_up(agents, end.code)
        code = await self._settle(end)
        await agents.end(0.0)
        self._files.sum_up()
        self._recorder.close()
        self._terminal.close(_TERMINAL_GRACE_S)
        return code

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for sig in self._spec.stop_signals:
            # nohup(1) has SIGHUP ignored, and means it.
            if signal.getsignal(sig) is not signal.SIG_IGN:
                loop.add_signal_handler(sig, self._feed, steps.StopRequested(sig))
        for sig in set(_DRAIN_SIGNALS) - set(self._spec.stop_signals):
            loop.add_signal_handler(sig, self._feed, steps.DrainRequested(sig))

    async def _wind_up(self, agents: Agents, code: int) -> None:
        """End whatever runs for the job, and have what it said written."""
        await self._server.shut_down(_AGENTS_GRACE_S, code)
        if self._is_in_charge():
            await agents.end(SRUN_GRACE_S)
        else:
            # The successor's agents live by these steps.
            await agents.leave()
        await self._stores.close()
        await self._output.drain()
        await self._tasks.finish(2 * LAST_LINES_TIMEOUT_S)
        await self._files.settle()
        self._output.close()
        if self._attributor is not None:
            await self._attributor.finish(failed=code != EXIT_OK)
        if self._service is not None:
            await self._service.finish(failed=code != EXIT_OK)

    def _begin(self) -> Sequence[steps.Command]:
        before = self._spec.succession
        if before is None:
            return self._machine.start(time.monotonic())
        why = f"the Coordinator's host has been silent for {before.silent_s:.0f} s"
        return self._machine.take_over(time.monotonic(), before.lost, why, before.restarts, before.excluded)

    async def _settle(self, end: steps.End) -> int:
        """Arrange with Slurm what is left to do; return the exit code."""
        charge, slurm, code = self._charge, self._spec.slurm, end.code
        if charge is not None and not charge.confirm():
            return await charge.follow()
        if code == EXIT_RESTART_ELSEWHERE:
            self._record(self._allocation.requeue(self._machine.proven_bad, end.why if end.hold else ""))
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
                launches=spec.launches,
                max_batch_requeue=spec.max_batch_requeue,
            )
        )
        self._terminal.say(f"job {spec.job_id}: run directory {spec.run_dir.path}")
        if policy.max_unknown_nodes and policy.active_nodes > 1:
            self._terminal.say(
                f"waits {policy.join_timeout_s:g} s for {policy.active_nodes} nodes, this one among them"
            )

    # --- events in -----------------------------------------------------------------------------------

    def joined(self, node: str, joined: msg.Joined, address: str) -> None:
        if self._agents is not None:
            self._agents.joined(node, address)
        if joined.health is not None:
            self._messages.take(node, joined.health)
        self._feed(steps.NodeJoined(node, joined.slots, joined.place, joined.location))

    def unusable(self, node: str, why: str) -> None:
        self._feed(steps.NodeUnusable(node, why))

    def lost(self, node: str, why: str, by_signal: bool) -> None:
        self._feed(steps.NodeLost(node, why, by_signal))
        if by_signal:
            self._allocation.acquit(node)
            if self._accusations is not None:
                self._accusations.acquit(node)
        if self._charge is not None and self._agents is not None and self._is_alone():
            self._tasks.spawn_until_end(self._charge.while_alone(self._is_alone, self._agents.kill))

    def _is_alone(self) -> bool:
        """Tell whether the job has other hosts than this, and none of them is connected."""
        spec, members = self._spec, self._machine.members
        others = any(node != spec.host for node in spec.policy.nodes[:2])
        return others and not members.has_others_than(spec.host)

    def message(self, node: str, message: msg.AgentMessage) -> None:
        self._messages.take(node, message)

    async def output(self, node: str, message: msg.LogMessage) -> None:
        await self._output.put(node, message)

    def _time_is_short(self, why: str) -> None:
        self._feed(steps.DrainRequested(why=why))

    def _store_lost(self, why: str) -> None:
        self._stores.start()
        self._feed(steps.StoreLost(self._spec.host, why))

    def _feed(self, event: steps.Event) -> None:
        is_late = isinstance(event, steps.CycleAttributed)
        ended = self._ended is not None and self._ended.done()
        if (ended and not is_late) or not self._is_in_charge():
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
        for command in commands:
            match command:
                case steps.Write():
                    self._record(command.event, command.cycle)
                case steps.StartCycle():
                    self._recorder.cycle_started()
                    self._output.cycle_started(command.cycle)
                    self._tasks.spawn(self._start_cycle(command))
                case steps.StopCycle():
                    self._send_all(command.nodes, _stop_workers(command))
                case steps.ProbeNodes():
                    self._send_all(command.nodes, msg.Probe(cycle=command.cycle))
                case steps.AskRanksToStop():
                    self._asked_to_stop = command.cycle
                    self._send_all(command.nodes, msg.AskToStop(cycle=command.cycle))
                case steps.ReadIteration():
                    self._tasks.spawn_until_end(self._read_iteration(command.cycle))
                case steps.ConsultSlurm():
                    self._tasks.spawn(self._consult_slurm())
                case steps.Recall() if self._agents is not None:
                    self._agents.recall(command.node)
                case steps.Disconnect():
                    self._server.disconnect(command.node, command.why)
                case steps.Arm():
                    self._arm(command)
                case steps.Disarm():
                    self._disarm(command.timer)
                case steps.End():
                    if self._ended is not None and not self._ended.done():
                        self._ended.set_result(command)

    def _arm(self, command: steps.Arm) -> None:
        self._disarm(command.timer)
        event = steps.TimerFired(command.timer)
        loop = asyncio.get_running_loop()
        self._timers[command.timer] = loop.call_later(command.seconds, self._feed, event)

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
                    monitoring=self._timeouts.monitoring,
                ),
            )
        if self._asked_to_stop == command.cycle:
            # While the store was being opened: no agent knew of the cycle then.
            self._send_all(command.nodes, msg.AskToStop(cycle=command.cycle))

    async def _consult_slurm(self) -> None:
        self._feed(await self._allocation.consult())

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

    # --- what has happened ---------------------------------------------------------------------------

    def _recorded(self, record: Record) -> None:
        self._allocation.note(record.event)
        if self._attributor is not None:
            self._attributor.take(record)
        if self._service is not None:
            self._service.take(record)
        if isinstance(record.event, journal.CycleAttributed):
            self._feed(finding_of(record.event, record.cycle))
        if self._accusations is not None and self._accusations.note(record.event):
            self._tasks.spawn(self._accusations.publish())
        if isinstance(record.event, journal.Verdict) and record.event.rank is not None:
            self._tasks.spawn(self._show_last_lines(record.cycle, record.event.rank))

    async def _show_last_lines(self, cycle: int, rank: int) -> None:
        """Off the restart path: what the culprit said last, for whoever reads the job's output file."""
        for line in await self._output.last_lines(cycle, rank):
            self._terminal.say(f"  rank {rank} | {line}")


def _token_of(spec: JobSpec) -> str:
    if spec.listening is not None:
        return spec.listening.token
    if spec.succession is not None:
        return spec.succession.token
    return rpc.new_token()


def _stop_workers(command: steps.StopCycle) -> msg.StopWorkers:
    return msg.StopWorkers(
        cycle=command.cycle,
        hung=list(command.hung),
        signal=command.signal,
        grace_s=command.grace_s,
        look_s=command.look_s,
    )


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


def prepare_for_many_nodes() -> None:
    """Raise what this process is held to by default and what thousands of streams would reach."""
    # Each node takes a descriptor.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Every stream is some hundred objects that stay: looking for garbage among them after each 700 new ones,
    # the default, took a sixth of the processor time of forming a cycle of 8,192 nodes.
    gc.set_threshold(50_000, 20, 50)
