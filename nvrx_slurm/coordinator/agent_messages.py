"""What agents say, as events for the state machine and for the journal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nvrx_slurm import journal
from nvrx_slurm.coordinator import steps
from nvrx_slurm.coordinator.adopted_timeouts import AdoptedTimeouts
from nvrx_slurm.coordinator.cycle import CycleMachine
from nvrx_slurm.coordinator.hang_evidence import (
    evidence_event,
    gpu_memory_event,
    traces_event,
    write_evidence,
)
from nvrx_slurm.coordinator.job_files import JobFiles
from nvrx_slurm.coordinator.pace_reports import PaceReports
from nvrx_slurm.coordinator.recorder import Recorder
from nvrx_slurm.coordinator.run_dir import RunDir
from nvrx_slurm.coordinator.slow_ranks import straggler_event
from nvrx_slurm.coordinator.tasks import Tasks
from nvrx_slurm.coordinator.unhealthy import complaint_of, health_event
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire.rank_channel import CheckpointEvent

_OF_THE_RUNNING_CYCLE = (
    msg.WorkersStarted,
    msg.StepReached,
    msg.CheckpointReport,
    msg.StragglerReport,
    msg.InProcessRestarted,
    msg.TimeoutsCalculated,
)
"""What counts for nothing when its cycle is over."""


def event_of(node: str, message: msg.AgentMessage) -> steps.Event | None:
    """Return what a message of ``node`` is to the machine; None: nothing."""
    match message:
        case msg.RankExited() as m:
            return steps.RankExited(node, m.cycle, m.rank, m.exit, m.after_stop, m.detail, m.oom)
        case msg.RankStalled() as m:
            return steps.RankStalled(node, m.cycle, m.rank, m.timeout_s, tuple(m.snapshots), m.why)
        case msg.Snapshots() as m:
            return steps.SnapshotsTaken(node, m.cycle, tuple(m.snapshots))
        case msg.WorkersGone() as m:
            return steps.NodeStopped(node, m.cycle, m.stalled_s)
        case msg.StartFailed() as m:
            return steps.StartFailed(node, m.cycle, m.why)
        case msg.RanksReady() as m:
            return steps.NodeReady(node, m.cycle)
        case msg.RanksStepping() as m:
            return steps.NodeStepping(node, m.cycle, m.step)
        case msg.ControlRequest() as m:
            return steps.ControlRequested(node, m.cycle, m.rank, m.action, m.why)
        case msg.RankGivenUp() as m:
            return steps.RankGivenUp(node, m.cycle, m.rank, m.why)
        case msg.InProcessRestarted() as m:
            return steps.RestartedInProcess(node, m.cycle, m.restart.faulty, m.restart.why)
        case msg.NodeHealth() as m:
            return steps.NodeHealth(node, complaint_of(m.findings))
        case msg.Leaving() as m:
            return steps.NodeLeaving(node, m.why, m.by_signal)
        case msg.StepReached() as m:
            return steps.StepReached(node, m.cycle, m.step)
        case msg.CheckpointReport(what=CheckpointEvent.SAVED) as m:
            return steps.CheckpointSaved(node, m.cycle, m.step)
        case msg.CheckpointReport(what=CheckpointEvent.LOADED) as m:
            return steps.CheckpointLoaded(node, m.cycle, m.step)
        case _:
            return None


class AgentMessages:
    """Takes one message after the other.

    Args:
        machine: looked at only: which cycle it is, and who has ranks.
        feed: takes the machine's events.
    """

    def __init__(
        self,
        machine: CycleMachine,
        feed: Callable[[steps.Event], None],
        recorder: Recorder,
        timeouts: AdoptedTimeouts,
        run_dir: RunDir,
        files: JobFiles,
        tasks: Tasks,
        pace: PaceReports,
    ) -> None:
        self._pace = pace
        self._machine = machine
        self._feed = feed
        self._recorder = recorder
        self._timeouts = timeouts
        self._run_dir = run_dir
        self._files = files
        self._tasks = tasks

    def take(self, node: str, message: msg.AgentMessage) -> None:
        """Record what reports need, and tell the machine."""
        if isinstance(message, _OF_THE_RUNNING_CYCLE) and message.cycle != self._machine.cycle:
            return
        self._record(node, message)
        event = event_of(node, message)
        if event is not None:
            self._feed(event)

    def _record(self, node: str, message: msg.AgentMessage) -> None:
        record = self._recorder.record
        match message:
            case msg.WorkersStarted() as m:
                record(
                    journal.WorkersStarted(
                        node=node, ranks=m.ranks, pids=m.pids, warm=m.warm, why_cold=m.why_cold
                    )
                )
            case msg.StepReached() as m:
                self._recorder.step_reached(m.step, m.cycle)
            case msg.CheckpointReport(what=CheckpointEvent.SAVED) as m:
                record(journal.CheckpointSaved(step=m.step, layer=m.layer, rank=m.rank))
            case msg.CheckpointReport(what=CheckpointEvent.HELD_UP) as m:
                record(journal.CheckpointHeldUp(save=m.step, rank=m.rank, why=m.why))
            case msg.CheckpointReport() as m:
                record(journal.CheckpointLoaded(step=m.step, layer=m.layer, rank=m.rank, why=m.why))
            case msg.StragglerReport() as m:
                slow_node = self._machine.node_of_rank(m.verdict.rank)
                # Whose name a rank may tell, but not where it is.
                if slow_node is not None:
                    record(straggler_event(m.verdict, slow_node, told_by=m.rank))
            case msg.InProcessRestarted(restart=restart):
                record(
                    journal.InprocessRestart(
                        iteration=restart.iteration,
                        ranks=list(restart.faulty),
                        terminated=restart.terminated,
                        world_size=restart.world_size,
                        took_s=restart.took_s,
                        phases_s=restart.phases_s,
                        why=restart.why,
                    )
                )
            case msg.NodePace() as m:
                self._pace.take(node, m)
            case msg.TimeoutsCalculated() as m:
                adopted = self._timeouts.calculated(node, m)
                if adopted is not None:
                    record(adopted)
            case msg.NodeHealth() as m:
                record(health_event(node, m))
            case msg.WorkersGone() as m:
                for left in m.gpus_left:
                    record(gpu_memory_event(node, left))
            case msg.TracesKept() as m:
                if m.cycle <= self._machine.cycle:
                    record(traces_event(node, m), m.cycle)
            case msg.HangEvidence() as m:
                if m.cycle == self._machine.cycle and self._machine.has_rank(node, m.rank):
                    self._keep_evidence(node, m)
            case _:
                pass

    def _keep_evidence(self, node: str, m: msg.HangEvidence) -> None:
        path = self._run_dir.rank_stacks(m.cycle, m.rank)
        self._recorder.record(evidence_event(node, m, str(path.relative_to(self._run_dir.path))), m.cycle)
        self._tasks.spawn(self._files.write("stacks of a hung rank", partial(write_evidence, path, node, m)))
