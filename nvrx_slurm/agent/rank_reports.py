"""What ranks tell on their socket, passed on to the monitors and to the Coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable

from nvrx_slurm.agent.local_cycle import LocalCycle
from nvrx_slurm.agent.node_pace import NodePace
from nvrx_slurm.agent.throttle import Throttle
from nvrx_slurm.wire import messages as msg
from nvrx_slurm.wire import rank_channel

_log = logging.getLogger(__name__)


class RankReports:
    """Takes each request of a rank of the running cycle."""

    def __init__(
        self,
        say: Callable[[msg.AgentMessage], None],
        on_failed: Callable[[LocalCycle, int, int], None],
        pace: NodePace,
    ) -> None:
        """``on_failed`` is called with the rank whose main thread has failed, and with the exit code."""
        self._pace = pace
        self._say = say
        self._throttle = Throttle(say)
        self._on_failed = on_failed

    def flush(self) -> None:
        """Pass on what was held back."""
        self._throttle.flush()

    def take(self, cycle: LocalCycle, request: rank_channel.RankRequest) -> None:
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
                        why=request.why,
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
            case rank_channel.Straggler():
                self._throttle.say(
                    request.rank,
                    (request.verdict.rank, request.verdict.section),
                    msg.StragglerReport(cycle=cycle.cycle, rank=request.rank, verdict=request.verdict),
                )
            case rank_channel.PaceNames() | rank_channel.PacePeriod():
                self._pace.take(cycle, request)
            case rank_channel.InProcessRestart():
                self._throttle.say(
                    request.rank,
                    msg.InProcessRestarted,
                    msg.InProcessRestarted(cycle=cycle.cycle, restart=request),
                )
            case rank_channel.GivenUp():
                self._throttle.say(
                    request.rank,
                    msg.RankGivenUp,
                    msg.RankGivenUp(cycle=cycle.cycle, rank=request.rank, why=request.why),
                )
            case rank_channel.TimeoutsChanged():
                self._timeouts_changed(cycle, request)
            case rank_channel.ProgramFailed():
                self._on_failed(cycle, request.rank, request.exit)

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
